// SPDX-License-Identifier: Apache-2.0
// The step of bench/call_cost.c through dsopt.hpp, alternating with the same call of dsopt.h. Prints the medians in
// microseconds as `c MEDIAN` and `cpp MEDIAN`, and their ratio.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <dsopt.hpp>

namespace {

constexpr std::size_t kTensors = 148, kNumel = 4;

struct Model {
    std::vector<std::vector<float>> weights, gradients;
    std::vector<dsopt::param> params;
    std::vector<dsopt::tensor> grads;
    dsopt::optimizer opt;
    explicit Model(const dsopt::context &ctx) :
        weights(kTensors, std::vector<float>(kNumel)),
        gradients(kTensors, {0.01f, 0.02f, 0.03f, 0.04f}),
        opt(ctx) {
        for (std::size_t i = 0; i < kTensors; ++i) {
            dsopt::param param;
            param.tensor = dsopt::view(weights[i]);
            params.push_back(param);
            grads.push_back(dsopt::view(gradients[i]));
        }
        opt.add_group(dsopt::adamw{}, params);
    }
};

template <class F> double microseconds(F &&call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
}

} // namespace

int main(int argc, char **argv) {
    const int steps = std::max(1, argc > 1 ? std::atoi(argv[1]) : 5000);
    try {
        dsopt::context ctx;
        Model in_c(ctx), in_cpp(ctx);
        std::vector<double> c, cpp;
        const auto time_c = [&] {
            return microseconds([&] {
                DSOPT_NEW(dsopt_step, step);
                step.grads = in_c.grads.data();
                step.count = static_cast<std::int64_t>(in_c.grads.size());
                dsopt::detail::check(dsopt_optimizer_step(in_c.opt.get(), &step));
            });
        };
        const auto time_cpp = [&] { return microseconds([&] { in_cpp.opt.step(in_cpp.grads); }); };
        for (int i = -100; i < steps; ++i) { // negative: warm-up; the order alternates
            const double first = i % 2 == 0 ? time_c() : time_cpp(), second = i % 2 == 0 ? time_cpp() : time_c();
            if (i < 0) continue;
            c.push_back(i % 2 == 0 ? first : second);
            cpp.push_back(i % 2 == 0 ? second : first);
        }
        std::printf("c %.2f\ncpp %.2f\nratio %.3f\n", median(c), median(cpp), median(cpp) / median(c));
    } catch (const dsopt::error &failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
    return 0;
}
