// SPDX-License-Identifier: Apache-2.0
// A plugin with a static copy of dsopt. The host does not depend on dsopt, may contain another version of it, and sees
// only one function. No exception leaves the plugin.
#include "plugin.h"
#include <cstdio>
#include <dsopt.hpp>

int fit(float *w, const float *target, std::size_t count, int steps, char *error, std::size_t capacity) {
    try {
        std::vector<float> gradient(count);
        dsopt::context ctx;
        dsopt::optimizer opt(ctx);
        dsopt::adamw group;
        group.lr = 0.02;
        opt.add_group(group, {{dsopt::view(w, static_cast<std::int64_t>(count)), "w"}});
        const dsopt::tensor grads[] = {dsopt::view(gradient)};
        for (int step = 0; step < steps; ++step) {
            for (std::size_t i = 0; i < count; ++i) gradient[i] = w[i] - target[i];
            opt.step(grads);
        }
        return 0;
    } catch (const std::exception &failure) {
        std::snprintf(error, capacity, "%s", failure.what());
        return 1;
    }
}
