// SPDX-License-Identifier: Apache-2.0
// GoogleTest assertions on statuses, texts and bits.
#pragma once
#include "handles.h"
#include "trainer.h"
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace test {

#define EXPECT_OK(call) EXPECT_EQ(dsopt_status(DSOPT_OK), (call)) << dsopt_last_error()
#define ASSERT_OK(call) ASSERT_EQ(dsopt_status(DSOPT_OK), (call)) << dsopt_last_error()

/// Checks the status, and that the last error contains each of `words`, which are separated by '|'.
testing::AssertionResult refused(dsopt_status got, dsopt_status wanted, const std::string &words = "");

/// Compares long byte strings for equality without printing them.
testing::AssertionResult same(const std::string &a, const std::string &b);
testing::AssertionResult same(const Snapshot &a, const Snapshot &b);
/// Compares bits for equality; all NaN are equal.
testing::AssertionResult same_bits(const std::vector<float> &a, const std::vector<float> &b);

/// Returns names for INSTANTIATE_TEST_SUITE_P over algorithms.
std::string algorithm_name(const testing::TestParamInfo<int32_t> &info);

/// Calls a collective of all ranks: the norm of one element.
dsopt_status call_collective(const Context &context, const Comm &comm, float value = 1,
                             dsopt_norm_result *result = nullptr);

} // namespace test
