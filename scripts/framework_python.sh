#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# framework_python.sh jax|tensorflow: prints a Python that has JAX and optax, or TensorFlow: $DSOPT_JAX_PYTHON or
# $DSOPT_TENSORFLOW_PYTHON, or the Python of a venv with the versions of scripts/requirements/jax.txt or tensorflow.txt,
# created under ${DSOPT_VENVS:-build/venvs} if missing. Exits with 77 and a reason if there is none.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
name=$1
skip() { echo "$name: skipped: $1" >&2; exit 77; }

case $name in
jax) given=${DSOPT_JAX_PYTHON:-} modules="jax, optax" pythons=${PYTHON:-python3} ;;
tensorflow) # supports new versions of Python late
    given=${DSOPT_TENSORFLOW_PYTHON:-} modules="tensorflow, keras"
    pythons="${PYTHON:-python3} python3.13 python3.12 python3.11 python3.10" ;;
*) echo "usage: $0 jax|tensorflow" >&2; exit 2 ;;
esac
if [ -n "$given" ]; then
    "$given" -c "import $modules" 2>/dev/null || skip "$given has no $modules"
    echo "$given"
    exit
fi
venv=${DSOPT_VENVS:-$root/build/venvs}/$name
"$root/scripts/venv.sh" "$venv" "$name" $pythons >&2 || exit $?
echo "$venv/bin/python"
