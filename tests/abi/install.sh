#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh shared|static|plugin|cmake|rust SOURCE-DIR BUILD-DIR TOOLKIT CC MESON...: installs the build, moves the
# installed tree somewhere else, and builds and runs programs against it, as a user would with pkg-config or CMake.
# TOOLKIT is the folder of the CUDA toolkit that a static link needs, or `none`.
set -eu
here=$(dirname "$(realpath "$0")")
example=$(realpath "$here/../../examples/fp32.c")
kind=$1 source=$2 build=$3 toolkit=$4 cc=$5
shift 5
tools=pkg-config
[ "$kind" != cmake ] || tools=cmake
[ "$kind" != rust ] || tools="pkg-config rustc"
for tool in $tools; do
    $tool --version >/dev/null 2>&1 || { echo "install: skipped, $tool is not installed"; exit 77; }
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
    echo "install: $1"
    exit 1
}

DESTDIR=$folder/root "$@" install -C "$build" --no-rebuild >"$folder/log" 2>&1 ||
    { cat "$folder/log"; fail "meson install"; }
prefix=$(sed -n 's/^prefix=//p' "$build/meson-private/dsopt.pc")
moved=$folder/moved
mv "$folder/root$prefix" "$moved"
PKG_CONFIG_PATH=$(dirname "$(find "$moved" -name dsopt.pc)")
export PKG_CONFIG_PATH
cudalibdir=
for dir in lib64 lib targets/x86_64-linux/lib; do
    [ -n "$cudalibdir" ] || [ ! -f "$toolkit/$dir/libcudart_static.a" ] || cudalibdir=$toolkit/$dir
done

# Installed files must not contain paths of the build, or options of the compiler that built them.
[ "$toolkit" = none ] || set -- "$toolkit" "$(realpath "$toolkit")" "$(realpath -s "$toolkit")"
[ "$toolkit" != none ] || set --
for path in "$source" "$build" "$@" -L/; do
    ! grep -rnF --include='*.pc' --include='*.cmake' -e "$path" "$moved" || fail "$path is in the installed package"
done

compile() { # PROGRAM SOURCE FLAGS...
    program=$1 source=$2
    shift 2
    $cc -std=c99 -pedantic -Wall -Wextra -Werror "$source" "$@" -o "$folder/$program" || fail "$program: compiler"
}
# Excludes the section end symbols that gold adds to every shared object.
exports() { nm -D --defined-only "$folder/$1" | awk '$3 !~ /^(__bss_start|_edata|_end)$/ { print $3 }'; }
flags() { pkg-config "--define-variable=prefix=$moved" ${cudalibdir:+"--define-variable=cudalibdir=$cudalibdir"} "$@" \
    dsopt; }
static_flags() { flags --static --cflags --libs | sed 's/-ldsopt/-l:libdsopt.a/'; }
needs_library() { readelf -dW "$folder/$1" | grep -q 'NEEDED.*libdsopt'; }
runs() { "$here/caller.sh" "$folder/$1" || fail "$1: does not run"; }

case $kind in
shared)
    compile shared "$example" $(flags --cflags --libs)
    needs_library shared || fail "shared: not linked to the shared library"
    LD_LIBRARY_PATH=$(flags --variable=libdir) runs shared
    # Files for bindings and for programs that load the library at run time.
    cmp "$(flags --variable=abi_json)" "$here/../../include/dsopt.json" || fail "shared: abi_json"
    [ -f "$(flags --variable=includedir)/dsopt_dl.h" ] || fail "shared: no dsopt_dl.h"
    # Licences of the code that is compiled in, and the software bill of materials.
    licences="LICENSE LICENSES/RapidJSON.txt LICENSES/xxHash.txt"
    ! grep -q '"CUDA runtime"' "$moved/share/dsopt/dsopt.spdx.json" || licences="$licences LICENSES/CUDA-runtime.txt"
    for licence in $licences; do
        cmp "$here/../../$licence" "$moved/share/licenses/dsopt/$(basename "$licence")" || fail "shared: $licence"
    done
    [ "$(ls "$moved/share/licenses/dsopt" | wc -l)" = "$(echo "$licences" | wc -w)" ] || fail "shared: other licences"
    grep -q '"spdxVersion"' "$moved/share/dsopt/dsopt.spdx.json" || fail "shared: no bill of materials"
    ;;
