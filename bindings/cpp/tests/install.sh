#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh pkg-config|cmake|plugin SOURCE-DIR BUILD-DIR TOOLKIT CXX MESON...: installs the build, moves the installed
# tree somewhere else, and builds and runs examples/cpp against it with a static copy of dsopt, using its Makefile and
# its CMakeLists.txt. TOOLKIT is the folder of the CUDA toolkit that a static link needs, or `none`.
set -eu
how=$1 source=$2 build=$3 toolkit=$4 cxx=$5
shift 5
for tool in pkg-config make cmake; do
    case $how:$tool in cmake:make | pkg-config:cmake | plugin:cmake) continue ;; esac
    $tool --version >/dev/null 2>&1 || { echo "install: skipped, $tool is not installed"; exit 77; }
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
    echo "install: $1"
    exit 1
}
logged() { "$@" >"$folder/log" 2>&1 || { cat "$folder/log"; fail "$1 failed"; }; }

DESTDIR=$folder/root logged "$@" install -C "$build" --no-rebuild
moved=$folder/moved
mv "$folder/root$(sed -n 's/^prefix=//p' "$build/meson-private/dsopt.pc")" "$moved"
PKG_CONFIG_PATH=$(dirname "$(find "$moved" -name dsopt.pc)")
libdir=$(dirname "$PKG_CONFIG_PATH")
# The .pc file contains the prefix of the build. It is set to the current folder of the tree, as a packager would.
sed -i "s|^prefix=.*|prefix=$moved|" "$PKG_CONFIG_PATH/dsopt.pc"
for dir in lib64 lib targets/x86_64-linux/lib; do
    [ ! -f "$toolkit/$dir/libcudart_static.a" ] ||
        sed -i "s|^cudalibdir=.*|cudalibdir=$toolkit/$dir|" "$PKG_CONFIG_PATH/dsopt.pc"
done
export PKG_CONFIG_PATH
examples=$folder/examples
cp -r "$source/examples/cpp" "$examples" # a copy, because the build must not need the source tree

runs() { # PROGRAM OUTPUT ARGUMENT...: without libdsopt.so
    program=$1 expected=$2
    shift 2
    ! readelf -dW "$program" | grep -q 'NEEDED.*libdsopt' || fail "$program: linked to the shared library"
    output=$("$program" "$@") || fail "$program failed"
    [ "$output" = "$expected" ] || fail "$program prints '$output', not '$expected'"
}
resumed="learnt: yes, the same bits: yes"
strict="-O1 -Wall -Wextra -Wpedantic -Werror"
case $how in
pkg-config)
    logged make -C "$examples" resume "CXX=$cxx" "CXXFLAGS=$strict"
    runs "$examples/resume" "$resumed"
    # Also with the shared library, as most programs are linked.
    $cxx -std=c++17 $strict "$examples/resume.cc" $(pkg-config --cflags --libs dsopt) -o "$folder/shared" ||
        fail "shared"
    readelf -dW "$folder/shared" | grep -q 'NEEDED.*libdsopt' || fail "shared: not linked to the shared library"
    [ "$(LD_LIBRARY_PATH=$libdir "$folder/shared")" = "$resumed" ] || fail "shared: the output differs"
    ;;
plugin)
    logged make -C "$examples" host plugin.so "CXX=$cxx" "CXXFLAGS=$strict"
    ! readelf -dW "$examples/plugin.so" | grep -q 'NEEDED.*libdsopt' || fail "plugin.so: linked to the shared library"
    # Ignores templates of the standard library. The entry function must be the only other visible symbol.
    seen=$(nm -DC --defined-only "$examples/plugin.so" | cut -d' ' -f3- |
        grep -v -e '\bstd::' -e '^_edata$' -e '^_end$' -e '^__bss_start$')
    [ "$seen" = fit ] || fail "plugin.so exports $seen"
    runs "$examples/host" "1.0 -2.0 3.0 0.5 " "$examples/plugin.so"
    ;;
cmake)
    set -- "-DCMAKE_PREFIX_PATH=$moved" "-DCMAKE_CXX_FLAGS=$strict"
    [ "$toolkit" = none ] || set -- "$@" "-DCUDAToolkit_ROOT=$toolkit"
    CXX=$cxx logged cmake -G Ninja -S "$examples" -B "$folder/build" "$@"
    logged cmake --build "$folder/build"
    runs "$folder/build/resume" "$resumed"
    runs "$folder/build/host" "1.0 -2.0 3.0 0.5 " "$folder/build/plugin.so"
    ;;
esac
