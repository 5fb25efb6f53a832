#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# readme.sh README.md: the C program shown there is caller_c.c, which other tests compile and run.
set -eu
program=$(dirname "$0")/caller_c.c
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$1" | diff - "$program" ||
    { echo "readme: the C program in it is not caller_c.c"; exit 1; }
