// SPDX-License-Identifier: Apache-2.0
// bench_against OLD.so NEW.so [--rounds N] [--only TEXT] [LIST...]: one step of each rule and dtype by two builds of
// the library, in turns in one process, on the same parameters, gradients and state. Prints a Markdown table of the
// medians of old time / new time with the quartiles, and the ratio of the best times: above 1 the new one is faster.
//
// The memory bandwidth of a shared machine drifts by half within a minute, and pages differ from allocation to
// allocation. So both libraries work on the same memory, and a ratio is formed within a round of old, new, new, old.
#include "bench_util.h"
#include "dsopt_dl.h"
#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

namespace {

using bench::List;

struct Case {
    const char *name;
    int32_t algorithm, dtype; // of parameters and gradients; 16 bits: with masters, loss scale and clipping
    double momentum = 0;
    bool exchanges = false; // compressed steps of one rank of 8
    bool delta = false;     // writes the change and leaves the parameters alone
};

constexpr Case kCases[] = {
    {"adamw/f32", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_F32},
    {"adamw/f16", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_F16},
    {"adamw/bf16", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_BF16},
    {"adamw_delta/f32", DSOPT_ALGORITHM_ADAMW, DSOPT_DTYPE_F32, 0, false, true},
    {"lamb/f32", DSOPT_ALGORITHM_LAMB, DSOPT_DTYPE_F32},
    {"lamb/f16", DSOPT_ALGORITHM_LAMB, DSOPT_DTYPE_F16},
    {"sgd/f32", DSOPT_ALGORITHM_SGD, DSOPT_DTYPE_F32, 0.9},
    {"lion/f32", DSOPT_ALGORITHM_LION, DSOPT_DTYPE_F32},
    {"adagrad/f32", DSOPT_ALGORITHM_ADAGRAD, DSOPT_DTYPE_F32},
    {"onebit_adam/f32", DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_DTYPE_F32, 0, true},
    {"onebit_adam/f16", DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_DTYPE_F16, 0, true},
};

/// What both libraries work on.
struct Shared {
    std::vector<int64_t> sizes;
    List params, grads, outs;
    std::map<std::string, std::unique_ptr<List>> state; // by the name of a state tensor of each parameter

    Shared(const std::string &list, const Case &what) :
        sizes(bench::shapes(list)),
        params(sizes, what.dtype),
        grads(sizes, what.dtype),
        outs(what.delta ? sizes : std::vector<int64_t>(), what.dtype) {
        const int32_t dtype = what.dtype;
        for (const dsopt_tensor &grad : grads.tensors) // about 1e-3, so that nothing is a denormal
            for (int64_t i = 0; i < grad.numel; ++i) {
                const int low = int(i & 0x7f);
                if (dtype == DSOPT_DTYPE_F32)
                    static_cast<float *>(grad.data)[i] = 1e-3f + 1e-6f * float(low);
                else
                    static_cast<uint16_t *>(grad.data)[i] =
                        uint16_t((dtype == DSOPT_DTYPE_F16 ? 0x1400 : 0x3a80) + low);
            }
    }
    /// Memory for a state tensor that is as long as its parameter; NULL for others, which the engine keeps itself.
    void *memory_of(const dsopt_state_info &info) {
        if (info.param < 0 || info.tensor.numel != sizes[size_t(info.param)] || std::strstr(info.name, "error"))
            return nullptr;
        auto &list = state[info.name];
        if (!list) list = std::make_unique<List>(sizes, info.tensor.dtype);
        return list->tensors[size_t(info.param)].data;
    }
};

/// The step of one library.
class Engine {
public:
    explicit Engine(const dsopt_dl &dl) : dl_(dl) {}
    ~Engine() {
        dl_.dsopt_optimizer_destroy(optimizer_);
        dl_.dsopt_comm_destroy(comm_);
        dl_.dsopt_scaler_destroy(scaler_);
        dl_.dsopt_context_destroy(context_);
    }
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    /// False: this library does not know the algorithm.
    bool open(const Case &what, Shared &shared) {
        dsopt_group group;
        if (dl_.dsopt_group_init(&group, sizeof group, what.algorithm) != DSOPT_OK) return false;
        group.momentum = what.momentum;
        group.weight_decay = 0.01;
        if (what.exchanges) group.freeze_step = 1;
        check(dl_.dsopt_context_create(nullptr, &context_));
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        if (what.dtype != DSOPT_DTYPE_F32) {
            DSOPT_NEW(dsopt_scaler_desc, scaling);
            scaling.init = 1024;
            scaling.window = 1 << 30; // no growth, which would turn moments to denormals
            check(dl_.dsopt_scaler_create(context_, &scaling, &scaler_));
            desc.scaler = scaler_;
            desc.max_norm = 1;
        }
        if (what.exchanges) desc.data = make_comm();
        check(dl_.dsopt_optimizer_create(context_, &desc, &optimizer_));
        std::vector<dsopt_param> params(shared.sizes.size());
        for (size_t i = 0; i < params.size(); ++i) params[i].tensor = shared.params.tensors[i];
        check(dl_.dsopt_optimizer_add_group(optimizer_, &group, params.data(), int64_t(params.size())));
        int64_t count = 0;
        check(dl_.dsopt_optimizer_state_count(optimizer_, &count));
        std::vector<dsopt_tensor> state;
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            check(dl_.dsopt_optimizer_state(optimizer_, i, &info));
            info.tensor.data = shared.memory_of(info);
            state.push_back(info.tensor);
        }
        check(dl_.dsopt_optimizer_bind(optimizer_, DSOPT_BIND_STATE, state.data(), count));
        step_ = dsopt_step();
        step_.size = sizeof step_;
        step_.grads = shared.grads.tensors.data();
        step_.count = int64_t(shared.grads.tensors.size());
        if (what.delta) {
            step_.out = shared.outs.tensors.data();
            step_.flags = DSOPT_STEP_DELTA;
        }
        for (int i = 0; i < 16; ++i)
            step(); // into the compressed stage, and past the trial of asking ahead (cpu/step.h)
        return true;
    }
    void step() { check(dl_.dsopt_optimizer_step(optimizer_, &step_)); }
    /// Seconds of a step; the first one of the block brings caches and branches back and is not counted.
    double time(int steps) {
        if (steps > 1) step();
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < steps; ++i) step();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / steps;
    }

