#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: gpu_script.sh SOURCES
# Tests scripts/gpu.sh on simulated machines: small programs replace the toolkit, the build tools and the benches. Cases
# are a driver that is too old, a build that takes too long, tools that may not trace programs, tools that report
# errors, and a bench that is killed. The rehearsal on the emulated device covers the kernels and the real benches.
# shellcheck disable=SC2016 # variables in quotes are expanded by the generated programs
set -eu
sources=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
passed=0 failed=0

program() { # FILE LINE...
    file=$1
    shift
    { echo '#!/bin/sh' && printf '%s\n' "$@"; } >"$file"
    chmod +x "$file"
}

machine() { # NAME: creates a machine on which everything works, and changes to its folder
    mkdir -p "$folder/$1/bin" "$folder/$1/bench"
    cd "$folder/$1"
    ln -s "$sources/scripts" "$sources/tests" .
    ln -s "$sources/bindings" .
    ln -s "$sources"/bench/*.py "$sources/bench/shapes" bench/
    program device_versions 'echo "NVIDIA Played, 9.0, 13.0, 13.0, 0000:01:00.0"'
    program bin/nvcc 'case $1 in -o) cp device_versions "$2" ;; *) echo "Cuda tools, release 13.0, V13.0.88" ;; esac'
    program bin/nvidia-smi 'case "$*" in' \
        '*driver_version*) echo 580.1 ;;' \
        '*) printf "1900, 2600, 650.5, 60\n1980, 2600, [N/A], 70\n1700, 2600, 700.1, 65\n"; exec sleep 600 ;;' 'esac'
    program bin/meson 'mkdir -p build-gpu/bench build-gpu/tests/cuda build-gpu/tests/unit' \
        'cp bench_cuda build-gpu/bench/' 'cp test_cuda_device build-gpu/tests/cuda/' \
        'cp test_unit build-gpu/tests/unit/' 'cp dsopt-replay build-gpu/tests/'
    program bin/ninja 'touch built'
    program test_cuda_device 'echo "[  PASSED  ] 6 tests."'
    program test_unit '[ "$DSOPT_TEST_DEVICE" = cuda ] && echo "[  PASSED  ] 7 tests."'
    program dsopt-replay 'echo "$# passed, 0 failed"'
    # Reports 2 ms for a list. Waits until the clocks were written, however slow the machine is.
    program bench_cuda 'for last; do :; done' \
        'for word; do case $word in' \
        '--benchmark_out=*) out=${word#*=} ;;' \
        '--benchmark_filter=*) filter=${word#*=^} ;;' \
        '--benchmark_list_tests) echo "${filter}iterations:1/manual_time"; exit ;;' \
        'esac; done' \
        '[ -n "${out-}" ] || exit 0' \
        '[ ! -x on_list ] || ./on_list "$last"' \
        '[ -n "${NO_CLOCKS-}" ] || until [ -s build-gpu/seen/clocks ]; do sleep 0.1; done' \
        'row="\"run_type\": \"iteration\", \"run_name\": \"Fp32/$last/iterations:1/manual_time\""' \
        'echo "{\"benchmarks\": [{$row, \"real_time\": 2.0, \"host_us\": 3.0}]}" >"$out"'
    program bin/compute-sanitizer 'echo "[  PASSED  ] 6 tests."' \
        'case $2 in racecheck) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;' \
        '*) echo "========= ERROR SUMMARY: 0 errors" ;; esac'
    program bin/ncu 'while [ "$1" != --log-file ]; do shift; done' '{' \
        'echo "==PROF== Connected to process 1"' \
        'echo "\"ID\",\"Kernel Name\",\"$(echo "$4" | sed "s/,/\",\"/g")\""' \
        'echo "\"\",\"\",\"ns\",\"byte\",\"byte\",\"register/thread\",\"\""' \
        'echo "\"0\",\"update_kernel\",\"1,000\",\"2,000\",\"1,000\",\"64\",\"528\""' '} >"$2"'
}

run() { # STATUS PART...: runs gpu.sh with these parts; writes its output to the file `output`
    expected=$1 status=0
    shift
    LISTS=${LISTS-5x300} TORCH_PYTHON=$(command -v ./bin/python || echo false) PATH="$PWD/bin:$PATH" scripts/gpu.sh "$@" >output 2>&1 || status=$?
    [ "$status" = "$expected" ] && return
    cat output
    fail "status $status in place of $expected"
}

fail() {
    failed=$((failed + 1))
    echo "FAILED: $(basename "$PWD"): $*"
}

has() { # FILE PATTERN: checks that a line of the file matches
    if grep -qe "$2" "$1"; then
        passed=$((passed + 1))
    else
        cat "$1"
        fail "$1 has no line $2"
    fi
}
page=bench/results/nvidia-played.md


machine works
run 0 bench sanitizer profile
has "$page" '^# NVIDIA Played, '
has "$page" '^Compute capability 9.0, driver 580.1 for CUDA 13.0, CUDA toolkit 13.0 with runtime 13.0'
has "$page" '^| build | done |'
has "$page" '^| compute-sanitizer, initcheck | 6 tests, ERROR SUMMARY: 0 errors |'
has "$page" 'of 3 samples: SM clock 1700/1900/1980 MHz, memory clock 2600/2600/2600 MHz, power 650/675/700 W, '
has "$page" '^| Fp32 | 2.000 |'
has "$page" '^| Lamb/clip | update_kernel | 1 | 1.0 | 0.002 | 0.001 | 3 | 64 | 528 |'

machine tests
run 0 tests
has "$page" '^| suite on the device | 6 passed, 0 failed, 0 skipped |'
has "$page" '^| unit tests on the device | 7 passed, 0 failed, 0 skipped |'
has "$page" '^| recorded cases | [1-9][0-9]* passed, 0 failed |'

machine failed-unit-test
program test_unit 'echo "[  PASSED  ] 6 tests."' 'echo "[  FAILED  ] Adam.Steps (3 ms)"' 'exit 1'
run 1 tests
has "$page" '^| unit tests on the device | 6 passed, 1 failed, 0 skipped, status 1 |'
has "$page" '^| recorded cases | [1-9][0-9]* passed, 0 failed |'

machine wheel
mkdir packages packaging
ln -s "$sources/packaging/wheel" packaging
: >"packages/dsopt-1-py3-none-any_$(uname -m).whl"
program bin/python 'case "$*" in' \
    '"-m pip --version") ;;' \
    '*" --target "*) for last; do :; done; echo "$last" >installed ;;' \
    '*"import jax") exit 1 ;;' \
    '*step_gpu.py*) echo "$PYTHONPATH ${LD_LIBRARY_PATH-none}" >paths; echo "14 passed, 0 failed" ;;' \
    '*"run.py torch --short") echo "5 passed, 1 failed, 2 skipped"; exit 1 ;;' \
    '*"run.py --short") echo "6 passed, 0 failed" ;;' 'esac'
LD_LIBRARY_PATH=/nothing run 1 wheel
has installed '^packages/dsopt-.*.whl'
has paths '/build-gpu/wheel none$'
has "$page" '^| trainings with the wheel | 14 passed, 0 failed |'
has "$page" '^| short suite of the package, from the wheel | 6 passed, 0 failed |'
has "$page" '^| that of dsopt.torch | 5 passed, 1 failed, 2 skipped, status 1 |'
has "$page" '^| that of dsopt.jax | not available: no jax |'

machine without-wheel
run 0 wheel
has "$page" '^| trainings with the wheel | not available: no wheel for '

machine old-driver
program device_versions 'echo "the driver supports CUDA 12.4, the runtime is of CUDA 13.0: too old"; exit 1'
run 1
head -n 1 output >first
has first '^dev: the driver supports CUDA 12.4, the runtime is of CUDA 13.0: too old'
[ ! -e built ] || fail "the build was not skipped"

machine slow-build # timeout exits with the same status
program bin/ninja 'exit 124'
run 1 tests
has "$page" '^| build | stopped after [0-9]* s, not finished'
has "$page" '^| suite on the device | not run |'

machine without-nvidia-smi
program bin/nvidia-smi 'echo "NVIDIA-SMI has failed" >&2; exit 9'
NO_CLOCKS=yes run 0 bench
has "$page" '^Clocks and power are not known'
has "$page" '^Compute capability 9.0, driver unknown for CUDA 13.0'
has "$page" '^| Fp32 | 2.000 |'

machine without-counters
program bin/compute-sanitizer 'echo "========= Error: Device not supported. Please refer to the manual"; exit 1'
program bin/ncu 'while [ "$1" != --log-file ]; do shift; done' \
    'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters" >"$2"'
run 0 sanitizer profile
has output '^dev: not available on this machine: sanitizer profile'
has "$page" '^| compute-sanitizer, not available | Error: Device not supported'
has "$page" '^not available: ERR_NVGPUCTRPERM'

machine with-findings
program bin/compute-sanitizer 'echo "[  PASSED  ] 6 tests."; echo "========= ERROR SUMMARY: 2 errors"; exit 9'
run 1 sanitizer
has "$page" '^| compute-sanitizer, memcheck | status 9, 6 tests, ERROR SUMMARY: 2 errors |'

machine false-pass # some versions of compute-sanitizer print this if they do not start the program
program bin/compute-sanitizer 'echo "========= ERROR SUMMARY: 0 errors"'
run 1 sanitizer
has "$page" '^| compute-sanitizer, memcheck | status 0, no test passed, ERROR SUMMARY: 0 errors |'

machine failed-profile
program bin/ncu 'echo "==ERROR== Failed to find metric"; exit 1'
run 1 profile
has "$page" '^Fp32: status 1, no kernel was counted'

machine killed-bench # on the second of three lists, when the page already has the first one
program on_list 'case $1 in 2x50) cp bench/results/nvidia-played.md early.md; kill -KILL $PPID ;; esac'
LISTS='5x300 2x50 3x10' run 1 bench
has early.md '^### 5x300'
has "$page" '^Not measured: 2x50: killed'
has "$page" '^### 5x300'
has "$page" '^### 3x10'
! grep -q '^### 2x50' "$page" || fail "figures of a list that was not measured"

machine out-of-time # a clock that advances by 100 s per read, and a timeout that only records its limit
program bin/date 'case $1 in +%s) ;; *) exec env PATH=/usr/bin:/bin date "$@" ;; esac' \
    'now=$(cat clock 2>/dev/null || echo 1000000)' 'echo $((now + 100)) >clock' 'echo "$now"'
program bin/timeout '[ "$1" != -k ] || shift 2' '[ "$2" = nvidia-smi ] || echo "$1" >>limits' 'shift' 'exec "$@"'
LISTS='5x300 2x50 3x10' run 1 bench sanitizer profile digests
has "$page" '^### 5x300'
has "$page" '^Not measured: 3x10: no time was left, LISTS="3x10" ./dev gpu bench'
has "$page" "^| trainings compared with the CPU's | no time was left: ./dev gpu digests |"
[ "$(sort -n limits | tail -n 1)" -lt 590 ] || fail "a command may take ten minutes"

echo "$passed passed, $failed failed"
[ $failed = 0 ]
