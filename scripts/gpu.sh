#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: gpu.sh [--packages DIR] [PART...]     PART: those below, in this order; all of them if none is named
#        gpu.sh --emulated BUILD [PART...]
#        gpu.sh --pack DIR
# Runs everything that needs an NVIDIA GPU, without a network. Each part ends within ten minutes, all within half an
# hour; they are in order of importance. After each part, and after each list of the benches, the page
# bench/results/<gpu>.md is rewritten from all results in build-gpu/seen, so that parts can be run one by one:
#   build      in build-gpu; always first, and does nothing if it is up to date
#   tests      the CUDA suite, the unit tests and the recorded cases on the device
#   nccl       one rank with the real NCCL: init, capture, finalize, abort
#   wheel      the wheel for this processor (dsopt-*.whl in DIR, or in packages), installed for TORCH_PYTHON: trainings on
#              the GPU in torch and JAX, compared with the CPU, and the short suites of the package, torch and JAX
#   bench      bench_cuda and PyTorch on every list of LISTS; clocks and power are recorded if there is nvidia-smi
#   sanitizer  compute-sanitizer on the small suite
#   profile    counters of ncu: bytes of device memory and time of each kernel, step by step
#   digests    parameters and state after 100 steps of each rule at the size of GPT-2, compared with the CPU's
# A tool that is missing, or that does not work on this machine, is reported as not available, which is not a failure.
# --emulated runs the parts on the emulated device of a build folder with tiny lists; the page is in BUILD/rehearsal.
# DIR has headers and libraries that are not part of the CUDA toolkit, Meson, ninja and g++; --pack copies them there
# from this machine's packages, and wheels that `./dev package wheel` has made. TORCH_PYTHON is the Python with PyTorch.
# shellcheck disable=SC2317 # the functions of the parts are called by the parts' names
set -eu
say() { echo "dev: $*"; }

pack() { # DIR
    mkdir -p "$1/include" "$1/lib"
    for header in gtest benchmark rapidjson xxhash.h; do
        [ -e "/usr/include/$header" ] || {
            say "/usr/include/$header is missing: its package is not installed"
            return 1
        }
        cp -RL "/usr/include/$header" "$1/include/"
    done
    for library in libgtest.a libgtest_main.a libbenchmark.so; do # files, not links, which may not be transferred
        file=$(g++ -print-file-name="$library")
        [ -f "$file" ] || { say "$library is missing: its package is not installed"; return 1; }
        cp -L "$file" "$1/lib/$library"
        soname=$(objdump -p "$file" | sed -n 's/.*SONAME *//p')
        [ -z "$soname" ] || cp -L "$file" "$1/lib/$soname"
    done
    rm -f "$1"/dsopt-*.whl
    for wheel in packages/dsopt-*.whl; do [ ! -f "$wheel" ] || cp "$wheel" "$1"; done
    say "packed $(du -sh "$1" | cut -f1) into $1"
}

all="build tests nccl wheel bench sanitizer profile digests"
packages=carry parts='' emulated=''
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
unavailable='' # parts that could not run with this machine's tools
watcher=''     # the process that records clocks
end=$(($(date +%s) + 1770))

