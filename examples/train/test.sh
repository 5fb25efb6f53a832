#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# test.sh PROGRAM SOURCE CC: tests that PROGRAM, built from SOURCE, learns and writes a checkpoint; that fewer than 25
# lines add the optimizer; and that without them SOURCE is the original training program, which needs no dsopt.
set -eu
program=$(realpath "$1") source=$2 cc=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
    echo "train: $1"
    exit 1
}

begun=$(grep -c '// dsopt {$' "$source")
[ "$begun" -gt 3 ] && [ "$begun" = "$(grep -c '// dsopt }$' "$source")" ] || fail "the marks do not match"
sed '/\/\/ dsopt {$/,/\/\/ dsopt }$/d' "$source" >"$folder/before.c"
lines=$(($(wc -l <"$source") - $(wc -l <"$folder/before.c") - 2 * begun))
[ "$lines" -gt 5 ] && [ "$lines" -lt 25 ] || fail "the optimizer takes $lines lines"
! sed '1,6d' "$folder/before.c" | grep -i dsopt || fail "dsopt is in lines without a mark"
$cc -std=c99 -pedantic -Wall -Wextra -Werror "$folder/before.c" -lm -o "$folder/before" ||
    fail "the program does not compile without dsopt"

cd "$folder"
"$program" >said || fail "the program failed"
"$folder/before" 1 >plain || fail "the program without dsopt failed"
first=$(sed -n 's/^step   0 .*loss //p' said) last=$(sed -n 's/^step 599 .*loss //p' said)
[ "$first" = "$(sed -n 's/^step   0 .*loss //p' plain)" ] || fail "the first losses differ"
awk "BEGIN { exit !($first > 3 && $last < 0.5) }" || { cat said; fail "the loss did not fall"; }
grep -aq '"w1.exp_avg_sq"' train.safetensors || fail "no state in the checkpoint"
echo "$lines lines add the optimizer; loss $first to $last"
