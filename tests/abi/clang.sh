#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# clang.sh INCLUDE-DIR: clang must not warn about the headers and their documentation comments.
set -eu
command -v clang >/dev/null || { echo "clang: skipped, clang is not installed"; exit 77; }
for header in dsopt.h dsopt_dl.h; do
    for standard in c99 c11 c++11 c++17; do
        case $standard in
        c++*) language=c++ ;;
        *) language=c ;;
        esac
        echo "#include \"$header\"" | clang -x $language -std=$standard -fsyntax-only "-I$1" -Wall -Wextra -Wpedantic \
            -Wdocumentation -Werror - || { echo "clang: $header as $standard"; exit 1; }
    done
done
