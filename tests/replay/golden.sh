#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# golden.sh FOLDER PATTERN... -- COMMAND...: runs the command on all golden cases whose name matches one of the patterns.
set -eu
folder=$1
shift
patterns=
while [ "$1" != -- ]; do
    patterns="$patterns $1"
    shift
done
shift
set -f # the patterns match in the folder, not here
for pattern in $patterns; do
    set +f
    for file in "$folder"/$pattern.safetensors; do
        [ -f "$file" ] || { echo "golden: no case is called $pattern"; exit 1; }
        set -- "$@" "$file"
    done
done
exec "$@"
