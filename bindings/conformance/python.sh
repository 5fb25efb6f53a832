#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python.sh LIBDSOPT.SO: runs python_cases.py with $PYTHON (default: python3), which needs no package.
set -eu
python=${PYTHON:-python3}
$python -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null ||
    { echo "there is no Python 3.9 or later"; exit 77; }
DSOPT_LIBRARY=$(realpath "$1") exec $python "$(dirname "$(realpath "$0")")/python_cases.py"
