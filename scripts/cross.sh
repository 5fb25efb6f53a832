#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cross.sh BUILD: builds the library for aarch64 in BUILD/aarch64 with Debian's cross compiler, and runs it under
# qemu-user: all recorded cases, and digests of training runs, which must equal this machine's, with its highest
# instruction set and with generic code. Checks the machine code for loops over elements that are not vectorised. Ends
# with `N passed, N failed`.
set -eu
build=$1/aarch64 prefix=aarch64-linux-gnu
root=$(cd "$(dirname "$0")/.." && pwd)
passed=0 failed=0
note() { # STATUS WORDS...
    status=$1
    shift
    [ "$status" = 0 ] && passed=$((passed + 1)) && echo "PASS $*" || { failed=$((failed + 1)) && echo "FAIL $*"; }
}

"$root/scripts/cross_file.sh" "$build"
options="--buildtype=release -Dwerror=true -Dtests=disabled -Dbench=disabled -Dbindings=disabled -Dcuda=disabled"
# shellcheck disable=SC2086 # options
log=$( ([ -f "$build/library/build.ninja" ] || meson setup "$build/library" "$root" --cross-file "$build/cross.ini" \
    $options) 2>&1 &&
    ninja -C "$build/library" 2>&1) || { echo "$log" | tail -n 30; note 1 "the library builds"; exit 1; }

program() { # COMPILER LIBRARY-FOLDER OUTPUT SOURCE...
    compiler=$1 folder=$2 output=$3
    shift 3
    $compiler -std=c++20 -O2 -ffp-contract=off -Wno-psabi -I"$root/include" -I"$root/tests" -I"$root/src" \
        -I"$root/bench" -isystem "$build/include" -DDSOPT_SHAPES="\"$root/bench/shapes\"" -DCPU_ONLY "$@" \
        -L"$folder" -ldsopt -ldl -lpthread -Wl,-rpath,"$folder" -o "$output"
}
program $prefix-g++ "$build/library" "$build/dsopt-replay" "$root"/tests/replay/*.cc \
    "$root/tests/support/numbers.cc" "$root/tests/support/handles.cc" "$root/tests/support/device.cc"
program $prefix-g++ "$build/library" "$build/digests" "$root/tests/cuda/digests.cc" "$root/tests/support/numbers.cc"
program g++ "$1" "$build/digests-here" "$root/tests/cuda/digests.cc" "$root/tests/support/numbers.cc"

run="qemu-aarch64 -L /usr/$prefix"
golden=$("$root/tests/replay/golden.sh" "$root/tests/golden" '*' -- $run "$build/dsopt-replay") || :
note "$(echo "$golden" | grep -qE '^[1-9][0-9]* passed, 0 failed$'; echo $?)" \
    "recorded cases: $(echo "$golden" | tail -n 1)"
wanted=$("$build/digests-here" 3x9000 12)
note "$([ "$($run "$build/digests" 3x9000 12)" = "$wanted" ]; echo $?)" "digests are those of this machine"
note "$([ "$(DSOPT_ISA=generic "$build/digests-here" 3x9000 12)" = "$wanted" ]; echo $?)" \
    "and those of its generic loops"
python3 "$root/scripts/scalar_loops.py" $prefix-objdump "$build/library/libdsopt.so" >"$build/loops" 2>&1 && status=0 ||
    status=1
note $status "loops over elements: $(tail -n 1 "$build/loops")"
[ $status = 0 ] || cat "$build/loops"
echo "$passed passed, $failed failed"
[ $failed = 0 ]
