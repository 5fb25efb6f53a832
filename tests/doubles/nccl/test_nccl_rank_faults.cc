// SPDX-License-Identifier: Apache-2.0
// Ranks of NCCL, one of which makes calls that the others do not expect.
#include "nccl_fabric.h"
#include "support/rank_faults.h"

namespace nccl_test {
namespace nccl_rank_faults_tests {

TEST(RankFaults, ReturnStatusInBoundedTime) {
    (void)new_id(); // loads the library: under the thread sanitizer, loading orders nothing
    std::vector<std::unique_ptr<test::Fabric>> fabrics;
    for (int i = 0; i < kDevices / kMostRanks; ++i) fabrics.push_back(std::make_unique<NcclFabric>(i * kMostRanks));
    test::run_all_rank_faults(fabrics, 1, kMostRanks, test::kSanitized);
}

} // namespace nccl_rank_faults_tests
} // namespace nccl_test
