// SPDX-License-Identifier: Apache-2.0
// C++20: options as designated initializers, in calls. compilers.sh compiles this with all warnings.
#include <dsopt.hpp>
#include <span>

float designated();
float designated() {
    std::vector<float> w(4), g(4), m(8), gm(8), report(DSOPT_REPORT_FLOATS);
    const std::span<float> gradient = g;
    const auto pool = [](std::int64_t n, dsopt::pieces run) {
        for (std::int64_t i = 0; i < n; ++i) run(i);
    };
    dsopt::context ctx({.threads = 2});
    dsopt::scaler scaler(ctx, {.init = 8, .window = 100});
    dsopt::comm self = dsopt::comm::self(ctx);
    dsopt::optimizer opt(
        ctx, {.shard = dsopt::shard::data, .max_norm = 1, .scaler = &scaler, .data = &self, .report_norms = true});
    opt.add_group(dsopt::adamw{.lr = 3e-4, .weight_decay = 0.1, .exp_avg_format = dsopt::moment::e4m3},
                  {{.tensor = dsopt::view(w), .name = "w", .dims = {2, 2}, .f32_moments = true}});
    opt.add_group(dsopt::sgd{.lr = 0.1, .momentum = 0.9, .nesterov = true});
    opt.add_group(dsopt::adagrad{.lr_decay = 0.1});
    opt.add_group(dsopt::muon{.lr = 0.02, .ns_coefficients = {2, -1.5, 0.5}, .adjust = dsopt::adjust::match_rms_adamw},
                  {{.tensor = dsopt::view(m), .name = "m", .rows = 2, .cols = 2, .rows_are_inputs = true}});
    opt.step({dsopt::view(gradient), dsopt::view(gm)}, {.report = report, .pool = pool, .zero_grads = true});
    opt.save("designated.safetensors", {.params = true});
    opt.load("designated.safetensors", {.params = true, .no_hyper = true, .convert = true});
    return report[DSOPT_REPORT_GRAD_NORM];
}
