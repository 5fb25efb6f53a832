// SPDX-License-Identifier: Apache-2.0
#include "exchange/vector.h"
#include "base/sizes.h"
#include "device/plan.h"
#include <algorithm>

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

size_t ListVector::tensor_at(int64_t element) const {
    const auto after = size_t(std::upper_bound(begins_.begin(), begins_.end(), element) - begins_.begin());
    return after != 0 && range(after - 1).end() > element ? after - 1 : after;
}

Range part_of(const Range &tensor, const Range &chunk) {
    const Range part = intersection(chunk, tensor).within(tensor);
    return part.numel == 0 ? Range{0, 0, tensor.numel} : part;
}

} // namespace dsopt
