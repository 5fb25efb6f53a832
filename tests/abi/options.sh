#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# options.sh SOURCE-DIR OPTION... -- MESON...: options for what this version lacks are refused, not ignored; all off works.
set -eu
source=$1 options=
shift
while [ "$1" != -- ]; do
    options="$options $1"
    shift
done
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for option in $options; do
    if "$@" setup "$folder/$option" "$source" "-D$option=enabled" >"$folder/log" 2>&1; then
        echo "$option: enabled was taken"
        exit 1
    fi
    grep -q "ERROR: .*option $option: not in this version" "$folder/log" ||
        { echo "$option: refused without a clear message"; tail -n 5 "$folder/log"; exit 1; }
done
"$@" setup "$folder/least" "$source" -Dauto_features=disabled >"$folder/log" 2>&1 ||
    { echo "all off: refused"; tail -n 20 "$folder/log"; exit 1; }
