#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# archive.sh LD OBJCOPY NM AR IN.a OUT.a DIR COMPILER...: makes one relocatable object of a whole archive. Every symbol
# except dsopt_* is local; dsopt_* can be linked against, but is hidden, so a shared object that contains the library
# does not export it.
set -eu
ld=$1 objcopy=$2 nm=$3 ar=$4 in=$5 out=$6 dir=$7
shift 7
mkdir -p "$dir"
# The linker uses the most restrictive visibility of all inputs. An additional object without code makes it hidden.
{
    echo '.section .note.GNU-stack,"",%progbits'
    "$nm" -g --defined-only "$in" | sed -n 's/^[0-9a-f]* [A-Za-z] \(dsopt_[A-Za-z0-9_]*\)$/.hidden \1/p' | sort
} >"$dir/hidden.s"
"$@" -c "$dir/hidden.s" -o "$dir/hidden.o"
"$ld" -r --force-group-allocation --whole-archive "$in" "$dir/hidden.o" -o "$dir/dsopt.o"
"$objcopy" --wildcard --keep-global-symbol='dsopt_*' "$dir/dsopt.o"
rm -f "$out"
"$ar" rcsD "$out" "$dir/dsopt.o"
