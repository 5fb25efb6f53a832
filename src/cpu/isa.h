// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace dsopt::cpu {

/// Instruction sets that kernels are compiled for, each with the preceding ones.
enum class Isa : uint8_t {
    generic,
    avx2,   // with F16C and FMA
    avx512, // F, BW, DQ and VL
    avx512_bf16
};

/// Returns the last instruction set that the processor has.
Isa processor_isa();
/// Returns the last instruction set that the processor has and the environment variable DSOPT_ISA allows; `generic` if
/// the variable has an unknown value.
Isa chosen_isa();
/// Returns the value of DSOPT_ISA if it is unknown, else NULL.
const char *unknown_isa();

} // namespace dsopt::cpu
