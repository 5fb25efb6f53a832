#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# conformance/jax.sh LIBDSOPT.SO: prints the digest of dsopt.jax. Exits with 77 after a reason if it cannot run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$("$here/../../scripts/jax_python.sh") || exit $?
DSOPT_LIBRARY=$(realpath "$1") PYTHONPATH=$here/../python exec "$python" "$here/jax_cases.py"
