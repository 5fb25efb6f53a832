#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the code that the compiler generates from the kernels.

usage: resources.py LIBDSOPT FOLDER...
       resources.py --compile SOURCES FOLDER...

Checks the machine code and the PTX that ship, or the code that nvcc generates from the sources for sm_90:
- the PTX has only arithmetic whose result IEEE 754 defines, with one rounding each;
- registers are within budget, nothing is spilled (SPILLS has the exceptions), and as many blocks are resident on a
  multiprocessor as each kernel is designed for, because the grid size depends on it;
- number of 16-byte loads in flight before the first one is waited for, and of 16-byte stores;
- number of ranks whose bits an exchange loads before it waits for the first load;
- from sm_90 on, the wait for the preceding kernel comes before anything else that uses memory;
- chains of additions in fp64: a loaded value costs one addition, and lanes are added up after the loop;
- instructions per element, registers and resident blocks match the table of bench/gpu_model.py.
Needs no GPU, but cuobjdump and nvdisasm (and nvcc), from PATH or from `FOLDER` or its nvidia/*/bin, where pip installs
them; without them the test is skipped.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

import loops

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench"))
import gpu_model

LEAF = 4096 * 4  # bytes of a leaf in shared memory
# Kernel or pattern of kernels; maximum of registers; minimum of resident blocks per multiprocessor with this many bytes
# of dynamic shared memory; minimum of 16-byte loads in flight at once, and of 16-byte stores.
BUDGET = [
    ("update_kernel", 64, 4, 0, 4, 3),
    ("update_weights_kernel", 64, 4, 0, 3, 1),
    ("update_stored_kernel", 64, 4, 2 * LEAF, 6, 6),
    ("update_stored_weights_kernel", 64, 4, LEAF, 4, 2),
    ("inspect_kernel", 64, 4, 0, 4, 0),
    ("momentum_squares_kernel", 64, 4, 0, 4, 0),
    ("norm_kernel", 64, 4, 0, 4, 0),
    ("axpby_kernel", 64, 4, 0, 1, 1),
    ("zero_kernel", 64, 4, 0, 0, 1),
    ("clamp_kernel", 64, 4, 0, 1, 1),
    ("pack_list_kernel", 64, 4, 0, 2, 1),
    ("pack_values_kernel", 64, 4, 0, 0, 0),
    ("reduce_messages_kernel", 64, 4, 0, 1, 1),
    ("decode_kernel", 64, 4, 0, 0, 1),
    ("pack_slice_kernel", 80, 3, 0, 2, 1),
    ("average_slice_kernel", 64, 4, 0, 2, 1),
    ("message_scales_kernel", 64, 4, 0, 0, 0),
    ("result_scales_kernel", 64, 4, 0, 0, 0),
    ("feed_kernelILNS.*4FeedE[012]E", 64, 4, LEAF, 2, 1),  # of the gradient, or of the momentum
    ("feed_kernelILNS.*4FeedE3E", 80, 3, LEAF, 6, 4),  # of the distance, after a step
    ("apply_mean_kernelILNS.*4FeedE[012]E", 64, 4, 0, 3, 2),
    ("apply_mean_kernelILNS.*4FeedE3E", 80, 3, 0, 4, 3),
    ("local_kernel", 64, 4, 0, 5, 3),
    ("onebit_lamb_moments_kernel", 80, 3, 2 * LEAF, 4, 2),
    ("onebit_lamb_weights_kernel", 64, 4, 0, 3, 1),
    ("form_kernel", 64, 4, LEAF, 2, 2),
    ("inputs_kernel", 64, 4, 0, 1, 1),
    ("results_kernel", 64, 4, 0, 1, 1),
    ("apply_matrices_kernel", 64, 4, 2 * LEAF, 2, 2),
]
# Devices with other limits of registers and resident blocks. With two leaves in shared memory, three blocks fit on
# multiprocessors with 100 KiB of it.
OTHERS = {(kernel, number): (80, 3) for number in (120, 121)
          for kernel in ("update_kernel", "update_stored_kernel", "update_stored_weights_kernel", "pack_values_kernel",
                         "pack_list_kernel", "reduce_messages_kernel", "pack_slice_kernel",
                         "feed_kernelILNS.*4FeedE[012]E", "form_kernel", "apply_matrices_kernel")}
# Instructions that spill: the loop counter of the last block, which folds the results of all leaves; in form_kernel a
# value per tile of a row.
SPILLS = {("inspect_kernel", number): 2 for number in (120, 121)}
SPILLS.update({("form_kernel", number): 4 for number in (100, 103, 110)})
# Kernels that add up values of a leaf, or sums of leaves; for the latter the minimum of loads in flight per lane.
SUMS = {"inspect_kernel": 16, "update_kernel": 16, "update_weights_kernel": 16, "norm_kernel": 16,
        "message_scales_kernel": 16, "result_scales_kernel": 16, "onebit_trust_kernel": 16,
        "update_stored_kernel": 16, "update_stored_weights_kernel": 16,
        "momentum_squares_kernel": 0,
        "pack_list_kernel": 0, "pack_values_kernel": 0, "reduce_messages_kernel": 0,
        "feed_kernelILNS.*4FeedE0E": 0,
        "form_kernel": 0, "inputs_kernelILb1E": 16,
        "onebit_lamb_moments_kernel": 0}
# Maximum size of kernels with a loop per rule and set of formats, because instructions are fetched from memory, too.
MOST_INSTRUCTIONS = {"update_kernel": 31000, "update_stored_kernel": 31200, "update_stored_weights_kernel": 12600}
# Minimum number of ranks whose bits, one byte each, reduce_messages_kernel loads before it waits for any.
RANKS_AT_ONCE = 4
REGISTERS = 65536
# Threads and KiB of shared memory of a multiprocessor; each block reserves another 1024 bytes.
MULTIPROCESSOR = {75: (1024, 64), 80: (2048, 164), 86: (1536, 100), 89: (1536, 100), 90: (2048, 228), 100: (2048, 228),
                  103: (2048, 228),
                  110: (2048, 228), 120: (1536, 100), 121: (1536, 100)}
THREADS = 256
# Floating-point arithmetic that is exact, or rounded once to nearest, with denormals.
ARITHMETIC = re.compile(r"(add|sub|mul|div)\.rn\.f(32|64)|(sqrt|rcp)\.rn\.f(32|64)|(neg|abs|min|max)\.f(32|64)|"
                        r"(set|setp|selp|slct|testp|copysign|mov|ld|st|shfl|vote|cvta)\b[\w.:]*|"
                        r"fma\.rn\.f64|"  # for squares only, see judge_ptx()
                        r"cvt\.f32\.f16|cvt\.rn\.b?f16\.f32|"
                        r"cvt\.f64\.f32|cvt\.rn\.f32\.f64|cvt\.rn\.f(32|64)\.[su](32|64)|"
                        r"cvt\.r[zmpn]i\.[su](32|64)\.f(32|64)")


def find_tools(names, folders):
    """Finds the tools, and adds the folders to PATH, because the tools search there for others."""
    paths = []
    for folder in folders + sorted(glob.glob("/usr/local/cuda*/bin")):
        paths += [folder] + sorted(glob.glob(os.path.join(folder, "nvidia", "*", "bin")))
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath)] + paths)
    missing = [tool for tool in names if shutil.which(tool) is None]
    if missing:
        print("not found: " + ", ".join(missing))
        sys.exit(77)


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def sections(text, pattern):
    """Returns the text of every function by name."""
    parts = re.split(pattern, text)
    return dict(zip(parts[1::2], parts[2::2]))


