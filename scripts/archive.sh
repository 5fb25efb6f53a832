#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# archive.sh LD OBJCOPY AR IN.a OUT.a DIR: one relocatable object of a whole archive, with every symbol but dsopt_* made local.
set -eu
mkdir -p "$6"
"$1" -r --force-group-allocation --whole-archive "$4" -o "$6/dsopt.o"
"$2" --wildcard --keep-global-symbol='dsopt_*' "$6/dsopt.o"
rm -f "$5"
"$3" rcsD "$5" "$6/dsopt.o"