if [ -n "$emulated" ]; then
    build=$emulated results=$emulated/rehearsal gpu="emulated device, 9.0, none, none," driver=none toolkit=none
    suite="$build/tests/cuda/test_cuda --gtest_filter=CudaSmall.*" golden="--backend emulated"
    unit="$build/tests/unit/test_unit unit/rules unit/muon" device=emulated
    digests="$build/tests/cuda/digests_emulated" digest_size="3x5000 6"
    nccl="$build/tests/cuda/test_nccl_single_emulated"
    bench="$build/bench/bench_cuda_emulated" LISTS=${LISTS:-5x300 2x5000} repetitions=3
    export DSOPT_BENCH_STEPS=2
    export LD_LIBRARY_PATH="$build/tests/cuda:$build/tests/doubles/nccl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
    PATH=$PATH:/usr/local/cuda/bin
    command -v nvcc >/dev/null || { say "no nvcc: the CUDA toolkit is missing, nothing was run"; exit 1; }
    build=build-gpu results=bench/results
    toolkit=$(nvcc --version | sed -n 's/.*release \([^,]*\),.*/\1/p')
    # Checked first, because with a driver that is too old every test would be skipped.
    mkdir -p $build
    nvcc -o $build/device_versions tests/cuda/device_versions.cc >$build/device_versions.log 2>&1 || {
        say "nvcc cannot compile a program, nothing was run"
        tail -n 20 $build/device_versions.log
        exit 1
    }
    gpu=$($build/device_versions) || { say "${gpu:-no answer from the CUDA runtime}: nothing was run"; exit 1; }
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=
    if [ -d "$packages/include" ]; then
        packages=$(cd "$packages" && pwd)
        # As system headers, for every compiler; pkg-config is not needed.
        export CPLUS_INCLUDE_PATH="$packages/include" LIBRARY_PATH="$packages/lib" LD_LIBRARY_PATH="$packages/lib"
    fi
    suite="$build/tests/cuda/test_cuda_device" golden="--backend cuda"
    unit="$build/tests/unit/test_unit" device=cuda
    digests="$build/tests/cuda/digests_device" digest_size="gpt2-124m 100"
    nccl="$build/tests/cuda/test_nccl_single"
    bench="$build/bench/bench_cuda" repetitions=11
    LISTS=${LISTS:-gpt2-124m resnet50 10000x1000 1x67108864 vit-b-16 bert-large}
    # NCCL may be installed as part of a framework only.
    [ -n "${DSOPT_NCCL_LIBRARY-}" ] || DSOPT_NCCL_LIBRARY=$("${TORCH_PYTHON:-python3}" -c \
        'import nvidia.nccl as n, glob; print(glob.glob(list(n.__path__)[0] + "/lib/libnccl.so*")[0])' 2>/dev/null) || :
    [ -z "${DSOPT_NCCL_LIBRARY-}" ] || export DSOPT_NCCL_LIBRARY
    # cuBLASLt of the toolkit, if the dynamic linker does not know its folder.
    if [ -z "${DSOPT_CUBLASLT_LIBRARY-}" ]; then
        for file in /usr/local/cuda/lib64/libcublasLt.so.[0-9][0-9]; do
            [ ! -e "$file" ] || export DSOPT_CUBLASLT_LIBRARY="$file"
        done
    fi
    case " $parts " in
    *" build "*) ;;
    *) parts="build $parts" ;;
    esac
fi
seen=$build/seen
mkdir -p "$seen" "$results"
echo "$gpu" >"$seen/gpu"
echo "${driver:-unknown}" >"$seen/driver"
echo "$toolkit" >"$seen/toolkit"
date -u +%Y-%m-%d >"$seen/date"

verdict() { # FILE WORDS...: stored for the page, and shown
    file=$1
    shift
    echo "$*" >>"$seen/$file"
    echo "$*"
}

report() { python3 scripts/gpu_report.py "$seen" "$results"; }

seconds_left() { # [SHARES]: seconds left of this part, or one of SHARES equal shares; never 0, which disables timeout
    left=$(((deadline - $(date +%s)) / ${1:-1}))
    [ "$left" -ge 1 ] || left=1
    echo "$left"
}

limited() { # SECONDS COMMAND...
    limit=$1
    shift
    timeout -k 5 "$limit" "$@"
}

stopped() { # STATUS SECONDS: true if the time limit ended a command with that status; prints that
    case $1 in
    124) echo "stopped after $2 s" ;;
    137) echo "killed" ;; # by the time limit, or for its memory
    *) return 1 ;;
    esac
}

not_available() { # PART WHY
    unavailable="$unavailable $1"
    verdict "$1" "not available: $2"
}

