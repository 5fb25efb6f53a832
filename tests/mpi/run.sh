#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh MPIRUN PROGRAM SCENARIO RANKS...: runs the program with each of these numbers of ranks on this machine. Works
# as root, and with more ranks than cores. Every rank must print `rank finished`, because launchers treat exit codes
# differently.
set -u
[ "$1" != none ] || { echo "mpi: skipped, no MPI is installed"; exit 77; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
    OMPI_MCA_btl=self,vader
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_mpi_warn_on_fork=0
# MPI libraries keep memory until the end, and memory is leaked on purpose after a time-out.
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0"
case $1 in
*mpich*) cores= ;;
*) cores=--oversubscribe ;;
esac
launcher=$1 program=$2 scenario=$3
shift 3
[ $# != 0 ] || exit 2
for ranks; do
    output=$(timeout 60 "$launcher" $cores -n "$ranks" "$program" "$scenario" 2>&1)
    code=$?
    finished=$(echo "$output" | grep -o 'rank finished' | wc -l)
    [ "$finished" = "$ranks" ] && ! echo "$output" | grep -q 'line [0-9]*: not ' && continue
    echo "$output"
    echo "$scenario with $ranks ranks: $finished finished, exit code $code"
    exit 1
done
