#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# requirements.sh [NAME...]: updates the pins in scripts/requirements: resolves NAME.in, the requirements, to the newest
# versions on PyPI, and writes NAME.txt with every version and hash, for all Pythons from the oldest one that NAME.in
# names. Without a NAME it updates all. uv resolves for all Pythons together, pip only for the Python that runs it.
# NAME-source.in has packages that are built from source in the environment of NAME.txt, which has their dependencies;
# NAME-aside.in has packages that are built likewise, with other versions.
set -eu
cd "$(dirname "$0")/requirements"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check --require-hashes --only-binary :all: -r uv.txt
mkdir "$work/project"
printf '[project]\nname = "requirements"\nversion = "0"\n[tool.uv]\nenvironments = ["sys_platform == %s"]\n' "'linux'" \
    >"$work/project/pyproject.toml"
[ $# != 0 ] || set -- *.in
for name; do
    name=${name%.in}
    oldest=$(sed -n 's/^# python \([0-9.]*\)$/\1/p' "$name.in")
    case $name in *-source | *-aside) depends=--no-deps ;; *) depends= ;; esac
    (
        here=$PWD
        cd "$work/project" # uv reads the target systems there
        "$work/venv/bin/uv" pip compile --quiet --universal --generate-hashes --no-annotate --no-header --upgrade \
            $depends \
            --python-version "$oldest" "$here/$name.in" -o "$work/$name.txt"
    )
    { echo "# Written by scripts/requirements.sh from $name.in."; cat "$work/$name.txt"; } >"$name.txt"
    echo "$name: $(grep -c '==' "$name.txt") versions"
done
