#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# venv.sh FOLDER NAME PYTHON...: makes the virtual environment FOLDER with what scripts/requirements/NAME.txt pins, by the first
# PYTHON that the requirements are for, unless it is there already with these pins. Every file must have a hash of that list.
# Exits with 77 and a reason where there is no such Python or no network; a hash that differs is a failure.
set -eu
folder=$1 name=$2
shift 2
requirements=$(dirname "$(realpath "$0")")/requirements
unreachable='Failed to establish a new connection|Connection(Reset|Refused)?Error|ProxyError|[Tt]imed out|[Tt]imeoutError'
unreachable="$unreachable|Temporary failure in name resolution|Name or service not known|Network is unreachable|No route to host"
skip() { echo "skipped: $*"; exit 77; }

! cmp -s "$requirements/$name.txt" "$folder/ready" || exit 0
oldest=$(sed -n 's/^# python \([0-9.]*\)$/\1/p' "$requirements/$name.in")
newest=$(sed -n 's/^# newest python \([0-9.]*\)$/\1/p' "$requirements/$name.in")
version() { echo "($(echo "$1" | tr . ,),)"; }
fits="import sys, ensurepip; sys.exit(not $(version "$oldest") <= sys.version_info[:2] <= $(version "${newest:-4.0}"))"
for python; do
    ! "$python" -c "$fits" 2>/dev/null || break
    python=
done
[ -n "$python" ] || skip "there is no Python $oldest${newest:+ to $newest} or a later one with venv (Debian: python3-venv)"
mkdir -p "$(dirname "$folder")"
"$python" -m venv --clear "$folder" || skip "$python makes no virtual environment (Debian: python3-venv)"
if ! "$folder/bin/python" -m pip install -q --no-input --disable-pip-version-check --retries 1 --timeout 30 --require-hashes \
    --only-binary :all: -r "$requirements/$name.txt" >"$folder/log" 2>&1; then
    # pip retries, so a log can have errors of the network and another cause of the failure.
    if ! grep -qE 'DO NOT MATCH THE HASHES|ResolutionImpossible|from versions: [0-9]' "$folder/log" &&
        grep -qE "$unreachable" "$folder/log"; then
        skip "PyPI was not reached for $name"
    fi
    cat "$folder/log"
    exit 1
fi
cp "$requirements/$name.txt" "$folder/ready"
