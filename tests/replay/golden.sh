#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# golden.sh FOLDER PATTERN... -- COMMAND...: runs the command on all golden cases whose names match one of the patterns.
# A pattern that begins with "!" excludes cases.
set -eu
folder=$1
shift
patterns='' not=''
while [ "$1" != -- ]; do
    case $1 in
    !*) not="$not ${1#!}" ;;
    *) patterns="$patterns $1" ;;
    esac
    shift
done
shift
left_out() { # NAME
    for without in $not; do
        case $1 in $without) return 0 ;; esac
    done
    return 1
}
set -f # patterns must not be expanded here, but in the folder
for pattern in $patterns; do
    set +f
    for file in "$folder"/$pattern.safetensors; do
        set -f
        [ -f "$file" ] || { echo "golden: no case matches $pattern"; exit 1; }
        name=${file##*/}
        left_out "${name%.safetensors}" || set -- "$@" "$file"
    done
done
exec "$@"
