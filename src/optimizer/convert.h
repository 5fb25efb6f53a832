// SPDX-License-Identifier: Apache-2.0
// State tensors as fp32 on the host, whatever their format: moments with their scales, and masters that consist of a
// weight and a remainder.
#pragma once
#include "optimizer/optimizer.h"
#include <optional>

namespace dsopt {

/// Number of elements that are converted at once: a multiple of kBlock.
constexpr int64_t kConverted = int64_t(1) << 20;

/// Returns the format of a moment in memory or in a file, from the dtype of its elements; nullopt if no moment has the
/// dtype. bf16 stands for bf16_random, too. `squares`: as in MomentInfo.
std::optional<Format> format_from(int32_t dtype, bool squares);

/// Converts n elements, from the beginning of a block on. `scales` begins with that block's; unused without scales.
void decode(Format format, const void *codes, const float *scales, int64_t n, float *to);
/// The same in the other direction. Rounds to nearest, bf16_random too.
void encode(Format format, const float *from, int64_t n, void *codes, float *scales);

/// Splits n masters into bf16 weights and remainders.
void split_masters(const float *masters, int64_t n, uint16_t *weights, uint16_t *remainders);
void join_masters(const uint16_t *weights, const uint16_t *remainders, int64_t n, float *masters);

/// Throws STATE if the memory of a parameter with a remainder, which is half of its master, is not known.
void check_master_memory(const Param &param);

/// dsopt_optimizer_export_f32 and _import_f32, for a moment or remainder. `entry` has memory, and earlier calls are
/// complete. Throws STATE for a remainder whose parameter has no memory.
void export_f32(const Optimizer &optimizer, const StateEntry &entry, float *host);
void import_f32(const Optimizer &optimizer, const StateEntry &entry, const float *host);
/// True for tensors that these functions convert.
bool is_converted(const StateEntry &entry);

} // namespace dsopt
