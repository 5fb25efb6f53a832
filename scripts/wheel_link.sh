#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# wheel_link.sh PYTHON GLIBC COMPILER OUTPUT SONAME MAP OBJECT...: links a shared library for systems with GLIBC (2.17)
# or a later one from objects that gcc made here. The linker is zig's, a module of PYTHON: it has the symbols of every
# glibc. libstdc++ and the unwinder are in the library, and hidden by MAP. The functions of later glibc versions that
# they need are among the objects: packaging/wheel/runtime.c.
set -eu
python=$1 glibc=$2 compiler=$3 output=$4 soname=$5 map=$6
shift 6
target=$($compiler -dumpmachine | sed 's/-.*//')-linux-gnu.$glibc
for archive in libstdc++.a libgcc.a libgcc_eh.a; do # in this order: each needs the next ones
    path=$($compiler -print-file-name=$archive)
    [ -f "$path" ] || { echo "wheel_link.sh: $compiler has no $archive"; exit 1; }
    set -- "$@" "$path"
done
librt=
case " $* " in *libcudart_static.a*) librt=-lrt ;; esac # shm_open is in librt before glibc 2.34
# zig's libc++ would not match the headers. Missing symbols must be errors here, not on the user's system.
exec "$python" -m ziglang c++ -target "$target" -shared -nostdlib++ -s -o "$output" "$@" -lpthread -ldl -lm $librt \
    -Wl,--no-undefined \
    -Wl,--gc-sections -Wl,-soname,"$soname" -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,--version-script="$map"
