#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# test_against.sh ROOT BENCH-AGAINST ADAPTER LIBDSOPT CXX...: tests that bench_against runs every case through the
# adapters of its two libraries, that the adapter compiles against the header of an older commit, and that the adapter's
# header, not the bench's, defines the structs that are passed to a library.
set -eu
root=$1 bench=$2 adapter=$3 library=$4
shift 4
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
passed=0
fail() { echo "$*"; echo "$passed passed, 1 failed"; exit 1; }
pass() { passed=$((passed + 1)); }
adapt() { # INCLUDE-DIR OUTPUT CXX...
    include=$1 output=$2
    shift 2
    "$@" -std=c++20 -fPIC -shared -I "$include" "$root/bench/against_adapter.cc" -o "$output" -ldl
}
run() { # OLD-ADAPTER
    "$bench" "$1" "$folder/libdsopt.so" "$adapter" "$library" --rounds 1 3x64
}
cp -L "$library" "$folder/libdsopt.so" # needs two files: dlopen() of the same file twice returns one library
cases=$(grep -c '^    {"' "$root/bench/bench_against.cc")

rows=$(run "$adapter" | grep -c '^| 3x64 | ') || rows=0
[ "$rows" = "$cases" ] || fail "$rows rows in place of $cases"
pass

echo '#include "against.h"' | "$@" -std=c++20 -fsyntax-only -x c++ -I "$root/bench" - ||
    fail "against.h does not compile by itself"
! grep -q '^#include "dsopt' "$root/bench/against.h" || fail "against.h includes a header that differs between commits"
pass

# The oldest commit that ./dev bench --against must support.
old=6953c55
if git -C "$root" cat-file -e "$old:include/dsopt_dl.h" 2>/dev/null; then
    mkdir "$folder/old"
    for header in dsopt.h dsopt_dl.h; do git -C "$root" show "$old:include/$header" >"$folder/old/$header"; done
    adapt "$folder/old" "$folder/old.so" "$@" || fail "the adapter does not compile against the header of $old"
    pass
else
    echo "$old is not in this history: not compiled against its header"
fi

mkdir "$folder/altered"
cp "$root"/include/*.h "$folder/altered"
sed -i 's/^typedef struct dsopt_step {$/&\n    int64_t altered;/' "$folder/altered/dsopt.h"
! cmp -s "$root/include/dsopt.h" "$folder/altered/dsopt.h" || fail "dsopt.h has no struct dsopt_step to alter"
adapt "$folder/altered" "$folder/altered.so" "$@" || fail "the adapter does not compile against an altered header"
! run "$folder/altered.so" >"$folder/log" 2>&1 || fail "an adapter with another struct dsopt_step works with this library"
grep -q 'DSOPT_ERR_' "$folder/log" || { cat "$folder/log"; fail "the library did not refuse the altered struct"; }
pass
echo "$passed passed, 0 failed"
