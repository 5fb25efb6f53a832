#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# glibc_names.sh PYTHON GLIBC: prints the names that a library can use on systems with GLIBC (2.17): those of libc, libm,
# libpthread, libdl and the loader on x86-64 and aarch64, and of the functions that a linker copies from libc_nonshared.a. A name that only one of them has is followed by that one.
# PYTHON has the module ziglang (scripts/requirements/wheel.txt), whose linker makes these libraries out of its tables.
# To make the list again: ./dev package wheel creates build/venvs/wheel, then
#   packaging/wheel/glibc_names.sh build/venvs/wheel/bin/python 2.17 >packaging/wheel/glibc-2.17.txt
set -eu
python=$1 glibc=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo 'int unused;' >"$work/empty.c"
for processor in aarch64 x86_64; do
    ZIG_GLOBAL_CACHE_DIR=$work/$processor ZIG_LOCAL_CACHE_DIR=$work/$processor "$python" -m ziglang cc \
        -target "$processor-linux-gnu.$glibc" -shared "$work/empty.c" -lpthread -ldl -lm -o "$work/$processor.so" >&2
    {
        for library in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 libld.so.2; do
            # Only the default version of a name can be linked.
            nm -D --defined-only "$work/$processor"/o/*/"$library" | sed -n 's/.* \([^ @]*\)@@.*/\1/p'
        done
        nm --defined-only "$work/$processor"/o/*/libc_nonshared.a | sed -n 's/.* [TW] //p'
    } | LC_ALL=C sort -u >"$work/$processor.names"
done
cd "$work"
echo "# Names of glibc $glibc, made by packaging/wheel/glibc_names.sh"
{
    LC_ALL=C comm -12 aarch64.names x86_64.names
    LC_ALL=C comm -23 aarch64.names x86_64.names | sed 's/$/ aarch64/'
    LC_ALL=C comm -13 aarch64.names x86_64.names | sed 's/$/ x86_64/'
} | LC_ALL=C sort
