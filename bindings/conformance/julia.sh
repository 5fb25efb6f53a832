#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# julia.sh LIBDSOPT.SO: runs the cases in Julia. JULIA names the program to use.
set -eu
julia=${JULIA:-julia}
command -v "$julia" >/dev/null || { echo "there is no $julia"; exit 77; }
DSOPT_LIBRARY=$(realpath "$1")
cd "$(dirname "$(realpath "$0")")"
# No files are written next to the sources or into the caller's own depot.
depot=$(mktemp -d)
trap 'rm -rf "$depot"' EXIT
export DSOPT_LIBRARY JULIA_NUM_THREADS=2 JULIA_DEPOT_PATH="$depot" JULIA_LOAD_PATH="../julia:@stdlib"
"$julia" --startup-file=no julia.jl
