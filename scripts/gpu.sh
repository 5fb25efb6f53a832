#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: gpu.sh [--packages DIR] [PART...]     PART: tests, digests, nccl, bench, sanitizer, profile; all of them if none is named
#        gpu.sh --emulated BUILD [PART...]
#        gpu.sh --pack DIR
# What needs an NVIDIA GPU, without a network. Builds in build-gpu. Each part ends within ten minutes and writes the page
# bench/results/<gpu>.md anew from all that build-gpu/seen has, so that parts can be run one by one:
#   tests      the suite and the recorded cases on the device
#   digests    parameters and state after 100 steps of each rule at the size of GPT-2, compared with the CPU's
#   nccl       one rank with the real NCCL: init, capture, finalize, abort
#   bench      bench_cuda and PyTorch on every list of LISTS
#   sanitizer  compute-sanitizer on the small suite
#   profile    what ncu counts: bytes of device memory and time of each kernel
# --emulated rehearses that with the emulated device of a build folder and tiny lists; its page goes to BUILD/rehearsal.
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

all="tests digests nccl bench sanitizer profile"
packages=carry parts= emulated=
while [ $# != 0 ]; do
    case $1 in
    --pack)
        pack "${2:-carry}"
        exit
        ;;
    --packages) packages=$2 && shift ;;
    --emulated) emulated=$2 && shift ;;
    -*) say "$1 is not an option of gpu" && exit 2 ;;
    *)
        case " $all " in
        *" $1 "*) parts="$parts $1" ;;
        *) say "$1 is not a part of gpu: $all" && exit 2 ;;
        esac
        ;;
    esac
    shift
done
parts=${parts:-$all}
failed=0

if [ -n "$emulated" ]; then
    build=$emulated results=$emulated/rehearsal gpu="emulated device, none, 9.0" toolkit=none
    suite="$build/tests/cuda/test_cuda --gtest_filter=CudaSmall.*" golden="--backend emulated"
    digests="$build/tests/cuda/digests_emulated" digest_size="3x5000 6"
    nccl="$build/tests/cuda/test_nccl_single_emulated"
    bench="$build/bench/bench_cuda_emulated" LISTS=${LISTS:-5x300 2x5000} repetitions=3
    export DSOPT_BENCH_STEPS=2 LD_LIBRARY_PATH="$build/tests/cuda:$build/tests/doubles/nccl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
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
    build=build-gpu results=bench/results
    toolkit=$(nvcc --version | sed -n 's/.*release \([^,]*\),.*/\1/p')
    suite="$build/tests/cuda/test_cuda_device" golden="--backend cuda"
    digests="$build/tests/cuda/digests_device" digest_size="gpt2-124m 100"
    nccl="$build/tests/cuda/test_nccl_single"
    bench="$build/bench/bench_cuda" LISTS=${LISTS:-gpt2-124m resnet50 10000x1000 1x67108864 vit-b-16 bert-large} repetitions=11
    set --
    [ ! -f $build/build.ninja ] || set -- --reconfigure
    # A compiler that nobody here has seen may warn of something new.
    log=$(meson setup "$@" $build --buildtype=release -Dwerror=false -Dcuda=enabled -Dtests=enabled -Dbench=enabled \
        -Dbindings=disabled -Ddevice_archs="$(echo "$gpu" | sed 's/.*, *//; s/\.//')" 2>&1 &&
        ninja -C $build ${suite#"$build/"} tests/dsopt-replay ${digests#"$build/"} ${nccl#"$build/"} ${bench#"$build/"} 2>&1) || {
        echo "$log" | grep -iE '(error|failed):' | head -n 20
        echo "$log" | tail -n 20
        say "the build failed"
        exit 1
    }
    # NCCL may come with a framework only.
    [ -n "${DSOPT_NCCL_LIBRARY-}" ] || DSOPT_NCCL_LIBRARY=$(${TORCH_PYTHON:-python3} -c \
        'import nvidia.nccl, glob; print(glob.glob(list(nvidia.nccl.__path__)[0] + "/lib/libnccl.so*")[0])' 2>/dev/null) || :
    [ -z "${DSOPT_NCCL_LIBRARY-}" ] || export DSOPT_NCCL_LIBRARY
fi
seen=$build/seen
mkdir -p $seen $results
echo "$gpu" >$seen/gpu
echo "$toolkit" >$seen/toolkit
date -u +%Y-%m-%d >$seen/date

verdict() { # FILE WORDS...: kept for the report, and shown
    file=$1
    shift
    echo "$*" >>"$seen/$file"
    echo "$*"
}

counted() { # NAME SECONDS COMMAND...: runs it; its closing line is the verdict
    name=$1 limit=$2
    shift 2
    rm -f "$seen/$name"
    status=0
    timeout "$limit" "$@" >"$seen/$name.log" 2>&1 || status=$?
    # GoogleTest ends with other words than the rest.
    ran=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\{0,1\}\..*/\1/p' "$seen/$name.log")
    words=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$seen/$name.log" | tail -n 1) || words=
    if [ -z "$words" ]; then
        failures=$(grep -c '^\[  FAILED  \] .*(.* ms)' "$seen/$name.log") || :
        skips=$(grep -c '^\[  SKIPPED \] .*(.* ms)' "$seen/$name.log") || :
        words="${ran:-0} passed, $failures failed, $skips skipped"
    fi
    [ $status = 0 ] || words="$words, status $status"
    verdict "$name" "$words"
    # There is a device, so a test that finds none is wrong; single tests may want a second one.
    case $status,$words in
    0,"0 passed"* | [!0]*,*)
        failed=1
        tail -n 40 "$seen/$name.log"
        ;;
    esac
}

