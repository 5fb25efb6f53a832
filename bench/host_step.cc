// SPDX-License-Identifier: Apache-2.0
// host_step [BATCHES]: the host's work in a step on the CUDA device with bound, unchanged lists. Built with the
// emulated CUDA runtime, in which launches do nothing here. So the times are those of the engine, and of the few other
// calls of the emulated runtime. Prints a row per list and kind of step: number of runtime calls, and the
// minimum and the median of CPU microseconds per step over batches of 100 steps.
#include "bench_util.h"
#include "fakert.h"
#include <algorithm>
#include <ctime>

namespace {

using bench::check;

double cpu_microseconds() {
    timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) * 1e6 + double(now.tv_nsec) / 1e3;
}

struct Kind {
    const char *name;
    int32_t algorithm, dtype;
    bool mixed; // with loss scale and clipping
};

class HostStep {
public:
    HostStep(const Kind &kind, int64_t tensors, int64_t numel) {
        const size_t bytes = size_t(numel) * (kind.dtype == DSOPT_DTYPE_F32 ? 4 : 2);
        if (cudaMalloc(&memory_, 2 * size_t(tensors) * bytes) != cudaSuccess) std::exit(1);
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        check(dsopt_context_create(&context_desc, &context_));
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        DSOPT_NEW(dsopt_scaler_desc, scaling);
        if (kind.mixed) {
            check(dsopt_scaler_create(context_, &scaling, &scaler_));
            desc.scaler = scaler_;
            desc.max_norm = 1;
        }
        check(dsopt_optimizer_create(context_, &desc, &optimizer_));
        dsopt_group group;
        check(dsopt_group_init(&group, sizeof group, kind.algorithm));
        std::vector<dsopt_param> params(static_cast<size_t>(tensors));
        for (size_t i = 0; i < params.size(); ++i) {
            params[i] = {};
            params[i].tensor = {memory_ + 2 * i * bytes, numel, kind.dtype, 0};
            grads_.push_back({memory_ + (2 * i + 1) * bytes, numel, kind.dtype, 0});
        }
        check(dsopt_optimizer_add_group(optimizer_, &group, params.data(), tensors));
        step_.size = sizeof step_;
        step_.grads = grads_.data();
        step_.count = tensors;
        for (int i = 0; i < 100; ++i) run();
    }
    ~HostStep() {
        dsopt_optimizer_destroy(optimizer_);
        dsopt_scaler_destroy(scaler_);
        dsopt_context_destroy(context_);
        (void)cudaFree(memory_);
    }
    HostStep(const HostStep &) = delete;
    HostStep &operator=(const HostStep &) = delete;
    void run() { check(dsopt_optimizer_step(optimizer_, &step_)); }

private:
    char *memory_ = nullptr;
    dsopt_context *context_ = nullptr;
    dsopt_scaler *scaler_ = nullptr;
    dsopt_optimizer *optimizer_ = nullptr;
    std::vector<dsopt_tensor> grads_;
    dsopt_step step_{};
};

} // namespace

int main(int argc, char **argv) {
    const int batches = argc > 1 ? std::atoi(argv[1]) : 101, steps = 100;
    if (batches <= 0) {
        std::fprintf(stderr, "usage: host_step [BATCHES]\n");
        return 1;
    }
    fakert::Config config = fakert::config_from_environment();
    config.protect = false;
    config.launches = false;
    fakert::reset(config);
    std::printf("| list | step | calls of the runtime | minimum µs | median µs |\n| --- | --- | --- | --- | --- |\n");
    for (const int64_t tensors : {148, 10000})
        for (const Kind &kind : {Kind{"AdamW fp32", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_F32, false},
                                 Kind{"AdamW fp16, scaled and clipped", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_F16, true},
                                 Kind{"LAMB fp32, clipped", DSOPT_ALGORITHM_LAMB, DSOPT_DTYPE_F32, true}}) {
            HostStep step(kind, tensors, 1000);
            const long before = fakert::calls();
            step.run();
            const long calls = fakert::calls() - before;
            std::vector<double> times;
            for (int batch = 0; batch < batches; ++batch) {
                const double begin = cpu_microseconds();
                for (int i = 0; i < steps; ++i) step.run();
                times.push_back((cpu_microseconds() - begin) / steps);
            }
            std::sort(times.begin(), times.end());
            std::printf("| %lld x 1000 | %s | %ld | %.2f | %.2f |\n", static_cast<long long>(tensors), kind.name, calls,
                        times.front(), times[times.size() / 2]);
        }
    return 0;
}
