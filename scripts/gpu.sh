#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: gpu.sh [--packages DIR] [PART...]     PART: tests, sanitizer, bench; all of them if none is named
#        gpu.sh --pack DIR
# What needs an NVIDIA GPU, without a network: builds in build-gpu, runs the suite on the device, compute-sanitizer on the small
# one, the benches, and writes what it saw to bench/results/<gpu>.md. What another call left in build-gpu/seen counts too.
# DIR has the headers and libraries that the CUDA toolkit, Meson, ninja and g++ do not bring; --pack copies them there from this
# machine's packages. TORCH_PYTHON is the Python with PyTorch.
set -eu
say() { echo "dev: $*"; }

pack() { # DIR
    mkdir -p "$1/include" "$1/lib"
    for header in gtest benchmark rapidjson xxhash.h; do
        [ -e "/usr/include/$header" ] || { say "/usr/include/$header is missing: its package is not installed"; return 1; }
        cp -RL "/usr/include/$header" "$1/include/"
    done
    for library in libgtest.a libgtest_main.a libbenchmark.so; do # files, not links: those get lost on the way
        file=$(g++ -print-file-name="$library")
        [ -f "$file" ] || { say "$library is missing: its package is not installed"; return 1; }
        cp -L "$file" "$1/lib/$library"
        soname=$(objdump -p "$file" | sed -n 's/.*SONAME *//p')
        [ -z "$soname" ] || cp -L "$file" "$1/lib/$soname"
    done
    say "packed $(du -sh "$1" | cut -f1) into $1"
}

packages=carry parts=
while [ $# != 0 ]; do
    case $1 in
    --pack)
        pack "${2:-carry}"
        exit
        ;;
    --packages) packages=$2 && shift ;;
    tests | sanitizer | bench) parts="$parts $1" ;;
    *) say "$1 is not a part of gpu" && exit 2 ;;
    esac
    shift
done
parts=${parts:-tests sanitizer bench}

PATH=$PATH:/usr/local/cuda/bin
gpu=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
case $gpu in
*,*,*.*) ;;
*) say "no NVIDIA GPU that nvidia-smi can see: nothing was run" && exit 1 ;;
esac
command -v nvcc >/dev/null || { say "no nvcc: the CUDA toolkit is missing, nothing was run"; exit 1; }
if [ -d "$packages/include" ]; then
    packages=$(cd "$packages" && pwd)
    # As system headers, and for every compiler alike; no pkg-config is needed.
    export CPLUS_INCLUDE_PATH="$packages/include" LIBRARY_PATH="$packages/lib" LD_LIBRARY_PATH="$packages/lib"
fi

build=build-gpu seen=build-gpu/seen failed=0
arch=$(echo "$gpu" | sed 's/.*, *//; s/\.//')
[ ! -f $build/build.ninja ] || set -- --reconfigure
log=$(meson setup "$@" $build --buildtype=release -Dcuda=enabled -Dtests=enabled -Dbench=enabled -Dbindings=disabled \
    -Ddevice_archs="$arch" 2>&1 && ninja -C $build tests/cuda/test_cuda_device tests/dsopt-replay bench/bench_cuda 2>&1) || {
    echo "$log" | grep -iE '(error|failed):' | head -n 20
    echo "$log" | tail -n 20
    say "the build failed"
    exit 1
}
mkdir -p $seen
echo "$gpu" >$seen/gpu
nvcc --version | sed -n 's/.*release \([^,]*\),.*/\1/p' >$seen/toolkit
date -u +%Y-%m-%d >$seen/date

verdict() { # FILE WORDS...: kept for the report, and shown
    file=$1
    shift
    echo "$*" >>"$seen/$file"
    echo "$*"
}

suite() {
    : >$seen/tests
    rm -f $build/*.xml $build/meson-logs/testlog*
    meson test -C $build --no-rebuild -t 4 cuda-device golden-cuda >/dev/null 2>&1 || :
    counts=$(scripts/count_tests.py $build) || counts="0 1 0"
    set -- $counts
    # There is a GPU, so a test that finds none is wrong. Single tests may want a second one.
    skipped=$(grep -c '"result": "SKIP"' $build/meson-logs/testlog.json || :)
    verdict tests "$1 passed, $2 failed, $3 skipped"
    [ "$2" = 0 ] && [ "$1" != 0 ] && [ "$skipped" = 0 ] || failed=1
}

find_sanitizer() {
    toolkit=$(dirname "$(dirname "$(command -v nvcc)")")
    for place in compute-sanitizer "$toolkit/bin/compute-sanitizer" "$toolkit/compute-sanitizer/compute-sanitizer"; do
        command -v "$place" && return
    done
    return 1
}

sanitizer() {
    : >$seen/sanitizer
    tool=$(find_sanitizer) || { verdict sanitizer "compute-sanitizer was not found" && failed=1 && return; }
    for check in memcheck racecheck initcheck synccheck; do
        status=0
        timeout 400 "$tool" --tool $check --error-exitcode 9 $build/tests/cuda/test_cuda_device --gtest_filter='CudaSmall.*' \
            >$seen/$check.log 2>&1 || status=$?
        # The tool's last word as well: it may find something and a test still pass, or it may not run at all.
        words=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' $seen/$check.log | tail -n 1 | sed 's/=* *//') || words="no summary"
        verdict sanitizer "$check: status $status, ${words:-no summary}"
        case $status,$words in
        0,*" 0 errors"* | 0,*" 0 hazards"*) ;;
        *)
            failed=1
            tail -n 40 $seen/$check.log
            ;;
        esac
    done
}

bench() {
    rm -f $seen/bench.json $seen/torch.json
    $build/bench/bench_cuda --benchmark_out=$seen/bench.json --benchmark_out_format=json || failed=1
    ${TORCH_PYTHON:-python3} bench/torch_cuda.py >$seen/torch.json || say "no figures of PyTorch"
}

for part in $parts; do
    say "$part"
    case $part in
    tests) suite ;;
    *) $part ;;
    esac
done
python3 scripts/gpu_report.py $seen bench/results
[ $failed = 0 ] || say "something failed, see above"
exit $failed
