#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# c.sh LIBDSOPT.SO: builds c.c with $CC (default: cc) and runs it.
set -eu
here=$(dirname "$(realpath "$0")")
library=$(realpath "$1")
cc=${CC:-cc}
$cc --version >/dev/null 2>&1 || { echo "there is no $cc"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
$cc -std=c99 -pedantic -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Werror -O1 -pthread "-I$here/../../include" \
    "$here/c.c" "$library" "-Wl,-rpath,$(dirname "$library")" -o "$folder/c"
cd "$folder" # the program writes checkpoints
./c
