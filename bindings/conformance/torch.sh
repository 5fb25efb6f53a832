#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# torch.sh LIBDSOPT.SO: runs torch_cases.py with $PYTHON (default: python3).
set -eu
here=$(dirname "$(realpath "$0")")
DSOPT_LIBRARY=$(realpath "$1") PYTHONPATH="$here/../python${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" \
    "$here/torch_cases.py"
