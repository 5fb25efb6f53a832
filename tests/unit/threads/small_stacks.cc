// SPDX-License-Identifier: Apache-2.0
// Calls of threads whose stack has 64 KiB, which is half of what musl gives to a thread. In builds that are not optimized, or
// with sanitizers or counters of coverage, functions need more.
#include "support/file.h"
#include "support/harness.h"
#include "support/onebit.h"
#include <cstring>
#include <pthread.h>

using namespace test;

LABEL_FILE(cpu);
namespace threads_small_stacks_tests {

#if DSOPT_SMALL_FRAMES
constexpr size_t kStack = size_t(64) << 10; // includes thread-local variables and the C library's data of the thread
#else
constexpr size_t kStack = size_t(4) << 20;
#endif

struct Case {
    std::string name;
    dsopt_group group;
    uint32_t flags = 0;
    int32_t dtype = DSOPT_DTYPE_F32;
    int32_t compat = DSOPT_COMPAT_NONE;
    int ranks = 1;
    friend void PrintTo(const Case &c, std::ostream *out) { *out << c.name; }
};

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const int32_t algorithm : kStandardRules) {
        all.push_back({name_of(algorithm), group_of(algorithm)});
        all.push_back({name_of(algorithm) + "Bf16", group_of(algorithm), 0, DSOPT_DTYPE_BF16});
    }
    for (const int32_t algorithm : kAlgorithms)
        all.push_back({name_of(algorithm) + "Compat", group_of(algorithm), 0, DSOPT_DTYPE_F16, DSOPT_COMPAT_DEEPSPEED});
    for (const int32_t products : kDtypes) {
        Case muon{"Muon" + dtype_name(products), group_of(DSOPT_ALGORITHM_MUON, 0.02)};
        muon.group.ns_dtype = products;
        all.push_back(muon);
    }
    Case q8{"AdamWQ8", group_of(DSOPT_ALGORITHM_ADAMW), 0, DSOPT_DTYPE_BF16};
    q8.group.exp_avg_format = q8.group.exp_avg_sq_format = DSOPT_MOMENT_Q8;
    all.push_back(q8);
    for (const int32_t algorithm : kFamily) {
        all.push_back({name_of(algorithm), group_for(algorithm, 2)});
        all.back().ranks = 2;
    }
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        all.push_back({name_of(algorithm) + "Shard", group_of(algorithm), DSOPT_OPTIMIZER_SHARD});
        all.back().ranks = 2;
    }
    return all;
}

/// Wide, tall, and larger than what one thread multiplies alone.
constexpr int64_t kMatrices[][2] = {{5, 300}, {300, 40}, {170, 200}};

/// What one rank does, with memory that other threads have prepared.
class Life {
public:
    Life(const Case &c, int32_t threads, int rank, const CommId &id, std::vector<std::string> paths) :
        case_(c),
        context_(context_desc(threads)),
        comm_(local_desc(id, rank, c.ranks)),
        paths_(std::move(paths)),
        path_(paths_[size_t(rank)].c_str()) {
        for (const std::string &path : paths_) files_.push_back(path.c_str());
        for (const auto &[rows, cols] : kMatrices) {
            weights_.emplace_back(c.dtype, size_t(rows * cols), 0.0f);
            grads_.emplace_back(c.dtype, size_t(rows * cols), 0.0f);
            weights_.back().fill(uint64_t(rows));
            dsopt_param param = param_of(weights_.back().tensor());
            if (c.group.algorithm == DSOPT_ALGORITHM_MUON) param.rows = rows, param.cols = cols;
            params_.push_back(param);
            list_.push_back(grads_.back().tensor());
            grads_.back().fill(uint64_t(cols));
        }
    }
    std::string failure;
    std::string text() const {
        std::string all;
        for (const Array &weight : weights_) all += weight.text();
        return all;
    }

