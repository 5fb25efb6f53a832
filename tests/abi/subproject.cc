// SPDX-License-Identifier: Apache-2.0
// A program of a project that has dsopt as a Meson subproject: one step of AdamW through the C++ header.
#include <cstdio>
#include <dsopt.hpp>
#include <vector>

int main() try {
    std::vector<float> weights(100, 1.0f), gradients(100, 0.5f);
    const dsopt::context context;
    dsopt::optimizer optimizer(context);
    optimizer.add_group(dsopt::adamw{.lr = 0.25}, {{dsopt::view(weights), "weights"}});
    const dsopt::tensor list[] = {dsopt::view(gradients)};
    optimizer.step(list);
    for (const float weight : weights)
        if (!(weight > 0.7f && weight < 0.8f)) return std::printf("a weight became %g\n", double(weight)), 1;
    return 0;
} catch (const dsopt::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
