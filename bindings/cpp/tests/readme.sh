#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# readme.sh README LIBDSOPT.SO COMPILER...: the README's C++ program must compile without warnings and print the output
# in the README.
set -eu
readme=$1 library=$(realpath "$2")
here=$(dirname "$(realpath "$0")")
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
block() { awk -v mark="\`\`\`$1" '$0 == mark { inside = 1; next } /^```$/ { if (inside) exit } inside' "$readme"; }
block cpp >"$folder/program.cc"
block text >"$folder/expected"
[ -s "$folder/program.cc" ] && [ -s "$folder/expected" ] ||
    { echo "readme: the program or its output is missing"; exit 1; }
"$@" -std=c++17 -O1 -Wall -Wextra -pedantic -Werror "-I$here/.." "-I$here/../../../include" "$folder/program.cc" \
    "$library" "-Wl,-rpath,$(dirname "$library")" -o "$folder/program"
(cd "$folder" && ./program >output) || { echo "readme: the program failed"; exit 1; }
diff "$folder/expected" "$folder/output" || { echo "readme: the program's output differs from the README"; exit 1; }
