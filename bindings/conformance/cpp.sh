#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cpp.sh LIBDSOPT.SO: builds cpp.cc with $CXX (default: c++) and runs it.
set -eu
here=$(dirname "$(realpath "$0")")
library=$(realpath "$1")
cxx=${CXX:-c++}
$cxx --version >/dev/null 2>&1 || { echo "there is no $cxx"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
$cxx -std=c++17 -pedantic -Wall -Wextra -Werror -O1 -pthread "-I$here/../../include" "-I$here/../cpp" "$here/cpp.cc" \
    "$library" "-Wl,-rpath,$(dirname "$library")" -o "$folder/cpp"
cd "$folder" # the program writes checkpoints
./cpp
