#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# jax.sh LIBDSOPT.SO: runs jax_cases.py with the Python of scripts/framework_python.sh. Exits with 77 if there is none.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$("$here/../../scripts/framework_python.sh" jax) || exit $?
DSOPT_LIBRARY=$(realpath "$1") PYTHONPATH=$here/../python exec "$python" "$here/jax_cases.py"