build() {
    rm -f "$seen/build"
    [ -z "$emulated" ] || { verdict build "by the caller"; return 0; }
    set --
    [ ! -f "$build/build.ninja" ] || set -- --reconfigure
    capability=$(echo "$gpu" | cut -d , -f 2 | tr -d ' .')
    status=0
    # Warnings are not errors, because a newer compiler may have new ones.
    limited "$(seconds_left)" meson setup "$@" "$build" --buildtype=release -Dwerror=false -Dcuda=enabled \
        -Dtests=enabled -Dbench=enabled -Dbindings=disabled -Ddevice_archs="$capability" \
        >"$seen/build.log" 2>&1 || status=$?
    limit=$(seconds_left)
    [ "$status" != 0 ] || limited "$limit" ninja -C "$build" "${suite#"$build/"}" "${unit#"$build/"}" \
        tests/dsopt-replay \
        "${digests#"$build/"}" "${nccl#"$build/"}" "${bench#"$build/"}" >>"$seen/build.log" 2>&1 || status=$?
    [ "$status" != 0 ] || { verdict build "done"; return 0; }
    grep -iE '(error|failed):' "$seen/build.log" | head -n 20
    tail -n 20 "$seen/build.log"
    if words=$(stopped "$status" "$limit"); then
        verdict build "$words, not finished: another call resumes the build"
    else
        verdict build "failed, nothing else was run"
    fi
    report
    exit 1
}

counted() { # NAME SECONDS COMMAND...: runs it; its closing line is the verdict
    name=$1 seconds=$2
    shift 2
    rm -f "$seen/$name"
    status=0
    limited "$seconds" "$@" >"$seen/$name.log" 2>&1 || status=$?
    # GoogleTest's last lines differ from other tests'.
    ran=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\{0,1\}\..*/\1/p' "$seen/$name.log")
    words=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$seen/$name.log" | tail -n 1) || words=
    if [ -z "$words" ]; then
        failures=$(grep -c '^\[  FAILED  \] .*(.* ms)' "$seen/$name.log") || :
        skips=$(grep -c '^\[  SKIPPED \] .*(.* ms)' "$seen/$name.log") || :
        words="${ran:-0} passed, $failures failed, $skips skipped"
    fi
    [ "$status" = 0 ] || words="$words, $(stopped "$status" "$seconds" || echo "status $status")"
    verdict "$name" "$words"
    # There is a device, so a test that finds none fails; some tests need a second device.
    case $status,$words in
    0,"0 passed"* | [!0]*,*)
        failed=1
        tail -n 40 "$seen/$name.log"
        ;;
    esac
}

tests() {
    rm -f "$seen/unit" "$seen/golden"
    # shellcheck disable=SC2086 # a program and its arguments
    counted tests 250 $suite
    # shellcheck disable=SC2086
    counted unit 200 env DSOPT_TEST_DEVICE="$device" $unit
    # shellcheck disable=SC2086
    counted golden "$(seconds_left)" tests/replay/golden.sh tests/golden "*" -- "$build"/tests/dsopt-replay $golden
}

digests() {
    # shellcheck disable=SC2086
    counted digests "$(seconds_left)" $digests $digest_size
}

nccl() { counted nccl 120 "$nccl"; }

wheel() {
    rm -f "$seen/wheel" "$seen"/wheel-*
    python=${TORCH_PYTHON:-python3}
    if [ -n "$emulated" ]; then # the package of the sources, on the CPU
        "$python" -c "import torch" 2>/dev/null || { not_available wheel "no torch"; return 0; }
        counted wheel "$(seconds_left)" env PYTHONPATH="$PWD/bindings/python" DSOPT_LIBRARY="$build/libdsopt.so" \
            "$python" packaging/wheel/step_gpu.py cpu
        return
    fi
    file=
    for found in "$packages"/dsopt-*_"$(uname -m)".whl packages/dsopt-*_"$(uname -m)".whl; do
        [ -n "$file" ] || [ ! -f "$found" ] || file=$found
    done
    [ -n "$file" ] || { not_available wheel "no wheel for $(uname -m) in $packages or packages: ./dev package wheel"; return 0; }
    "$python" -m pip --version >/dev/null 2>&1 || { not_available wheel "no pip in $python"; return 0; }
    rm -rf "$build/wheel"
    status=0
    limited 60 "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --target "$build/wheel" "$file" \
        >"$seen/wheel.log" 2>&1 || status=$?
    [ "$status" = 0 ] || { failed=1; tail -n 20 "$seen/wheel.log"; verdict wheel "not installed by pip: status $status"; return 0; }
    # The libraries of this script, such as those of DIR, are not for the wheel.
    callers=${PYTHONPATH-}
    PYTHONPATH=$PWD/$build/wheel${callers:+:$callers} DSOPT_INSTALLED=1
    export PYTHONPATH DSOPT_INSTALLED
    clean="env -u LD_LIBRARY_PATH -u DSOPT_LIBRARY -u DSOPT_CUBLASLT_LIBRARY -u DSOPT_NCCL_LIBRARY"
    $clean "$python" -m dsopt >"$seen/wheel.json" 2>&1 || :
    counted wheel 120 $clean "$python" packaging/wheel/step_gpu.py cuda
    for framework in numpy torch jax; do
        "$python" -c "import $framework" 2>/dev/null || { verdict "wheel-$framework" "not available: no $framework"; continue; }
        case $framework in
        numpy) set -- bindings/python/tests/run.py --short ;;
        torch) set -- bindings/python/tests/run.py torch --short ;;
        jax) set -- bindings/python/tests/jax/run.py --short ;;
        esac
        counted "wheel-$framework" "$(seconds_left 2)" $clean "$python" "$@"
    done
    unset PYTHONPATH DSOPT_INSTALLED
    [ -z "$callers" ] || export PYTHONPATH="$callers"
}

