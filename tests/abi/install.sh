#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh shared|static|cmake BUILD-DIR CC MESON...: installs the build, moves the installed tree somewhere else, and
# builds and runs caller_c.c against it, as a user would with pkg-config or CMake.
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

compile() { # PROGRAM FLAGS...
    program=$1
    shift
    $cc -std=c99 -pedantic -Wall -Wextra -Werror "$here/caller_c.c" "$@" -o "$folder/$program" || fail "$program: compiler"
}
flags() { pkg-config "--define-variable=prefix=$moved" "$@" dsopt; }
needs_library() { readelf -dW "$folder/$1" | grep -q 'NEEDED.*libdsopt'; }
runs() { "$here/caller.sh" "$folder/$1" || fail "$1: does not run"; }

case $how in
shared)
    compile shared $(flags --cflags --libs)
    needs_library shared || fail "shared: not linked to the shared library"
    LD_LIBRARY_PATH=$(flags --variable=libdir) runs shared
    ;;
static) # -l:libdsopt.a, because plain -ldsopt prefers the shared library; -static takes every archive
    compile archive $(flags --static --cflags --libs | sed 's/-ldsopt/-l:libdsopt.a/')
    compile all-static -static $(flags --static --cflags --libs)
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
