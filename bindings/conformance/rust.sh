#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# rust.sh LIBDSOPT.SO: builds and runs the example `conformance` of the crate dsopt.
set -eu
here=$(dirname "$(realpath "$0")")
library=$(realpath "$1")
cargo --version >/dev/null 2>&1 || { echo "there is no cargo"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
ln -s "$library" "$folder/libdsopt.so"
ln -s "$library" "$folder/libdsopt.so.2"
export DSOPT_LIB_DIR="$folder" LD_LIBRARY_PATH="$folder"
cd "$folder" # the program writes checkpoints
cargo run --quiet --offline --manifest-path "$here/../rust/Cargo.toml" --target-dir "$folder/target" \
    --example conformance
