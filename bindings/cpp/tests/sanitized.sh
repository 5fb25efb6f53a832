#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sanitized.sh LIBDSOPT.SO COMPILER...: runs the tests of the headers under the address and the undefined-behaviour
# sanitizer.
set -eu
here=$(dirname "$(realpath "$0")")
library=$(realpath "$1")
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo 'int main() { return 0; }' >"$folder/empty.cc"
flags="-fsanitize=address,undefined -fno-sanitize-recover=all"
"$@" $flags "$folder/empty.cc" -o "$folder/empty" 2>/dev/null && "$folder/empty" ||
    { echo "no sanitizers for $*"; exit 77; }
"$@" -std=c++17 -O0 -g1 $flags "-I$here/.." "-I$here/../../../include" "$here"/test_*.cc "$library" -lgtest \
    -lgtest_main -pthread "-Wl,-rpath,$(dirname "$library")" -o "$folder/tests"
# The sanitizers of gcc 12 fail occasionally if the kernel randomizes addresses by more bits than they expect.
wrapper="setarch $(uname -m) -R"
$wrapper true 2>/dev/null || wrapper=
ASAN_OPTIONS=detect_stack_use_after_return=1 $wrapper "$folder/tests" --gtest_brief=1
