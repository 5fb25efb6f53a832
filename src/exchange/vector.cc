// SPDX-License-Identifier: Apache-2.0
#include "exchange/vector.h"
#include "base/sizes.h"
#include "device/plan.h"

namespace dsopt {

static_assert(ListVector::kBlock == kLeaf);

ListVector::ListVector(const std::vector<int64_t> &numels) : numels_(numels) {
    begins_.reserve(numels.size());
    int64_t end = 0;
    for (const int64_t numel : numels) {
        int64_t begin = round_up(end, kAlignment);
        if (numel > kBlock - begin % kBlock) begin = round_up(begin, kBlock);
        if (numel == 0) begin = end;
        begins_.push_back(begin);
        end = begin + numel;
    }
    blocks_ = (end + kBlock - 1) / kBlock;
}

Range part_of(const Range &tensor, const Range &chunk) {
    const Range part = intersection(chunk, tensor).within(tensor);
    return part.numel == 0 ? Range{0, 0, tensor.numel} : part;
}

} // namespace dsopt
