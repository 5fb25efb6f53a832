// SPDX-License-Identifier: Apache-2.0
#include "support/missing_memory.h"

using namespace test;

namespace refusals_missing_memory_tests {

TEST(MissingMemory, ReturnsStatusOrLeavesStateUnchanged) {
    const Memory memory = memory_under_test();
    for (const MissingMemoryCase &test_case : missing_memory_cases())
        expect_status_or_unchanged(memory, context_desc(), test_case);
}

} // namespace refusals_missing_memory_tests