tests() {
    # shellcheck disable=SC2086 # a program and its arguments
    counted tests 400 $suite
    # shellcheck disable=SC2086
    counted golden 150 tests/replay/golden.sh tests/golden "*" -- $build/tests/dsopt-replay $golden
}

digests() {
    # shellcheck disable=SC2086
    counted digests 560 $digests $digest_size
}

nccl() { counted nccl 120 "$nccl"; }

bench() {
    begin=$(date +%s)
    for list in $LISTS; do
        left=$((560 - $(date +%s) + begin))
        # What does not fit is said in the page, and another call begins with it.
        [ $left -gt 60 ] || { say "no time is left for $list: LISTS=\"$list\" ./dev gpu bench"; break; }
        timeout $left "$bench" --benchmark_out="$seen/part.json" --benchmark_out_format=json --benchmark_repetitions=$repetitions \
            --benchmark_enable_random_interleaving=true "$list" >$seen/bench.log 2>&1 && mv $seen/part.json "$seen/bench.$list.json" || {
            failed=1
            tail -n 20 $seen/bench.log
        }
        [ -n "$emulated" ] || timeout 200 ${TORCH_PYTHON:-python3} bench/torch_cuda.py "$list" >"$seen/torch.$list.json" ||
            say "no figures of PyTorch for $list"
    done
}

find_tool() { # NAME FOLDER: a tool of the toolkit
    folder=$(dirname "$(dirname "$(command -v nvcc)")")
    for place in "$1" "$folder/bin/$1" "$folder/$2/$1" /opt/nvidia/nsight-compute/*/"$1"; do
        command -v "$place" && return
    done
    return 1
}

sanitizer() {
    : >$seen/sanitizer
    [ -z "$emulated" ] || { verdict sanitizer "not of the emulated device"; return 0; }
    tool=$(find_tool compute-sanitizer compute-sanitizer) || { verdict sanitizer "compute-sanitizer was not found" && failed=1 && return; }
    for check in memcheck racecheck initcheck synccheck; do
        status=0
        timeout 135 "$tool" --tool $check --error-exitcode 9 $build/tests/cuda/test_cuda_device --gtest_filter='CudaSmall.*' \
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

profile() {
    rm -f $seen/profile.csv
    [ -z "$emulated" ] || return 0
    tool=$(find_tool ncu nsight-compute) || { say "ncu was not found" && failed=1 && return; }
    DSOPT_BENCH_STEPS=1 timeout 560 "$tool" --clock-control none --csv --page raw --log-file $seen/profile.csv --launch-skip 40 \
        --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,launch__registers_per_thread,launch__grid_size \
        "$bench" --benchmark_filter='^(Fp32|Mixed/f16|Lamb/clip|Compressed|OnebitAdam)/[^g]' gpt2-124m >$seen/profile.log 2>&1 || {
        failed=1
        tail -n 20 $seen/profile.log
    }
}

for part in $parts; do
    say "$part"
    $part
    python3 scripts/gpu_report.py $seen $results
done
[ $failed = 0 ] || say "something failed, see above"
exit $failed
