#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""loops.py OBJECT...: instructions per element that the loops of the kernels issue, counted from machine code.

An iteration is found by the data it moves: the shortest path from the head of a loop back to it that has as many loads,
stores, roots and conversions as elements of these dtypes need. So cases that the pattern does not name, such as random
rounding, are not counted. An instruction that is predicated off takes an issue slot and counts. bench/gpu_model.py has
the numbers in its table; resources.py, which is a test, compares them. Needs cuobjdump.
"""
import heapq
import re
import subprocess
import sys

F16_LOAD = r"HADD2\.F32|5\.192296858534827\d*e\+33"  # by the hardware, or by arithmetic on integers
F16_STORE = r"F2FP\.F16|FADD \S+, \S+, 0\.5$"
BF16_STORE = r"F2FP\.BF16|IADD3 .*\b0x7fff\b"


def accesses(loads, stores, **more):
    """Returns patterns of 16-byte accesses, and of no other stores. In a loop for any format, each load has a load of
    16-bit elements next to it, and one of the two is predicated off."""
    return {r"LDG\S*\.128": (loads, loads), r"STG\S*\.128": (stores, stores), r"STG": (stores, stores), **more}


ROOTS = {r"MUFU\.RSQ": (4, 4), r"MUFU\.RCP": (4, 4)}
ADAM = {**accesses(4, 3), **ROOTS}
# There may be one more store, of zeros to a gradient, which is predicated off or jumped over.
MIXED = {**accesses(3, 3), **ROOTS, r"LDG\S*\.64": (1, 1), r"STG": (4, 5), r"STG\S*\.64": (1, 2)}
SQUARES = (8, {r"DFMA": (8, 8), r"LDS": (8, 8)})  # of a tile in shared memory
ROWS = {r"LDG\S*\.64": (8, 8), r"DFMA": (32, 32)}  # eight rows of 128 16-bit elements
# Blocks of stored formats with Adam, not element by element. Their formats are known at run time only: what tells them
# apart is arithmetic, of random bits, of codes, and of the upper halves of masters.
STORED = {r"MUFU\.RSQ": (8, 8), r"(LDG|STG)\S*\.U(8|16)": (0, 0)}
RANDOM = {r"0x85ebca6b|-0x7a143595": (8, 8)}
E4M3 = {r"\bFMUL .*e\+36": (8, 8), r"\bFADD .*\b16384": (8, 8)}
SPLIT = {r"ISETP\.GT\.U32\S* .*0x7f800000": (8, 16)}
# By the names of gpu_model.py: the kernel, and for each of its loops the elements per iteration and, per pattern, the
# minimum and maximum number of instructions in an iteration.
LOOPS = {
    "update fp32": ("update_kernel", [(4, ADAM)]),
    "update f16": ("update_kernel", [(4, {**MIXED, F16_LOAD: (4, 4), F16_STORE: (2, 4)})]),
    "update bf16": ("update_kernel", [(4, {**MIXED, F16_LOAD: (0, 0), BF16_STORE: (2, 4)})]),
    "update one moment": ("update_kernel", [(4, {**accesses(3, 2), r"MUFU": (0, 0)})]),
    "update plain": ("update_kernel", [(4, {**accesses(2, 1), r"MUFU": (0, 0)})]),
    "inspect f16": ("inspect_kernel", [(32, {**ROWS, F16_LOAD: (32, 32)})]),
    "inspect bf16": ("inspect_kernel", [(32, {**ROWS, F16_LOAD: (0, 0)})]),
    "inspect fp32": ("inspect_kernel", [(16, {r"LDG\S*\.128": (4, 4), r"DFMA": (16, 16)})]),
    "feed": ("pack_list_kernel", [(16, accesses(8, 4)), SQUARES]),
    "reduce messages": ("reduce_messages_kernel", [(4, accesses(1, 1, **{r"LDG\S*\.U8": (8, 8)})), SQUARES]),
    "decode": ("decode_kernel", [(4, {r"STG": (1, 1), r"STG\S*\.128": (1, 1)})]),
    "lamb moments": ("update_kernel", [(4, {**ADAM, **accesses(4, 2, **{r"STS\S*\.128": (2, 2)})}), SQUARES, SQUARES]),
    "lamb weights": ("update_weights_kernel", [(4, accesses(3, 1))]),
    "feed momentum": ("feed_kernelILNS.*4FeedE0E", [(4, accesses(3, 1, **{r"STS\S*\.128": (1, 1)})), SQUARES]),
    "apply mean, momentum": ("apply_mean_kernelILNS.*4FeedE0E",
                             [(4, {**ADAM, **accesses(3, 2), r"LDG\S*\.U8": (1, 1)})]),
    "apply mean, bits": ("apply_mean_kernelILNS.*4FeedE0E", [(4, {**ADAM, **accesses(2, 1), r"LDG\S*\.128": (2, 3),
                                                         r"LDG\S*\.U8": (1, 2)})]),
    "update bf16, bf16 random": ("update_stored_kernel", [(8, {**STORED, **RANDOM, r"F2FP\.BF16": (4, 4)})]),
    "update e4m3, bf16 random": ("update_stored_kernel", [(8, {**STORED, **RANDOM, **E4M3})]),
    "update q8": ("update_stored_kernel", [(8, {**STORED, r"I2F": (16, 32), r"F2I": (16, 16)})]),
    "update remainder": ("update_stored_kernel", [(8, {**STORED, **SPLIT, r"STG\S*\.128": (4, 4)})]),
    "update remainder, e4m3, bf16 random": ("update_stored_kernel", [(8, {**STORED, **SPLIT, **RANDOM, **E4M3})]),
    "moments of 1-bit LAMB": ("onebit_lamb_moments_kernel", [(4, accesses(4, 2)), SQUARES, SQUARES]),
}


def basic_blocks(code):
    """Returns for each basic block of a function its instructions, and the indices of the blocks that may follow."""
    lines = [(int(at, 16), line.strip()) for at, line in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", code)]
    index = {at: i for i, (at, _) in enumerate(lines)}
    follow, first = [], {0}  # successors of instructions; instructions that begin a block
    for i, (_, line) in enumerate(lines):
        predicate, opcode, operands = re.match(r"(@\S+\s+)?(\S+)\s*(.*)", line).groups()
        jump = re.search(r"0x([0-9a-f]+)$", operands)
        ends = re.match(r"(BRA|EXIT|RET|BRX)\b", opcode)
        # BRA.DIV jumps only if threads of a warp have diverged.
        goes_on = not ends or predicate or re.match(r"!?U?P\d", operands) or opcode.startswith("BRA.DIV")
        to = [i + 1] if goes_on else []
        if opcode.startswith("BRA") and jump:
            to.append(index[int(jump.group(1), 16)])
        follow.append([j for j in to if j < len(lines)])
        if ends:
            first |= {i + 1, *follow[i]}
    begins = sorted(i for i in first if i < len(lines))
    number = {begin: k for k, begin in enumerate(begins)}
    blocks = []
    for begin, end in zip(begins, begins[1:] + [len(lines)]):
        texts = [re.sub(r"^@\S+\s+", "", line) for _, line in lines[begin:end]]
        blocks.append((texts, [number[j] for j in follow[end - 1]]))
    return blocks


def shortest_iteration(blocks, wanted):
    """Returns the length of the shortest iteration, of any loop, that has the wanted instructions, or None."""
    most = tuple(high for _, high in wanted.values())
    least = tuple(low for low, _ in wanted.values())
    worth = [tuple(sum(bool(re.search(pattern, line)) for line in texts) for pattern in wanted) for texts, _ in blocks]
    loops = sorted({(i - j, j, i) for i, (_, follow) in enumerate(blocks) for j in follow if j <= i})
    best, found = None, []  # the loops with such an iteration
    for _, head, end in loops:  # short loops first: their result bounds the search in the loops around them
        if any(sum(column) < low for column, low in zip(zip(*worth[head:end + 1]), least)):
            continue
        if any(head <= inner and outer <= end for inner, outer in found):
            continue  # around one: its iterations are longer, and searching them takes minutes
        heap, seen = [(0, head, (0,) * len(most))], set()
        while heap:
            length, i, have = heapq.heappop(heap)
            if best is not None and length >= best:
                break
            if i == head and length != 0:
                if all(a >= b for a, b in zip(have, least)):
                    best = length
                    found.append((head, end))
                    break
                continue
            if (i, have) in seen:
                continue
            seen.add((i, have))
            have = tuple(a + b for a, b in zip(have, worth[i]))
            if all(a <= b for a, b in zip(have, most)):
                for j in blocks[i][1]:
                    if head <= j <= end:
                        heapq.heappush(heap, (length + len(blocks[i][0]), j, have))
    return best


def instructions_of_element(code, parts):
    """Returns the sum over the loops of a kernel, or None if one of them is missing."""
    blocks = basic_blocks(code)
    counts = [(elements, shortest_iteration(blocks, wanted)) for elements, wanted in parts]
    return None if any(count is None for _, count in counts) else sum(count / elements for elements, count in counts)


def functions(text):
    parts = re.split(r"Function : (\S+)", text)
    return dict(zip(parts[1::2], parts[2::2]))


def counted(code):
    """Returns the counts for a library's functions, by the names of gpu_model.py."""
    found = {}
    for name, (kernel, parts) in LOOPS.items():
        of_kernel = [code[function] for function in code if re.search(r"\d" + kernel, function)]
        found[name] = instructions_of_element(of_kernel[0], parts) if of_kernel else None
    return found


def main():
    code = {}
    for path in sys.argv[1:]:
        code.update(functions(subprocess.run(["cuobjdump", "-sass", path], check=True, stdout=subprocess.PIPE,
                                             text=True).stdout))
    for name, count in counted(code).items():
        print("%-24s %s" % (name, "not found" if count is None else "%.1f" % count))


if __name__ == "__main__":
    main()