watch_clocks() { # records clocks and power five times per second, until unwatch_clocks
    command -v nvidia-smi >/dev/null || return 0
    bus=$(echo "$gpu" | cut -d , -f 5 | tr -d ' ')
    # Resets the trap, because the child would otherwise run it for a signal between fork and exec, which would be lost.
    trap - TERM
    # The time limit ends nvidia-smi if unwatch_clocks is not called.
    timeout 600 nvidia-smi ${bus:+-i "$bus"} --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu \
        --format=csv,noheader,nounits -lms 200 >>"$seen/clocks" 2>/dev/null &
    watcher=$!
    trap 'exit 143' TERM
}

unwatch_clocks() {
    [ -n "$watcher" ] || return 0
    # Kills the process group that `timeout` creates: a signal to `timeout` alone, just after its fork, would leave
    # nvidia-smi running.
    kill -- "-$watcher" 2>/dev/null || kill "$watcher" 2>/dev/null || :
    wait "$watcher" 2>/dev/null || :
    watcher=
}
trap unwatch_clocks EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

bench() {
    rm -f "$seen/bench" "$seen/clocks"
    for list in $LISTS; do
        # Lists that do not fit in the time are named on the page, and another call starts with them.
        [ "$(seconds_left)" -gt 30 ] || {
            failed=1
            verdict bench "$list: no time was left, LISTS=\"$list\" ./dev gpu bench"
            continue
        }
        rm -f "$seen/bench.$list.json" "$seen/torch.$list.json"
        limit=$(seconds_left)
        status=0
        watch_clocks
        limited "$limit" "$bench" --benchmark_out="$seen/part.json" --benchmark_out_format=json \
            --benchmark_repetitions="$repetitions" --benchmark_enable_random_interleaving=true "$list" \
            >"$seen/bench.log" 2>&1 || status=$?
        unwatch_clocks
        if [ "$status" = 0 ]; then
            mv "$seen/part.json" "$seen/bench.$list.json"
        else
            failed=1
            tail -n 20 "$seen/bench.log"
            verdict bench "$list: $(stopped "$status" "$limit" || echo "status $status")"
        fi
        limit=$(seconds_left)
        [ "$limit" -le 200 ] || limit=200
        [ -n "$emulated" ] || [ "$limit" -lt 10 ] ||
            limited "$limit" "${TORCH_PYTHON:-python3}" bench/torch_cuda.py "$list" >"$seen/torch.$list.json" ||
            say "no figures of PyTorch for $list"
        report
    done
}

find_tool() { # NAME FOLDER: a tool of the toolkit
    folder=$(dirname "$(dirname "$(command -v nvcc)")")
    for place in "$1" "$folder/bin/$1" "$folder/$2/$1" /opt/nvidia/nsight-compute/*/"$1"; do
        command -v "$place" && return
    done
    return 1
}

cannot_work() { # LOG...: prints the line that reports that a tool of the toolkit cannot trace programs here
    grep -hiE -e 'ERR_NVGPUCTRPERM|insufficient permission|driver resource was unavailable|driver is not compatible' \
        -e 'device not supported|internal sanitizer error|(unable|failed) to (initialize|load|connect|attach|inject)' \
        "$@" 2>/dev/null | sed 's/^[= ]*\(ERROR\)\{0,1\}[= ]*//' | head -n 1 | grep .
}

