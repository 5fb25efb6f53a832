#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cuda_toolkit.sh FOLDER: makes a CUDA toolkit in FOLDER from the packages that scripts/requirements/cuda.txt pins,
# unless it is there already. FOLDER/cuda/bin/nvcc compiles on x86-64 for x86-64, and for aarch64 with `-target-dir
# sbsa-linux -ccbin aarch64-linux-gnu-g++`. Ends with a compile and link for both. Exits with 77 and a reason if PyPI
# was not reached.
set -eu
folder=$(realpath -m "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
list=$root/scripts/requirements/cuda.txt
fail() { echo "cuda_toolkit.sh: $*"; exit 1; }
"$root/scripts/venv.sh" "$folder" cuda python3
python=$folder/bin/python

# Packages have the folders bin, include, lib and nvvm of a toolkit.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/nvidia/cu13
rm -f "$folder/cuda"
ln -s "$packages" "$folder/cuda"

# The runtime for aarch64. The headers of all systems are the same, but fatbinary_section.h is only in the package of
# nvcc, so aarch64 uses those of x86-64.
if [ ! -f "$folder/sbsa/nvidia/cu13/lib/libcudart_static.a" ]; then
    sed -n '/^nvidia-cuda-runtime==/,/[^\\]$/p' "$list" >"$folder/runtime.txt"
    rm -rf "$folder/sbsa"
    "$python" -m pip install -q --no-input --disable-pip-version-check --retries 1 --timeout 30 --require-hashes \
        --no-deps --only-binary :all: --platform manylinux2014_aarch64 --target "$folder/sbsa" \
        -r "$folder/runtime.txt" ||
        fail "the runtime for aarch64 cannot be installed"
fi
# nvcc.profile names the folder lib64, which packages do not have. If there is a folder targets, nvcc searches only
# targets/SYSTEM, for every system that it compiles for.
link() { # SYSTEM LIBRARIES
    mkdir -p "$packages/targets/$1"
    ln -sfn ../../include "$packages/targets/$1/include"
    ln -sfn "$2" "$packages/targets/$1/lib"
}
link x86_64-linux ../../lib
link sbsa-linux "$folder/sbsa/nvidia/cu13/lib"

# Tries it without variables that could name another toolkit. The C++ compiler may search folders that have one, so the
# trace of the linker must name this one.
cat >"$folder/empty.cu" <<'END'
#include <cuda_bf16.h>
__global__ void kernel() {}
int main() {
    kernel<<<1, 1>>>();
    return cudaDeviceSynchronize();
}
END
try() { # SYSTEM OPTION...
    system=$1
    shift
    env -u LIBRARY_PATH -u CPATH -u CUDA_HOME -u CUDA_PATH -u NVCC_PREPEND_FLAGS -u NVCC_APPEND_FLAGS -u NVCC_CCBIN \
        "$folder/cuda/bin/nvcc" -arch=sm_90 "$@" -Xlinker --trace -o "$folder/empty" "$folder/empty.cu" \
        >"$folder/log" 2>&1 || { cat "$folder/log"; fail "nvcc of PyPI cannot compile and link for $system"; }
    grep -q "^$folder/cuda/.*/targets/$system/lib/libcudart_static.a" "$folder/log" ||
        { cat "$folder/log"; fail "nvcc of PyPI links a runtime for $system that is not its own"; }
}
try x86_64-linux
try sbsa-linux -target-dir sbsa-linux -ccbin aarch64-linux-gnu-g++
