#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# all.sh [--check]: writes the committed generated files or, with --check, names those that are stale and fails if there
# are any. The order matters: rust_sys and julia_structs read the output of abi.
set -eu
cd "$(dirname "$0")/../.."
case $* in '' | --check) ;; *) sed -n 's/^# \(all.sh [^:]*\):.*/usage: \1/p' scripts/generate/all.sh >&2; exit 2 ;; esac
status=0
for script in abi rust_sys julia_structs options; do
    python3 scripts/generate/$script.py "$@" || status=1
done
model=bench/results/gpu-model.md
page=$(python3 bench/gpu_model.py --page)
if [ $# = 0 ]; then
    echo "$page" >$model
elif [ "$page" != "$(cat $model)" ]; then
    echo "$model is not what bench/gpu_model.py --page prints" >&2
    status=1
fi
exit $status
