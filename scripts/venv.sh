#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# venv.sh FOLDER NAME PYTHON...: creates the virtual environment FOLDER with the pins of scripts/requirements/NAME.txt,
# with the first suitable PYTHON, unless it exists already with these pins. Every file must have a hash of that list.
# Exits with 77 and a reason if there is no such Python, no network, or the list has no hashes for this system; a
# different hash is a failure. Packages without a wheel are in NAME-source.txt, and are built in that environment, with
# the packages of NAME.txt. If that fails they are omitted, with the reason. Other versions of the same packages are in
# NAME-aside.txt; they are also built, and are in FOLDER/aside, for PYTHONPATH. With the line "# no dependencies" in
# NAME.in no dependency is installed that the list does not have.
set -eu
folder=$1 name=$2
shift 2
requirements=$(dirname "$(realpath "$0")")/requirements
unreachable='Failed to establish a new connection|Connection(Reset|Refused)?Error|ProxyError|[Tt]imed out'
unreachable="$unreachable|[Tt]imeoutError|Temporary failure in name resolution|Name or service not known"
unreachable="$unreachable|Network is unreachable|No route to host"
skip() { echo "skipped: $*"; exit 77; }

# install FILE OPTION...: returns 77 if PyPI was not reached, 1 for another failure; FOLDER/log has the reason. pip
# retries, so a log can have network errors although the failure has another cause.
install() {
    list=$1
    shift
    ! "$folder/bin/python" -m pip install -q --no-input --disable-pip-version-check --retries 1 --timeout 30 \
        --require-hashes "$@" \
        -r "$list" >"$folder/log" 2>&1 || return 0
    ! grep -qE 'DO NOT MATCH THE HASHES|ResolutionImpossible|from versions: [0-9]' "$folder/log" &&
        grep -qE "$unreachable" "$folder/log" && return 77
    return 1
}

build() { # KIND OPTION...: builds the packages of NAME-KIND.txt
    kind=$1 list=$requirements/$name-$1.txt
    shift
    [ -f "$list" ] && ! cmp -s "$list" "$folder/ready-$kind" || return 0
    rm -f "$folder/ready-$kind"
    if install "$list" --no-deps --use-pep517 --no-build-isolation --no-binary :all: "$@"; then
        cp "$list" "$folder/ready-$kind"
    elif grep -q 'DO NOT MATCH THE HASHES' "$folder/log"; then
        cat "$folder/log"
        exit 1
    else
        echo "left out: $name-$kind.txt: $(tail -n 1 "$folder/log")"
    fi
}

from_source() { # builds packages without a wheel
    build source
    cmp -s "$requirements/$name-aside.txt" "$folder/ready-aside" || rm -rf "$folder/aside"
    build aside --target "$folder/aside"
    exit 0
}

# Tests that need the same environment may run concurrently: the first one creates it.
mkdir -p "$(dirname "$folder")"
if command -v flock >/dev/null; then
    exec 9>"$folder.lock"
    flock 9
fi
! cmp -s "$requirements/$name.txt" "$folder/ready" || from_source
machines=$(sed -n 's/^# machine //p' "$requirements/$name.in")
case " ${machines:-x86_64 aarch64} " in
*" $(uname -m) "*) ;;
*) skip "$name.txt has no hashes of wheels for $(uname -m)" ;;
esac
getconf GNU_LIBC_VERSION >/dev/null 2>&1 || skip "$name.txt has hashes of wheels for Linux with glibc alone"
oldest=$(sed -n 's/^# python \([0-9.]*\)$/\1/p' "$requirements/$name.in")
newest=$(sed -n 's/^# newest python \([0-9.]*\)$/\1/p' "$requirements/$name.in")
version() { echo "($(echo "$1" | tr . ,),)"; }
fits="import sys, ensurepip; sys.exit(not $(version "$oldest") <= sys.version_info[:2] <= $(version "${newest:-4.0}"))"
for python; do
    ! "$python" -c "$fits" 2>/dev/null || break
    python=
done
[ -n "$python" ] ||
    skip "there is no Python $oldest${newest:+ to $newest} or a later one with venv (Debian: python3-venv)"
"$python" -m venv --clear "$folder" || skip "$python makes no virtual environment (Debian: python3-venv)"
status=0
depends=
! grep -qx '# no dependencies' "$requirements/$name.in" || depends=--no-deps
# shellcheck disable=SC2086 # nothing or one word
install "$requirements/$name.txt" --only-binary :all: $depends || status=$?
[ $status != 77 ] || skip "PyPI was not reached for $name"
[ $status = 0 ] || { cat "$folder/log"; exit 1; }
cp "$requirements/$name.txt" "$folder/ready"
from_source
