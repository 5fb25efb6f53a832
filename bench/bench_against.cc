// SPDX-License-Identifier: Apache-2.0
// bench_against OLD-ADAPTER.so OLD.so NEW-ADAPTER.so NEW.so [--rounds N] [--only TEXT] [LIST...]: times one step of
// each rule and dtype by two builds of the library, alternating in one process, on the same parameters, gradients and
// state. Prints a Markdown table of the medians of old time / new time with the quartiles, and the ratio of the best
// times: above 1 the new build is faster. Each library is called through an adapter that was compiled against its own
// header (against.h).
//
// The memory bandwidth of a shared machine drifts by half within a minute, and pages differ from allocation to
// allocation. So both libraries work on the same memory, and a ratio is formed within a round of old, new, new, old.
#include "against.h"
#include "bench_util.h"
#include <algorithm>
#include <chrono>
#include <dlfcn.h>
#include <map>

namespace {

using against::Case;
using against::Dtype;
using against::Rule;
using bench::List;

constexpr Case kCases[] = {
    {"adamw/f32", Rule::adamw, Dtype::f32},
    {"adamw/f16", Rule::adamw, Dtype::f16},
    {"adamw/bf16", Rule::adamw, Dtype::bf16},
    {"adamw_delta/f32", Rule::adamw, Dtype::f32, 0, false, true},
    {"lamb/f32", Rule::lamb, Dtype::f32},
    {"lamb/f16", Rule::lamb, Dtype::f16},
    {"sgd/f32", Rule::sgd, Dtype::f32, 0.9},
    {"lion/f32", Rule::lion, Dtype::f32},
    {"adagrad/f32", Rule::adagrad, Dtype::f32},
    {"onebit_adam/f32", Rule::onebit_adam, Dtype::f32, 0, true},
    {"onebit_adam/f16", Rule::onebit_adam, Dtype::f16, 0, true},
};

/// Returns a list with elements of `element_bytes`. The adapters define the dtype.
std::unique_ptr<List> list_of(const std::vector<int64_t> &sizes, size_t element_bytes) {
    return std::make_unique<List>(sizes, element_bytes == 4 ? DSOPT_DTYPE_F32 : DSOPT_DTYPE_F16);
}
std::vector<against::Tensor> tensors(const List &list) {
    std::vector<against::Tensor> all;
    for (const dsopt_tensor &tensor : list.tensors) all.push_back({tensor.data, tensor.numel});
    return all;
}

class Shared final : public against::Shared {
public:
    Shared(const std::string &list, const Case &config) : sizes_(bench::shapes(list)) {
        const size_t bytes = config.dtype == Dtype::f32 ? 4 : 2;
        params = add(bytes);
        grads = add(bytes);
        if (config.delta) outs = add(bytes);
        for (const against::Tensor &grad : grads) // about 1e-3, so that no value is denormal
            for (int64_t i = 0; i < grad.numel; ++i) {
                const int low = int(i & 0x7f);
                if (config.dtype == Dtype::f32)
                    static_cast<float *>(grad.data)[i] = 1e-3f + 1e-6f * float(low);
                else
                    static_cast<uint16_t *>(grad.data)[i] =
                        uint16_t((config.dtype == Dtype::f16 ? 0x1400 : 0x3a80) + low);
            }
    }
    void *state_memory(const char *name, size_t param, size_t element_bytes) override {
        auto &list = state_[name];
        if (!list) list = list_of(sizes_, element_bytes);
        return list->tensors[param].data;
    }

private:
    std::vector<against::Tensor> add(size_t element_bytes) {
        lists_.push_back(list_of(sizes_, element_bytes));
        return tensors(*lists_.back());
    }
    const std::vector<int64_t> sizes_;
    std::vector<std::unique_ptr<List>> lists_;
    std::map<std::string, std::unique_ptr<List>> state_; // key: name of a per-parameter state tensor
};

/// A library, and the function of its adapter that opens the library.
struct Build {
    std::string library;
    against::Open *open;

    Build(const std::string &adapter, std::string path) : library(std::move(path)) {
        void *const loaded = dlopen(adapter.c_str(), RTLD_NOW | RTLD_LOCAL);
        open = loaded ? reinterpret_cast<against::Open *>(dlsym(loaded, "against_open")) : nullptr;
        if (open != nullptr) return;
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(1);
    }
};

/// Returns the seconds per step. The first step of a block refills caches and branch predictors and is not counted.
double time(against::Engine &engine, int steps) {
    if (steps > 1) engine.step();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) engine.step();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / steps;
}

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[size_t(share * double(values.size() - 1) + 0.5)];
}

void run(const Case &config, const std::string &list, const Build &old_build, const Build &new_build, int rounds) {
    Shared shared(list, config);
    const std::unique_ptr<against::Engine> before(old_build.open(old_build.library.c_str(), config, shared)),
        now(new_build.open(new_build.library.c_str(), config, shared));
    if (before == nullptr || now == nullptr) return;
    // A block takes about 5 ms, so that the clock's resolution and the first step of a block do not matter.
    const int steps = std::clamp(int(0.005 / time(*now, 1)), 1, 2000);
    std::vector<double> ratios, old_times, new_times;
    for (int i = 0; i < rounds; ++i) {
        double a = time(*before, steps), b = time(*now, steps);
        b = (b + time(*now, steps)) / 2;
        a = (a + time(*before, steps)) / 2;
        ratios.push_back(a / b);
        old_times.push_back(a);
        new_times.push_back(b);
    }
    std::printf("| %s | %s | %.4g | %.4g | %.3f | %.3f to %.3f | %.3f |\n", list.c_str(), config.name,
                quantile(old_times, 0.5) * 1e3, quantile(new_times, 0.5) * 1e3, quantile(ratios, 0.5),
                quantile(ratios, 0.25), quantile(ratios, 0.75), quantile(old_times, 0) / quantile(new_times, 0));
    std::fflush(stdout);
}

} // namespace

int main(int argc, char **argv) {
    std::vector<std::string> files, lists;
    std::string only;
    int rounds = 25;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "--rounds" && i + 1 < argc)
            rounds = std::max(1, std::atoi(argv[++i]));
        else if (word == "--only" && i + 1 < argc)
            only = argv[++i];
        else
            (files.size() < 4 ? files : lists).push_back(word);
    }
    if (files.size() < 4) {
        std::fprintf(stderr,
                     "usage: bench_against OLD-ADAPTER.so OLD.so NEW-ADAPTER.so NEW.so [--rounds N] [--only TEXT] "
                     "[LIST...]\n");
        return 2;
    }
    if (lists.empty()) lists = {"gpt2-124m", "resnet50", "10000x1000", "1x1048576", "1x65536", "148x4"};
    const Build old_build(files[0], files[1]), new_build(files[2], files[3]);
    std::printf("| list | step | old ms | new ms | old / new | quartiles | best |\n"
                "| --- | --- | --- | --- | --- | --- | --- |\n");
    for (const std::string &list : lists)
        for (const Case &config : kCases)
            if (std::string(config.name).find(only) != std::string::npos)
                run(config, list, old_build, new_build, rounds);
    return 0;
}
