// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads, of which one does what the others do not expect.
#include "support/misdeeds.h"
#include "support/label.h"

using namespace test;

namespace {

LABEL(long_emulated);
TEST(Misdeeds, OfALocalRankGiveEveryRankAStatusInBoundedTime) {
    std::vector<std::unique_ptr<Fabric>> fabrics;
    for (int i = 0; i < 8; ++i) fabrics.push_back(std::make_unique<LocalFabric>());
    commit_all_misdeeds(fabrics, kSanitized ? 1 : 4, 4);
}

} // namespace