plugin) # the functions have default visibility, so only the archive's contents can keep them from being exported
    compile plugins "$here/plugins.c" $(flags --cflags --libs) -ldl
    compile close_plugin "$here/close_plugin.c" -ldl
    for linker in bfd gold lld; do
        $cc -fuse-ld=$linker -x c -shared -o /dev/null /dev/null 2>/dev/null || continue
        for entry in first second; do
            compile $entry.so "$here/plugin.c" -fPIC -shared -fuse-ld=$linker -DENTRY=$entry $(static_flags)
            ! needs_library $entry.so || fail "$entry.so: linked to the shared library"
            [ "$(exports $entry.so)" = $entry ] ||
                fail "$entry.so, linked by $linker, exports $(exports $entry.so | tr '\n' ' ')"
        done
        LD_LIBRARY_PATH=$(flags --variable=libdir) "$folder/plugins" "$folder/first.so" "$folder/second.so" ||
            fail "plugins, linked by $linker"
        "$folder/close_plugin" "$folder/first.so" || fail "a plugin, linked by $linker, cannot be closed"
        tried=yes
    done
    [ "${tried-}" = yes ] || fail "no linker was tried"
    ;;
static) # -l:libdsopt.a, because plain -ldsopt prefers the shared library; -static takes every archive
    compile archive "$example" $(static_flags)
    compile all-static "$example" -static $(flags --static --cflags --libs)
    for program in archive all-static; do
        ! needs_library $program || fail "$program: linked to the shared library"
        runs $program
    done
    ;;
rust)
    compile_rust() { # PROGRAM FLAGS
        rustc --edition 2021 -D warnings -o "$folder/$1" "$here/rust/caller.rs" -C "link-args=$2" || fail "$1: rustc"
    }
    compile_rust rust-shared "$(flags --libs)"
    needs_library rust-shared || fail "rust-shared: not linked to the shared library"
    LD_LIBRARY_PATH=$(flags --variable=libdir) runs rust-shared
    compile_rust rust-static "$(static_flags)"
    ! needs_library rust-static || fail "rust-static: linked to the shared library"
    runs rust-static
    ;;
cmake)
    cp "$example" "$folder"
    cat >"$folder/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.13)
project(caller C)
foreach(version 0.1 0.2 0.4 1.0)
  find_package(dsopt ${version} QUIET CONFIG)
  if(dsopt_FOUND)
    message(FATAL_ERROR "accepted as version ${version}")
  endif()
endforeach()
find_package(dsopt 0.3 REQUIRED CONFIG COMPONENTS shared static)
add_executable(cmake-shared fp32.c)
target_link_libraries(cmake-shared dsopt::dsopt)
add_executable(cmake-static fp32.c)
target_link_libraries(cmake-static dsopt::static)
END
    mkdir "$folder/without"
    cat >"$folder/without/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.13)
project(without C)
find_package(dsopt CONFIG)
if(NOT dsopt_FOUND OR NOT TARGET dsopt::dsopt)
  message(FATAL_ERROR "the shared library is not found")
endif()
if(TARGET dsopt::static)
  message(FATAL_ERROR "there is a dsopt::static")
endif()
find_package(dsopt CONFIG COMPONENTS static)
if(dsopt_FOUND OR NOT dsopt_NOT_FOUND_MESSAGE MATCHES "dsopt::static .*${why}")
  message(FATAL_ERROR "the component is found, or the reason is not ${why}: ${dsopt_NOT_FOUND_MESSAGE}")
endif()
END
    configure() { # SOURCE BUILD OPTION...
        from=$1 to=$2
        shift 2
        CC=$cc cmake -G Ninja -S "$from" -B "$to" "-DCMAKE_PREFIX_PATH=$moved" "$@"
    }
    logged() { "$@" >"$folder/log" 2>&1 || { cat "$folder/log"; fail "cmake: $1"; }; }
    if [ "$toolkit" = none ]; then
        logged configure "$folder" "$folder"
    else
        logged configure "$folder/without" "$folder/without/toolkit" "-Dwhy=CUDA toolkit" \
            -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=TRUE
        logged configure "$folder" "$folder" "-DCUDAToolkit_ROOT=$toolkit"
    fi
    logged cmake --build "$folder"
    needs_library cmake-shared || fail "cmake-shared: not linked to the shared library"
    ! needs_library cmake-static || fail "cmake-static: linked to the shared library"
    runs cmake-shared
    runs cmake-static
    rm "$(flags --variable=libdir)/libdsopt.a"
    logged configure "$folder/without" "$folder/without/archive" "-Dwhy=libdsopt.a is not installed"
    ;;
esac