private:
    static constexpr int kRanks = 8;
    void check(dsopt_status status) const {
        if (status == DSOPT_OK) return;
        std::fprintf(stderr, "%s: %s\n", dl_.dsopt_status_name(status), dl_.dsopt_last_error());
        std::exit(1);
    }
    /// A rank whose peers all send what it sends.
    dsopt_comm *make_comm() {
        DSOPT_NEW(dsopt_comm_table, table);
        table.ranks = kRanks;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
        table.all_to_all = table.all_gather = [](void *, const void *send, void *recv, int64_t bytes, void *) {
            for (int rank = 0; rank < kRanks; ++rank)
                std::memcpy(static_cast<char *>(recv) + rank * bytes, send, size_t(bytes));
            return 0;
        };
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        check(dl_.dsopt_comm_create(context_, &desc, &comm_));
        return comm_;
    }

    const dsopt_dl &dl_;
    dsopt_context *context_ = nullptr;
    dsopt_scaler *scaler_ = nullptr;
    dsopt_comm *comm_ = nullptr;
    dsopt_optimizer *optimizer_ = nullptr;
    dsopt_step step_ = {};
};

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    return values[size_t(share * double(values.size() - 1) + 0.5)];
}

void run(const Case &what, const std::string &list, const dsopt_dl libraries[2], int rounds) {
    Shared shared(list, what);
    Engine before(libraries[0]), now(libraries[1]);
    if (!before.open(what, shared) || !now.open(what, shared)) return;
    // Blocks of about 5 ms, so that the clock and the first step of a block count for nothing.
    const int steps = std::clamp(int(0.005 / now.time(1)), 1, 2000);
    std::vector<double> ratios, old_times, new_times;
    for (int i = 0; i < rounds; ++i) {
        double a = before.time(steps), b = now.time(steps);
        b = (b + now.time(steps)) / 2;
        a = (a + before.time(steps)) / 2;
        ratios.push_back(a / b);
        old_times.push_back(a);
        new_times.push_back(b);
    }
    std::printf("| %s | %s | %.4g | %.4g | %.3f | %.3f to %.3f | %.3f |\n", list.c_str(), what.name,
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
            (files.size() < 2 ? files : lists).push_back(word);
    }
    if (files.size() < 2) {
        std::fprintf(stderr, "usage: bench_against OLD.so NEW.so [--rounds N] [--only TEXT] [LIST...]\n");
        return 2;
    }
    if (lists.empty()) lists = {"gpt2-124m", "resnet50", "10000x1000", "1x1048576", "1x65536", "148x4"};
    dsopt_dl libraries[2];
    for (int i = 0; i < 2; ++i)
        if (const char *problem = dsopt_dl_load(&libraries[i], files[size_t(i)].c_str())) {
            std::fprintf(stderr, "%s: %s\n", files[size_t(i)].c_str(), problem);
            return 1;
        }
    std::printf("| list | step | old ms | new ms | old / new | quartiles | best |\n"
                "| --- | --- | --- | --- | --- | --- | --- |\n");
    for (const std::string &list : lists)
        for (const Case &what : kCases)
            if (std::string(what.name).find(only) != std::string::npos) run(what, list, libraries, rounds);
    for (dsopt_dl &library : libraries) dsopt_dl_unload(&library);
    return 0;
}
