#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# requirements.sh [--keep] [NAME...]: updates the pins in scripts/requirements: resolves NAME.in, the requirements, to
# the newest versions on PyPI, and writes NAME.txt. It has every version, for all Pythons from the oldest one that
# NAME.in names, and the hashes of the files that these can install on Linux with glibc (requirements_pins.py). With
# --keep the versions of NAME.txt remain where they are possible. Without a NAME it updates all. uv resolves for all
# Pythons together, pip only for the Python that runs it. NAME-source.in has packages that are built from source in the
# environment of NAME.txt, which has their dependencies; NAME-aside.in has packages that are built likewise, with other
# versions. With the line "# no dependencies" NAME.in has all packages that are installed. Needs Python 3.11.
set -eu
newest=3.15 # of all Pythons, unless NAME.in names another one: without a limit uv wants wheels for Pythons to come
cd "$(dirname "$0")/requirements"
keep=
[ "${1-}" != --keep ] || { keep=1; shift; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check --require-hashes --only-binary :all: -r uv.txt
mkdir "$work/project" # uv reads the target systems there
[ $# != 0 ] || set -- *.in
for name; do
    name=${name%.in}
    oldest=$(sed -n 's/^# python 3\.\([0-9]*\)$/\1/p' "$name.in")
    last=$(sed -n 's/^# newest python 3\.\([0-9]*\)$/\1/p' "$name.in")
    last=${last:-${newest#3.}}
    machines=$(sed -n 's/^# machine //p' "$name.in")
    machines=${machines:-x86_64 aarch64}
    {
        printf '[project]\nname = "requirements"\nversion = "0"\n[tool.uv]\nenvironments = ['
        for machine in $machines; do
            printf '"sys_platform == %s and platform_machine == %s and python_full_version < %s", ' \
                "'linux'" "'$machine'" "'3.$((last + 1))'"
        done
        echo ']'
    } >"$work/project/pyproject.toml"
    : >"$work/kept"
    [ -z "$keep" ] || grep == "$name.txt" | sed 's/ \\$//' >"$work/kept"
    depends=
    case $name in *-source | *-aside) depends=--no-deps ;; esac
    ! grep -qx '# no dependencies' "$name.in" || depends=--no-deps
    (
        here=$PWD
        cd "$work/project"
        "$work/venv/bin/uv" pip compile --quiet --universal --format pylock.toml --no-annotate --no-header $depends \
            --python-version "3.$oldest" --constraint "$work/kept" "$here/$name.in" \
            -o "$work/pylock.$name.toml" >/dev/null
    )
    # shellcheck disable=SC2086 # a list
    "$work/venv/bin/python" ../requirements_pins.py "$oldest" "$last" "$work/pylock.$name.toml" $machines >"$work/pins"
    { echo "# Written by scripts/requirements.sh from $name.in."; cat "$work/pins"; } >"$name.txt"
    echo "$name: $(grep -c '==' "$name.txt") versions"
done
