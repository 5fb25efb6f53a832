#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tf.sh LIBDSOPT.SO: runs tf_cases.py with the Python of scripts/framework_python.sh. Exits with 77 if there is none, or
# no compiler for the op.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cxx=${CXX:-c++} # may be two words, such as "ccache g++"
command -v "${cxx%% *}" >/dev/null || { echo "there is no ${cxx%% *} for the op"; exit 77; }
python=$("$here/../../scripts/framework_python.sh" tensorflow) || exit $?
DSOPT_CACHE=${DSOPT_CACHE:-$("$python" -c 'import sys; print(sys.prefix)')/cache} # that of bindings/python/check
export DSOPT_CACHE
DSOPT_LIBRARY=$(realpath "$1") PYTHONPATH=$here/../python exec "$python" "$here/tf_cases.py"
