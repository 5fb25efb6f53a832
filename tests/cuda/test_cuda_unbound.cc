// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"
#include "support/cuda_memory.h"
#include "support/unbound.h"

namespace {

TEST(CudaUnbound, ParametersWithoutMemoryOrGradientEndInAStatusInEveryStage) {
    cuda_test::begin_test();
    const test::Memory memory = test::cuda_memory(nullptr);
    for (const test::Unbound &how : test::unbound_cases())
        test::expect_status_or_untouched(memory, test::context_desc(1, DSOPT_BACKEND_CUDA), how);
    cuda_test::end_test();
}

} // namespace
