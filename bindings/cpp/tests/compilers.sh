#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# compilers.sh COMPILER...: each header alone, and programs that use all of them, must compile without warnings as C++17
# and as C++20, with this compiler, g++ and clang++.
set -eu
here=$(dirname "$(realpath "$0")")
cpp=$here/.. root=$here/../../..
given=$*
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for header in dsopt.hpp $(cd "$cpp" && ls dsopt/*.hpp); do
    printf '#include <%s>\n#include <%s>\n' "$header" "$header" >"$folder/$(basename "$header").cc"
done

compile() { # STANDARD COMPILER... FILE
    standard=$1
    shift
    "$@" "-std=$standard" -fsyntax-only -Wall -Wextra -pedantic -Wconversion -Wsign-conversion -Wshadow \
        -Wnon-virtual-dtor -Wold-style-cast -Werror "-I$cpp" -isystem "$root/include"
}
expect() { # STANDARD FILE COMPILER...
    standard=$1 file=$2
    shift 2
    compile "$standard" "$@" "$file" || { echo "compilers: $* -std=$standard $file"; exit 1; }
}
for file in "$folder"/*.cc; do expect c++17 "$file" $given; done
tried=
for compiler in "$given" g++ clang++; do
    version=$($compiler --version 2>/dev/null | head -n 1) && [ -n "$version" ] || continue
    case $tried in *"$version"*) continue ;; esac
    tried="$tried $version"
    for file in "$root/examples/cpp/resume.cc" "$here/../bench.cc"; do expect c++17 "$file" $compiler; done
    for file in "$root/bindings/conformance/cpp.cc" "$here/designated.cc"; do expect c++20 "$file" $compiler; done
    echo "$version: C++17 and C++20"
done