def instructions(code):
    """Returns the instructions of a function, without addresses and encodings."""
    return [line.strip() for line in re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(.*?);", code)]


def registers_of(operand, width=1):
    number = re.fullmatch(r"-?\|?R(\d+)(?:\.\S+)?\|?", operand)
    return set(range(int(number.group(1)), int(number.group(1)) + width)) if number else set()


def loads_in_flight(code, kind=r"128", registers=4):
    """Returns the maximum number of loads of global memory in sequence before one of them is used. `kind` and
    `registers`: width of the loads, by default 16 bytes."""
    most, in_flight, count = 0, set(), 0
    for line in instructions(code):
        words = re.sub(r"^@\S+\s+", "", line).split(None, 1)
        opcode, operands = words[0], words[1] if len(words) > 1 else ""
        names = re.findall(r"(?<![\w.])R\d+", operands)
        meant = re.fullmatch(r"LDG\.E(\.\w+)*\.%s(\.\w+)*" % kind, opcode)
        written = re.match(r"R\d+", operands) and not opcode.startswith("ST")
        read = {int(name[1:]) for name in (names[1:] if written else names)}
        for name in re.findall(r"(?<![\w.])R(\d+)\.64", operands):
            read.add(int(name) + 1)
        if read & in_flight or re.match(r"(BRA|EXIT|RET|BRX|BAR)\b", opcode) and not line.startswith("@"):
            in_flight, count = set(), 0
        if meant:
            in_flight |= registers_of(names[0], registers)
            count += 1
            most = max(most, count)
    return most


def addition_chains(code):
    """Analyzes the innermost loops that add loaded values in fp64.

    Returns the number of these loops; the maximum number of dependent additions per loaded value of an iteration;
    whether other lanes are in such a chain; and the maximum number of global loads before an addition in a loop."""
    lines = [(int(at, 16), line.strip()) for at, line in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", code)]
    loops = set()
    for at, line in lines:
        jump = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", line)
        if jump and int(jump.group(1), 16) < at:
            loops.add((int(jump.group(1), 16), at))

    def follow(body):
        """Returns loaded values, their chain of additions, whether lanes are in it, and loads before the first one."""
        source, depth = {}, {}  # by register
        values, chain, crosses, ahead = 0, 0, False, 0
        for line in body:
            words = re.sub(r"^@\S+\s+", "", line).split(None, 1)
            opcode, names = words[0], re.findall(r"(?<![\w.])R\d+", words[1] if len(words) > 1 else "")
            if not names or opcode.startswith("ST"):
                continue
            to, of = names[0], names[1:]
            came = set().union(*[source.get(name, set()) for name in of])
            before = max([depth.get(name, 0) for name in of], default=0)
            if re.match(r"LD[GS]?\b", opcode):
                values += 4 if ".128" in opcode else 1
                came, before = {"memory"}, 0
            elif opcode.startswith("SHFL"):
                came = came | {"lanes"}
            elif re.match(r"D(ADD|FMA)\b", opcode):
                before += "memory" in came
                if "memory" in came and chain == 0:
                    ahead = sum("LDG" in earlier for earlier in body[:body.index(line)])
                chain = max(chain, before)
                crosses = crosses or {"memory", "lanes"} <= came
                came = set()
            wide = 4 if ".128" in opcode else 2 if opcode.startswith("D") or ".64" in opcode or "F64" in opcode else 1
            for name in ["R%d" % (int(to[1:]) + k) for k in range(wide)]:
                source[name], depth[name] = came, before
        return values, chain, crosses, ahead

    found, worst, through_lanes, most_ahead = 0, 0, False, 0
    for begin, end in loops:
        if any(other != (begin, end) and begin <= other[0] and other[1] <= end for other in loops):
            continue
        body = [line for at, line in lines if begin <= at <= end]
        if any("MUFU" in line or "BAR" in line for line in body):
            continue  # a loop that divides, or a loop over leaves
        values, chain, crosses, ahead = follow(body)
        if chain:
            found, worst, through_lanes = found + 1, max(worst, chain / values), through_lanes or crosses
            most_ahead = max(most_ahead, ahead)
    return found, worst, through_lanes, most_ahead


def waits_first(code):
    """Returns true if the wait for the preceding kernel comes before any access of memory except constants, any barrier
    and any jump."""
    for line in instructions(code):
        opcode = re.sub(r"^@\S+\s+", "", line).split()[0]
        if opcode == "ACQBULK":
            return not line.startswith("@")
        if re.match(r"(LD(?!C)|ST|AT|RED|BAR|MEMBAR|FENCE|ERRBAR|SHFL|VOTE|BRA|BRX|CALL|EXIT|RET|PREEXIT)", opcode):
            return False
    return False


def resident_blocks(arch, registers, shared):
    """`shared` includes the bytes that the block reserves."""
    threads, kilobytes = MULTIPROCESSOR[arch]
    return min(REGISTERS // (THREADS * -(-registers // 8) * 8), threads // THREADS, kilobytes * 1024 // shared)


class Judge:
    passed = failed = 0

    def check(self, good, text):
        self.passed, self.failed = self.passed + good, self.failed + (not good)
        print(text + (": ok" if good else ": FAILED"))


def judge_ptx(judge, text):
    opcodes = set(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s", text, re.M))
    floats = {opcode for opcode in opcodes if re.search(r"\.(f16|bf16|f32|f64|ftz|approx)", opcode)}
    bad = {opcode for opcode in floats if not ARITHMETIC.fullmatch(opcode)}
    bad |= {opcode for opcode in opcodes if re.search(r"\.(ftz|approx|full|nc|sat)\b", opcode)}
    judge.check(len(floats) > 20 and not bad,
                "%d kinds of PTX instructions on floating-point numbers, not allowed: %s" %
                (len(floats), " ".join(sorted(bad)) or "none"))
    # The square of a float is exact in double, so the fused operation rounds as the separate ones do.
    squares = others = 0
    for function in re.split(r"^\s*\.(?:visible|weak)?\s*\.?entry", text, flags=re.M):
        wide = set(re.findall(r"cvt\.f64\.f32\s+(%fd\d+)", function))
        for a, b in re.findall(r"fma\.rn\.f64\s+%fd\d+, (%fd\d+), (%fd\d+), %fd\d+", function):
            squares, others = squares + (a == b and a in wide), others + (a != b or a not in wide)
    judge.check(squares > 0 and others == 0,
                "%d fused multiply-adds of the square of a float in double, %d others" % (squares, others))


def judge_machine_code(judge, arch, usage, code):
    number = int(re.search(r"\d+", arch).group())
    for kernel, registers, resident, dynamic, loads, stores in BUDGET:
        registers, resident = OTHERS.get((kernel, number), (registers, resident))
        names = [name for name in usage if re.search(r"\d" + kernel, name)]
        if not names:
            judge.check(False, "%s: there is no kernel %s" % (arch, kernel))
        for name in names:
            have = int(re.search(r"REG:(\d+)", usage[name]).group(1))
            # From sm_90 on, the compiler's number includes the reserved bytes if the kernel has any shared memory.
            static = int(re.search(r"SHARED:(\d+)", usage[name]).group(1))
            shared = (max(static, 1024) if number >= 90 else static + 1024) + dynamic
            spills = len(re.findall(r"\b(?:LDL|STL)\b", code[name]))
            generic = len(re.findall(r"\b(?:LD|ST)\.E(?:\.\w+)*\.128\b", code[name]))
            wide = len(re.findall(r"\bSTG\.E(?:\.\w+)*\.128\b", code[name]))
            in_flight = loads_in_flight(code[name])
            blocks = resident_blocks(number, have, shared)
            # Multiprocessors with less shared memory hold fewer blocks than the registers would allow.
            enough = blocks >= min(resident, MULTIPROCESSOR[number][1] * 1024 // shared)
            good = (have <= registers and spills <= SPILLS.get((kernel, number), 0) and generic == 0 and enough
                    and in_flight >= loads and wide >= stores)
            judge.check(good,
                        "%s %-31s %2d registers, %d spills, %d blocks resident, %d loads of 16 bytes in flight, %2d "
                        "stores of them, %d generic" % (arch, kernel, have, spills, blocks, in_flight, wide, generic))
    if number >= 90:
        late = [name for name in code if not waits_first(code[name])]
        judge.check(len(code) > 30 and not late,
                    "%s %d kernels wait for the preceding one before they use memory, others: %s" %
                    (arch, len(code) - len(late), " ".join(late) or "none"))
    for kernel, most in MOST_INSTRUCTIONS.items():
        for name in [name for name in code if re.search(r"\d" + kernel, name)] or [kernel]:
            count = len(instructions(code.get(name, "")))
            judge.check(0 < count <= most, "%s %s: %d instructions" % (arch, kernel, count))
    for name in [name for name in code if re.search(r"\d+reduce_messages_kernel", name)] or ["reduce_messages_kernel"]:
        ranks = loads_in_flight(code.get(name, ""), "U8", 1)
        judge.check(ranks >= RANKS_AT_ONCE, "%s reduce_messages_kernel: the bits of %d ranks in flight" % (arch, ranks))
    for kernel, least_ahead in SUMS.items():
        for name in [name for name in code if re.search(r"\d" + kernel, name)] or [kernel]:
            loops, chain, through_lanes, ahead = addition_chains(code.get(name, ""))
            judge.check(loops > 0 and chain <= 1 and not through_lanes and ahead >= least_ahead,
                        "%s %-31s %2d loops that add, %.2f "
                        "additions in a chain for a value%s, %2d loads ahead" % (
                          arch, kernel, loops, chain, ", through other lanes" if through_lanes else "", ahead))


def judge_model(judge, usage, code):
    """Compares with gpu_model.py, with a tolerance, because compilers differ."""
    for name, count in loops.counted(code).items():
        kernel = gpu_model.KERNELS[name]
        registers = max(int(re.search(r"REG:(\d+)", usage[function]).group(1))
                        for function in usage if re.search(r"\d" + loops.LOOPS[name][0], function))
        good = (count is not None and abs(count - kernel.issued) <= 0.1 * kernel.issued
                and abs(registers - kernel.registers) <= 8 and kernel.blocks <= resident_blocks(90, registers, 1024))
        judge.check(good, "sm_90 %-21s %s instructions per element, %d registers; gpu_model.py has %.1f, %d and %d "
                    "blocks" % (name, "an unknown number of" if count is None else "%.1f" % count, registers,
                              kernel.issued, kernel.registers, kernel.blocks))


def main():
    if sys.argv[1] == "--compile":
        sources, folders = sys.argv[2], sys.argv[3:]
        find_tools(("nvcc", "cuobjdump", "nvdisasm"), folders)
        folder = tempfile.TemporaryDirectory()
        library = os.path.join(folder.name, "device.a")
        includes = ["-I" + os.path.join(sources, name) for name in ("include", "src", ".")]
        run("nvcc", "-lib", "-std=c++20", "-fmad=false", "--expt-relaxed-constexpr", "--extended-lambda", "-O3",
            "-gencode", "arch=compute_90,code=[sm_90,compute_90]", *includes,
            *glob.glob(os.path.join(sources, "cuda", "*.cu")), "-o", library)
    else:
        library, folders = sys.argv[1], sys.argv[2:]
        find_tools(("cuobjdump", "nvdisasm"), folders)
    judge = Judge()
    judge_ptx(judge, run("cuobjdump", "-ptx", library))
    archs = sorted(set(re.findall(r"\.(sm_\d+)\.cubin", run("cuobjdump", "-lelf", library))))
    if not archs:
        sys.exit("no machine code in " + library)
    for arch in archs:
        usage = sections(run("cuobjdump", "-res-usage", "-arch", arch, library), r"Function (\S+):")
        code = sections(run("cuobjdump", "-sass", "-arch", arch, library), r"Function : (\S+)")
        judge_machine_code(judge, arch, usage, code)
        if arch == "sm_90":
            judge_model(judge, usage, code)
    print("%d passed, %d failed" % (judge.passed, judge.failed))
    sys.exit(judge.failed != 0)


main()
