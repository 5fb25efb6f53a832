// SPDX-License-Identifier: Apache-2.0
#include "optimizer/derived.h"
#include <tuple>

namespace dsopt {

Derived derive(const Registry &registry, const dsopt_optimizer_desc &desc, const Context &context,
               const DataRank &local, const Comm *between_matrices) {
    const auto &[groups, params] = std::tie(registry.groups, registry.params);
    Derived all;
    if (registry.family >= 0) all.onebit = std::make_unique<OneBit>(context, groups, params, desc, local);
    all.participation = participation_of(params, groups, desc, local, all.onebit ? &all.onebit->setup() : nullptr);
    if (exchanges_rows(groups, desc, local))
        all.parts = std::make_unique<RankParts>(params, all.participation, desc, local, context.device().is_host());
    const bool split = (desc.flags & DSOPT_OPTIMIZER_SPLIT_MATRICES) && between_matrices != nullptr;
    all.matrices =
        std::make_unique<Matrices>(params, groups, all.shards() ? all.parts.get() : nullptr,
                                   split ? between_matrices->ranks() : 1, split ? between_matrices->rank() : 0);
    if (all.matrices->counts().matrices == 0) all.matrices.reset();
    all.sizes = sizes_of(registry, desc, context, all.onebit.get(), all.parts.get(), all.matrices.get());
    return all;
}

} // namespace dsopt
