// SPDX-License-Identifier: Apache-2.0
// Ranks are threads, and one of them does something that the others do not expect.
#include "support/rank_faults.h"
#include "support/label.h"

using namespace test;

namespace comm_rank_faults_tests {

LABEL(long_emulated);
TEST(RankFault, ReturnsAStatusOnEveryLocalRankInBoundedTime) {
    std::vector<std::unique_ptr<Fabric>> fabrics;
    for (int i = 0; i < 8; ++i) fabrics.push_back(std::make_unique<LocalFabric>());
    run_all_rank_faults(fabrics, kSanitized ? 1 : 4, 4);
}

} // namespace comm_rank_faults_tests
