#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dl.sh INCLUDE-DIR LIBDSOPT C-COMPILER C++-COMPILER: programs in C and C++ that are not linked to dsopt load it with
# dsopt_dl.h. For other libraries they get an error text that names the reason.
set -eu
here=$(dirname "$(realpath "$0")")
include=$1 library=$(realpath "$2") cc=$3 cxx=$4
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
    echo "dl: $1"
    exit 1
}

c() { $cc -x c -std=c99 "$@"; }
cpp() { $cxx -x c++ -std=c++11 "$@"; }
for language in c cpp; do
    for program in caller_dl refused_dl; do
        $language -O2 -Wall -Wextra -Wpedantic -Werror "-I$include" "$here/$program.c" -o "$folder/$program-$language" \
            -ldl ||
            fail "$program as $language: compiler"
    done
    ! readelf -dW "$folder/caller_dl-$language" | grep -q 'NEEDED.*libdsopt' || fail "$language: linked to dsopt"
    # By its default name, and by a path.
    LD_LIBRARY_PATH=$(dirname "$library") "$here/caller.sh" "$folder/caller_dl-$language"
    output=$(cd "$folder" && "./caller_dl-$language" "$library") || fail "$language: by path"
    [ "$output" = "2.00 -3.00 1.00" ] || fail "$language: by path, weights are $output"
done

fake() { echo "$2" | $cc -x c -shared -fPIC -o "$folder/$1.so" -; }
fake empty "int nothing;"
fake other-abi "int dsopt_abi_version(void) { return 9999; }"
fake first-only "#include \"$include/dsopt.h\"
int32_t dsopt_abi_version(void) { return DSOPT_ABI_VERSION; }"
echo text >"$folder/text.so"

refused() { # LIBRARY WORDS
    for language in c cpp; do
        output=$("$folder/refused_dl-$language" "$folder/$1.so") || fail "$1 as $language: exit status $?, $output"
        case $output in
        *"$2"*) ;;
        *) fail "$1 as $language: says '$output', not '$2'" ;;
        esac
    done
}
refused absent "absent.so"
refused text "text.so"
refused empty "no dsopt_abi_version"
refused other-abi "another DSOPT_ABI_VERSION"
refused first-only "no dsopt_version"
output=$(LD_LIBRARY_PATH='' "$folder/caller_dl-c" "$folder/absent.so" 2>&1) && fail "a library that is absent is loaded"
case $output in *absent.so*) ;; *) fail "absent: $output" ;; esac