sanitizer() {
    rm -f "$seen/sanitizer"
    [ -z "$emulated" ] || { verdict sanitizer "not of the emulated device"; return 0; }
    tool=$(find_tool compute-sanitizer compute-sanitizer) || {
        not_available sanitizer "compute-sanitizer was not found"
        return 0
    }
    checks=4
    for check in memcheck racecheck initcheck synccheck; do
        limit=$(seconds_left "$checks")
        checks=$((checks - 1)) status=0
        limited "$limit" "$tool" --tool "$check" --error-exitcode 9 "$build/tests/cuda/test_cuda_device" \
            --gtest_filter='CudaSmall.*' >"$seen/$check.log" 2>&1 || status=$?
        # Both the summary and the tests are checked: some versions report no errors for a program that they never ran.
        words=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$seen/$check.log" | tail -n 1 | sed 's/=* *//') || :
        ran=$(sed -n 's/^\[  PASSED  \] \([1-9][0-9]* tests\{0,1\}\)\..*/\1/p' "$seen/$check.log")
        case $status,$words in
        0,*" 0 errors"* | 0,*" 0 hazards"*)
            [ -z "$ran" ] || { verdict sanitizer "$check: $ran, $words"; continue; }
            ;;
        esac
        if [ -z "$ran" ] && why=$(cannot_work "$seen/$check.log"); then
            not_available sanitizer "$why"
            return
        fi
        failed=1
        tail -n 40 "$seen/$check.log"
        words="${ran:-no test passed}, ${words:-no summary}"
        verdict sanitizer "$check: $(stopped "$status" "$limit" || echo "status $status"), $words"
    done
}

# With the list's name appended, neither /graph nor another row with this prefix is selected.
row_filter() { echo "^$1/gpt2-124m/"; }

profile() {
    rm -f "$seen/profile" "$seen"/profile.*
    rows="Fp32 Mixed/f16 Lamb/clip Compressed OnebitAdam" count=5
    for row in $rows; do # a name that the benches no longer have is a failure
        found=$("$bench" --benchmark_filter="$(row_filter "$row")" --benchmark_list_tests gpt2-124m) || found=
        if [ "$found" != "$row/gpt2-124m/iterations:1/manual_time" ]; then
            failed=1
            verdict profile "$row: the benches' rows of that name are: ${found:-none}"
        fi
    done
    [ -z "$emulated" ] || return 0
    tool=$(find_tool ncu nsight-compute) || { not_available profile "ncu was not found"; return 0; }
    metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum
    metrics=$metrics,launch__registers_per_thread,launch__grid_size
    for row in $rows; do
        name=profile.$(echo "$row" | tr / -)
        limit=$(seconds_left "$count")
        count=$((count - 1)) status=0
        limited "$limit" env DSOPT_BENCH_STEPS=1 "$tool" --clock-control none --csv --page raw --print-units base \
            --print-kernel-base function \
            --log-file "$seen/$name.csv" --metrics "$metrics" \
            "$bench" --benchmark_filter="$(row_filter "$row")" gpt2-124m >"$seen/$name.log" 2>&1 || status=$?
        # Without counters ncu still runs the program to its end.
        [ "$status" != 0 ] || ! grep -q '^"0"' "$seen/$name.csv" || continue
        if why=$(cannot_work "$seen/$name.csv" "$seen/$name.log"); then
            not_available profile "$why"
            return
        fi
        failed=1
        tail -n 20 "$seen/$name.log" "$seen/$name.csv" || : # one may be missing
        verdict profile "$row: $(stopped "$status" "$limit" || echo "status $status, no kernel was counted")"
    done
}

for part in $parts; do
    now=$(date +%s)
    # Less than ten minutes: a command that ignores its limit is killed five seconds later; writing the page takes time.
    deadline=$((now + 580))
    [ $deadline -le $end ] || deadline=$end
    say "$part"
    if [ $((deadline - now)) -lt 20 ]; then
        failed=1
        rm -f "$seen/$part"
        verdict "$part" "no time was left: ./dev gpu $part"
    else
        $part
    fi
    report
done
[ -z "$unavailable" ] || say "not available on this machine:$unavailable"
[ $failed = 0 ] || say "something failed, see above"
exit $failed
