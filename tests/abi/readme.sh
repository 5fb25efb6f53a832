#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# readme.sh TEXT PROGRAM: the C program shown in a text is one that other tests compile and run.
set -eu
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$1" | diff - "$2" ||
    { echo "readme: the C program in ${1##*/} is not ${2##*/}"; exit 1; }
