// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "support.h"
#include <cstring>

inline constexpr std::size_t kNumels[] = {1, 7, 4099};
inline constexpr const char *kNames[] = {"a", "b", "c"};

/// Three parameters with gradients, identical in each object.
struct Model {
    std::vector<float> w[3], g[3];
    std::vector<dsopt::param> params;
    std::vector<dsopt::tensor> weights, grads;
    Model() {
        for (std::uint32_t i = 0; i < 3; ++i) {
            w[i] = values(kNumels[i], 10 + i);
            g[i] = values(kNumels[i], 20 + i);
            weights.push_back(dsopt::view(w[i]));
            grads.push_back(dsopt::view(g[i]));
            dsopt::param param;
            param.tensor = weights[i];
            param.name = kNames[i];
            params.push_back(param);
        }
    }
    void next_gradients(std::uint32_t step) {
        for (std::uint32_t i = 0; i < 3; ++i) g[i] = values(kNumels[i], 1000 * step + i);
        for (std::uint32_t i = 0; i < 3; ++i) grads[i] = dsopt::view(g[i]);
    }
};

inline void expect_same(const Model &a, const Model &b) {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(std::memcmp(a.w[i].data(), b.w[i].data(), a.w[i].size() * 4), 0) << i;
}

inline dsopt::adamw rule() {
    dsopt::adamw group;
    group.lr = 0.01;
    group.weight_decay = 0.1;
    return group;
}
