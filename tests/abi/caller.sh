#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# caller.sh PROGRAM: runs PROGRAM, built from examples/fp32.c, which must print its weights and write a checkpoint.
set -eu
program=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
output=$("$program")
[ "$output" = "2.00 -3.00 1.00" ] || { echo "caller: weights are $output, not 2.00 -3.00 1.00"; exit 1; }
for name in w.exp_avg w.exp_avg_sq b.exp_avg b.exp_avg_sq; do
    grep -aqF "\"$name\"" run.safetensors || { echo "caller: no $name in the checkpoint"; exit 1; }
done
[ "$(ls)" = run.safetensors ] || { echo "caller: left more than its checkpoint: $(ls)"; exit 1; }
