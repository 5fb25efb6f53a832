#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh shared|static|plugin|cmake BUILD-DIR CC MESON...: installs the build, moves the installed tree somewhere else, and
# builds and runs programs against it, as a user would with pkg-config or CMake.
set -eu
here=$(dirname "$(realpath "$0")")
how=$1 build=$2 cc=$3
shift 3
tool=pkg-config
[ "$how" != cmake ] || tool=cmake
command -v $tool >/dev/null || { echo "install: skipped, $tool is not installed"; exit 77; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
    echo "install: $1"
    exit 1
}

DESTDIR=$folder/root "$@" install -C "$build" --no-rebuild >"$folder/log" 2>&1 || { cat "$folder/log"; fail "meson install"; }
prefix=$(sed -n 's/^prefix=//p' "$build/meson-private/dsopt.pc")
moved=$folder/moved
mv "$folder/root$prefix" "$moved"
PKG_CONFIG_PATH=$(dirname "$(find "$moved" -name dsopt.pc)")
export PKG_CONFIG_PATH

compile() { # PROGRAM SOURCE FLAGS...
    program=$1 source=$2
    shift 2
    $cc -std=c99 -pedantic -Wall -Wextra -Werror "$here/$source" "$@" -o "$folder/$program" || fail "$program: compiler"
}
# Without the ends of sections, which gold puts into every shared object.
exports() { nm -D --defined-only "$folder/$1" | awk '$3 !~ /^(__bss_start|_edata|_end)$/ { print $3 }'; }
flags() { pkg-config "--define-variable=prefix=$moved" "$@" dsopt; }
static_flags() { flags --static --cflags --libs | sed 's/-ldsopt/-l:libdsopt.a/'; }
needs_library() { readelf -dW "$folder/$1" | grep -q 'NEEDED.*libdsopt'; }
runs() { "$here/caller.sh" "$folder/$1" || fail "$1: does not run"; }

case $how in
shared)
    compile shared caller_c.c $(flags --cflags --libs)
    needs_library shared || fail "shared: not linked to the shared library"
    LD_LIBRARY_PATH=$(flags --variable=libdir) runs shared
    ;;
plugin) # the functions are declared with default visibility: it is the archive that keeps them inside
    compile plugins plugins.c $(flags --cflags --libs) -ldl
    for linker in bfd gold lld; do
        $cc -fuse-ld=$linker -x c -shared -o /dev/null /dev/null 2>/dev/null || continue
        for entry in first second; do
            compile $entry.so plugin.c -fPIC -shared -fuse-ld=$linker -DENTRY=$entry $(static_flags)
            ! needs_library $entry.so || fail "$entry.so: linked to the shared library"
            [ "$(exports $entry.so)" = $entry ] || fail "$entry.so, linked by $linker, exports $(exports $entry.so | tr '\n' ' ')"
        done
        LD_LIBRARY_PATH=$(flags --variable=libdir) "$folder/plugins" "$folder/first.so" "$folder/second.so" ||
            fail "plugins, linked by $linker"
        tried=yes
    done
    [ "${tried-}" = yes ] || fail "no linker was tried"
    ;;
static) # -l:libdsopt.a, because plain -ldsopt prefers the shared library; -static takes every archive
    compile archive caller_c.c $(static_flags)
    compile all-static caller_c.c -static $(flags --static --cflags --libs)
    for program in archive all-static; do
        ! needs_library $program || fail "$program: linked to the shared library"
        runs $program
    done
    ;;
cmake)
    cp "$here/caller_c.c" "$folder"
    cat >"$folder/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.13)
project(caller C)
foreach(version 0.0 0.2 1.0)
  find_package(dsopt ${version} QUIET CONFIG)
  if(dsopt_FOUND)
    message(FATAL_ERROR "taken for version ${version}")
  endif()
endforeach()
find_package(dsopt 0.1 REQUIRED CONFIG)
add_executable(cmake-shared caller_c.c)
target_link_libraries(cmake-shared dsopt::dsopt)
add_executable(cmake-static caller_c.c)
target_link_libraries(cmake-static dsopt::static)
END
    { cmake -G Ninja -S "$folder" -B "$folder" "-DCMAKE_PREFIX_PATH=$moved" "-DCMAKE_C_COMPILER=${cc%% *}" &&
        cmake --build "$folder"; } >"$folder/log" 2>&1 || { cat "$folder/log"; fail cmake; }
    needs_library cmake-shared || fail "cmake-shared: not linked to the shared library"
    ! needs_library cmake-static || fail "cmake-static: linked to the shared library"
    runs cmake-shared
    runs cmake-static
    ;;
esac
