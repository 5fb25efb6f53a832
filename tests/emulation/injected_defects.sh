#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: injected_defects.sh PROGRAM SANITIZERS COMPILER
# Runs every injected defect that a build of this kind must detect, and checks the reported text. SANITIZERS has the
# values of b_sanitize: none, or address, undefined, thread joined by commas.
set -u
program=$1 kinds=",$2," passed=0 failed=0
# clang does not check the alignment of structs that are written as a whole
case $2,$3 in *undefined*,gcc) kinds=",$2,undefined-gcc," ;; esac
export ASAN_OPTIONS=halt_on_error=1:detect_leaks=0:symbolize=0 UBSAN_OPTIONS=halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:symbolize=0:atexit_sleep_ms=0

judge() { # NAME GOOD WHAT
    if [ "$2" = yes ]; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "$1: $3"
    fi
}

run() { # sets output and status; the inner shell reports the signal that ended the program
    output=$(sh -c '"$0" "$1"; exit $?' "$program" "$1" 2>&1)
    status=$?
}

expect() { # KINDS NAME PATTERN
    applies=no good=no
    for kind in $(echo "$1" | tr , ' '); do
        case $kind,$kinds in all,* | *,*",$kind,"*) applies=yes ;; esac
    done
    [ $applies = yes ] || return 0
    run "$2"
    [ "$status" = 0 ] || ! echo "$output" | grep -q -e "$3" || good=yes
    judge "$2" $good "status $status, no '$3' in: $(echo "$output" | head -n 12)"
}

for name in clean both-fences fences-and-barriers early-kernel early-kernel-in-graph; do
    run $name
    [ "$status" = 0 ] && good=yes || good=no
    judge $name $good "false alarm: $output"
done

expect all write-past-block 'write past the end: byte\|AddressSanitizer: use-after-poison'
expect address write-past-shared 'global-buffer-overflow\|insufficient space for an object'
expect address write-past-dynamic-shared 'heap-buffer-overflow'
expect none,address missing-barrier 'wrong value'
expect thread missing-barrier 'data race'
expect thread missing-syncwarp 'data race'
expect thread missing-second-barrier 'data race'
expect thread missing-fence-before-ticket 'data race'
expect thread missing-fence-after-ticket 'data race'
expect thread add-without-atomic 'data race'
expect all barrier-in-branch '__syncthreads'
expect all return-before-barrier '__syncthreads'
expect all shuffle-in-branch 'at another collective'
expect all mask-without-caller 'leaves out the caller'
expect undefined-gcc misaligned-vector 'misaligned address'
expect all misaligned-cached-vector 'misaligned address'
expect undefined index-overflow 'signed integer overflow'
expect all dropped-tail 'wrong value'
for keys in 1 0; do # with protection keys, if the processor has them, and with page protection of the whole process
    export CUEMU_KEYS=$keys
    expect all host-reads-device-memory 'Segmentation fault\|SEGV'
    expect all memory-of-another-device 'Segmentation fault\|SEGV\|stack-overflow' # the memory may be next to a stack
    expect all early-kernel-reads-before-it-waits 'Segmentation fault\|SEGV\|stack-overflow' # as above
done
unset CUEMU_KEYS
expect all use-after-free 'Segmentation fault\|SEGV\|AddressSanitizer: use-after-poison'
expect all missing-event 'wrong value\|data race'
expect thread missing-event-by-luck 'data race'
expect thread missing-event-in-graph-by-luck 'data race'
expect all page-locked-memory-refilled 'wrong value\|data race'
expect thread result-read-by-luck 'data race'
expect all unwritten-memory 'wrong value'
expect all early-kernel-reads-old-values 'wrong value\|data race'
expect all early-kernel-in-graph-reads-old-values 'wrong value\|data race'
expect all early-kernel-never-waits 'without a wait for the preceding kernel'
expect all early-kernel-has-a-barrier-first 'has waited for the preceding kernel'
expect all triggers-before-a-copy 'triggered the launch of its successor, which does not wait for it: copy'
expect all triggers-before-a-kernel-that-does-not-wait \
    'triggered the launch of its successor, which does not wait for it: kernel'

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