    /// Runs on the small stack.
    void run() {
        dsopt_context *context = nullptr;
        dsopt_comm *comm = nullptr;
        dsopt_optimizer *opt = nullptr;
        if (holds("context", dsopt_context_create(&context_, &context)) &&
            (case_.ranks == 1 || holds("comm", dsopt_comm_create(context, &comm_, &comm))))
            train(context, comm, opt);
        dsopt_optimizer_destroy(opt);
        dsopt_comm_destroy(comm);
        dsopt_context_destroy(context);
    }

private:
    bool holds(const char *call, dsopt_status status) {
        if (status != DSOPT_OK && failure.empty()) failure = std::string(call) + ": " + dsopt_last_error();
        return failure.empty();
    }
    void train(dsopt_context *context, dsopt_comm *comm, dsopt_optimizer *&opt) {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.max_norm = case_.ranks == 1 ? 1 : 0;
        desc.flags = case_.flags;
        desc.compat = case_.compat;
        desc.data = comm;
        if (!holds("create", dsopt_optimizer_create(context, &desc, &opt)) ||
            !holds("add_group", dsopt_optimizer_add_group(opt, &case_.group, params_.data(), int64_t(params_.size()))))
            return;
        steps(opt, 6);
        holds("save", dsopt_optimizer_save(opt, path_, nullptr));
        DSOPT_NEW(dsopt_io, io);
        io.files = int32_t(files_.size());
        io.paths = files_.data();
        const bool sharded = case_.flags & DSOPT_OPTIMIZER_SHARD; // each rank reads the files of all
        holds("load", dsopt_optimizer_load(opt, sharded ? nullptr : path_, sharded ? &io : nullptr));
        steps(opt, 2);
    }
    void steps(dsopt_optimizer *opt, int count) {
        DSOPT_NEW(dsopt_step, step);
        step.grads = list_.data();
        step.count = int64_t(list_.size());
        for (int i = 0; i < count; ++i) holds("step", dsopt_optimizer_step(opt, &step));
    }

    const Case case_;
    const dsopt_context_desc context_;
    const dsopt_comm_desc comm_;
    const std::vector<std::string> paths_; // of all ranks
    const char *const path_;
    std::vector<const char *> files_;
    std::vector<Array> weights_, grads_;
    std::vector<dsopt_param> params_;
    std::vector<dsopt_tensor> list_;
};

void *run_life(void *life) {
    static_cast<Life *>(life)->run();
    return nullptr;
}

void must_be_zero(int error) {
    if (error != 0) throw std::runtime_error(std::strerror(error));
}

/// Returns the weights of each rank. `stack` 0: the default size.
std::vector<std::string> run_lives(const Case &c, int32_t threads, size_t stack) {
    const Folder folder;
    const CommId id = new_id();
    std::vector<std::unique_ptr<Life>> lives;
    std::vector<std::string> paths;
    for (int rank = 0; rank < c.ranks; ++rank) paths.push_back(folder / std::to_string(rank));
    for (int rank = 0; rank < c.ranks; ++rank) lives.push_back(std::make_unique<Life>(c, threads, rank, id, paths));
    pthread_attr_t attributes;
    must_be_zero(pthread_attr_init(&attributes));
    if (stack != 0) must_be_zero(pthread_attr_setstacksize(&attributes, stack));
    std::vector<pthread_t> running(lives.size());
    for (size_t i = 0; i < lives.size(); ++i)
        must_be_zero(pthread_create(&running[i], &attributes, run_life, lives[i].get()));
    for (const pthread_t thread : running) must_be_zero(pthread_join(thread, nullptr));
    pthread_attr_destroy(&attributes);
    std::vector<std::string> texts;
    for (const auto &life : lives) {
        EXPECT_EQ(life->failure, "") << c.name;
        texts.push_back(life->text());
    }
    return texts;
}

class SmallStack : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(, SmallStack, testing::ValuesIn(cases()), [](const auto &info) { return info.param.name; });

// An overflow ends the process: the page after a stack is inaccessible.
TEST_P(SmallStack, IsEnoughToStepSaveAndLoad) {
    const std::vector<std::string> expected = run_lives(GetParam(), 1, 0);
    for (const int32_t threads : {1, 3}) EXPECT_EQ(run_lives(GetParam(), threads, kStack), expected) << threads;
}

} // namespace threads_small_stacks_tests
