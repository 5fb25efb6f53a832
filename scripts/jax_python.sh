#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# jax_python.sh: prints a Python that has JAX and optax: $DSOPT_JAX_PYTHON, or the Python of a venv with the versions of
# scripts/requirements/jax.txt, created under ${DSOPT_VENVS:-build/venvs} if missing. Exits with 77 and a reason if
# there is none.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
skip() { echo "jax: skipped: $1" >&2; exit 77; }

if [ -n "${DSOPT_JAX_PYTHON:-}" ]; then
    "$DSOPT_JAX_PYTHON" -c 'import jax, optax' 2>/dev/null || skip "$DSOPT_JAX_PYTHON has no jax and optax"
    echo "$DSOPT_JAX_PYTHON"
    exit
fi
venv=${DSOPT_VENVS:-$root/build/venvs}/jax
"$root/scripts/venv.sh" "$venv" jax "${PYTHON:-python3}" >&2 || exit $?
echo "$venv/bin/python"
