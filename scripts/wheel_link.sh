#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# wheel_link.sh PYTHON GLIBC COMPILER OUTPUT SONAME MAP OBJECT...: links a shared library for systems with GLIBC (2.17) or a later one from
# objects that gcc made here. The linker is that of zig, which PYTHON has as a module: it knows the symbols of every glibc. libstdc++ and
# the unwinder are in the library, and hidden by MAP. What they need of a later glibc is among the objects: packaging/wheel/runtime.c.
set -eu
python=$1 glibc=$2 compiler=$3 output=$4 soname=$5 map=$6
shift 6
target=$($compiler -dumpmachine | sed 's/-.*//')-linux-gnu.$glibc
for archive in libstdc++.a libgcc.a libgcc_eh.a; do # in this order: each needs the next ones
    path=$($compiler -print-file-name=$archive)
    [ -f "$path" ] || { echo "wheel_link.sh: $compiler has no $archive"; exit 1; }
    set -- "$@" "$path"
done
# zig's own libc++ would be another one than the headers'. Symbols that are nowhere must be errors here, and not on the system of a user.
exec "$python" -m ziglang c++ -target "$target" -shared -nostdlib++ -s -o "$output" "$@" -lpthread -ldl -lm -Wl,--no-undefined \
    -Wl,--gc-sections -Wl,-soname,"$soname" -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,--version-script="$map"
