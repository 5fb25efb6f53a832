// SPDX-License-Identifier: Apache-2.0
#include "support/unbound.h"

using namespace test;

namespace {

TEST(MissingMemory, ReturnsStatusOrLeavesStateUnchanged) {
    const Memory memory = memory_under_test();
    for (const Unbound &how : unbound_cases()) expect_status_or_untouched(memory, context_desc(), how);
}

} // namespace
