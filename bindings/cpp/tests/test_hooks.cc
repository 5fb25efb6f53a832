// SPDX-License-Identifier: Apache-2.0
// Hooks and exceptions that pass through them; moved and adopted handles.
#include "support.h"
#include <atomic>
#include <cstdlib>
#include <thread>

namespace hooks_tests {

constexpr std::int64_t kLarge = 1 << 18; // enough for several pieces

struct Large {
    std::vector<float> w = std::vector<float>(kLarge, 1.f), g = std::vector<float>(kLarge, 0.5f);
    dsopt::tensor grads[1] = {dsopt::view(g)};
    dsopt::param param{dsopt::view(w), "w"};
};

/// Every hook; each can be made to throw.
struct Hooks {
    std::atomic<int> allocated{0}, released{0};
    int parallel = 0;
    std::vector<std::string> messages;
    bool no_memory = false, no_pool = false, no_log = false, no_release = false;
    void *allocate(std::size_t bytes, std::size_t alignment, void *) {
        if (no_memory) throw Refusal{1};
        ++allocated;
        return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    }
    void release(void *memory, std::size_t, void *) {
        ++released;
        std::free(memory);
        if (no_release) throw Refusal{2};
    }
    void parallel_for(std::int64_t n, dsopt::pieces run) {
        ++parallel;
        for (std::int64_t i = 0; i < n; ++i) {
            if (no_pool && i == 1) throw Refusal{3};
            run(i);
        }
    }
    void log(dsopt::log_level level, const char *text) {
        messages.push_back(std::to_string(static_cast<int>(level)) + text);
        if (no_log) throw Refusal{4};
    }
};

dsopt::context_options four_threads() {
    dsopt::context_options options;
    options.threads = 4;
    options.log_level = dsopt::log_level::trace;
    return options;
}

TEST(CppContext, CallsHooks) {
    Hooks hooks;
    {
        Large large;
        dsopt::context ctx(four_threads(), hooks);
        dsopt::optimizer opt(ctx);
        opt.add_group(dsopt::adamw{}, {large.param});
        opt.step(large.grads);
        EXPECT_GT(hooks.allocated, 0);
        EXPECT_GT(hooks.parallel, 0);
        EXPECT_FALSE(hooks.messages.empty());
    }
    EXPECT_EQ(hooks.allocated, hooks.released);
}

TEST(CppContext, RethrowsExceptionsOfHooks) {
    Hooks hooks;
    Large large;
    dsopt::context ctx(four_threads(), hooks);
    dsopt::optimizer opt(ctx);
    opt.add_group(dsopt::adamw{}, {large.param});
    hooks.no_memory = true;
    EXPECT_EQ(refusal([&] { opt.step(large.grads); }), 1);
    EXPECT_EQ(large.w[0], 1);
    hooks.no_memory = false;
    opt.step(large.grads); // no effect of the failure remains
    hooks.no_pool = true;
    EXPECT_EQ(refusal([&] { opt.step(large.grads); }), 3);
    hooks.no_pool = false;
    opt.step(large.grads);
}

TEST(CppContext, RethrowsExceptionOfHookIfCallSucceeded) {
    Hooks hooks;
    hooks.no_log = true; // a new context logs its description, after the handle has been created
    EXPECT_EQ(refusal([&] { dsopt::context(four_threads(), hooks); }), 4);
    EXPECT_EQ(hooks.messages.size(), 1u);
    EXPECT_FALSE(dsopt::detail::hook_threw);
    dsopt::context_options quiet;
    quiet.log_level = dsopt::log_level::error;
    dsopt::context ctx(quiet, hooks);
}

TEST(CppContext, DropsExceptionsOfHooksInDestructors) {
    Hooks hooks;
    Large large;
    {
        dsopt::context ctx(four_threads(), hooks);
        dsopt::optimizer opt(ctx);
        opt.add_group(dsopt::adamw{}, {large.param});
        opt.step(large.grads);
        hooks.no_release = true;
    }
    EXPECT_GT(hooks.released, 0);
    dsopt::context(dsopt::context_options{}); // the dropped exception is not thrown later
}

struct OnlyLog {
    std::vector<std::string> messages;
    void log(dsopt::log_level, const char *text) { messages.emplace_back(text); }
};

TEST(CppContext, AcceptsSubsetOfHooks) {
    OnlyLog hooks;
    Large large;
    dsopt::context ctx(four_threads(), hooks);
    dsopt::optimizer opt(ctx);
    opt.add_group(dsopt::adamw{}, {large.param});
    opt.step(large.grads);
    EXPECT_FALSE(hooks.messages.empty());
}

TEST(CppStepOptions, PoolOverridesContextHook) {
    Hooks hooks;
    Large large;
    dsopt::context ctx(four_threads(), hooks);
    dsopt::optimizer opt(ctx);
    opt.add_group(dsopt::adamw{}, {large.param});
    opt.step(large.grads);
    hooks.parallel = 0;
    SerialPool pool;
    dsopt::step_options options;
    options.pool = pool;
    opt.step(large.grads, options);
    EXPECT_GT(pool.calls, 0);
    EXPECT_EQ(hooks.parallel, 0);
    const auto threads = [](std::int64_t n, dsopt::pieces run) {
        std::vector<std::thread> team;
        for (std::int64_t i = 1; i < n; ++i) team.emplace_back([run, i] { run(i); });
        if (n > 0) run(0);
        for (std::thread &thread : team) thread.join();
    };
    options.pool = threads;
    opt.step(large.grads, options);
    const auto broken = [](std::int64_t, dsopt::pieces) { throw Refusal{5}; };
    options.pool = broken;
    EXPECT_EQ(refusal([&] { opt.step(large.grads, options); }), 5);
    const auto lazy = [](std::int64_t, dsopt::pieces run) { run(0); };
    options.pool = lazy;
    EXPECT_REFUSED(opt.step(large.grads, options), dsopt::state_error, "parallel_for");
}

TEST(CppHandle, RejectsUseAfterMove) {
    Large large;
    dsopt::context ctx;
    dsopt::scaler scaler(ctx);
    dsopt::comm comm = dsopt::comm::self(ctx);
    dsopt::optimizer_options options;
    options.scaler = &scaler;
    options.data = &comm;
    dsopt::optimizer opt(ctx, options);
    opt.add_group(dsopt::adamw{}, {large.param});

    dsopt::context ctx2 = std::move(ctx);
    dsopt::scaler scaler2 = std::move(scaler);
    dsopt::comm comm2 = std::move(comm);
    dsopt::optimizer opt2 = std::move(opt);
    EXPECT_FALSE(ctx || scaler || comm || opt);
    EXPECT_TRUE(ctx2 && scaler2 && comm2 && opt2);
    EXPECT_REFUSED(ctx.zero_grad(large.grads), dsopt::argument_error, "ctx");
    EXPECT_REFUSED(dsopt::optimizer{ctx}, dsopt::argument_error, "ctx");
    EXPECT_REFUSED(scaler.update(), dsopt::argument_error, "scaler");
    EXPECT_EQ(scaler.device_scale(), nullptr);
    EXPECT_REFUSED(comm.info(), dsopt::argument_error, "comm");
    comm.abort();
    EXPECT_REFUSED(opt.step(large.grads), dsopt::argument_error, "optimizer");
    EXPECT_REFUSED(opt.retain(), dsopt::argument_error, "optimizer");
    EXPECT_REFUSED(opt.state_list(), dsopt::argument_error, "optimizer");
    EXPECT_REFUSED(opt.save("nowhere"), dsopt::argument_error, "optimizer");
    opt2.step(large.grads);
    // Treated as absent, they would mean one rank, or no loss scale.
    const auto without = [&](auto member, auto &moved) {
        dsopt::optimizer_options options;
        options.*member = &moved;
        dsopt::optimizer made(ctx2, options);
    };
    EXPECT_REFUSED(without(&dsopt::optimizer_options::data, comm), dsopt::argument_error, "data was moved from");
    EXPECT_REFUSED(without(&dsopt::optimizer_options::model, comm), dsopt::argument_error, "model was moved from");
    EXPECT_REFUSED(without(&dsopt::optimizer_options::node, comm), dsopt::argument_error, "node was moved from");
    EXPECT_REFUSED(without(&dsopt::optimizer_options::scaler, scaler), dsopt::argument_error, "scaler was moved");
    dsopt::norm_options over;
    over.comm = &comm;
    dsopt_norm_result found;
    EXPECT_REFUSED(ctx2.norm(large.grads, &found, over), dsopt::argument_error, "comm was moved from");

    dsopt::optimizer &itself = opt2;
    opt2 = std::move(itself);
    ASSERT_TRUE(opt2);
    opt = std::move(opt2);
    opt.step(large.grads);
    ctx = dsopt::context(); // the optimizer keeps references to the old ones
    scaler2 = dsopt::scaler(ctx);
    opt.step(large.grads);
    EXPECT_EQ(opt.report().calls, 3);
}

TEST(CppOptimizer, RetainSharesTheOptimizer) {
    Large large;
    dsopt::context ctx;
    auto first = std::make_unique<dsopt::optimizer>(ctx);
    first->add_group(dsopt::adamw{}, {large.param});
    dsopt::optimizer second = first->retain();
    first->step(large.grads);
    first.reset();
    second.step(large.grads);
    EXPECT_EQ(second.report().calls, 2);
}

TEST(CppHandle, AdoptsHandlesOfC) {
    dsopt_context *made = nullptr;
    MUST(dsopt_context_create(nullptr, &made));
    dsopt::context ctx = dsopt::context::adopt(made);
    EXPECT_EQ(ctx.get(), made);
    dsopt_optimizer *opt = nullptr;
    MUST(dsopt_optimizer_create(ctx.get(), nullptr, &opt));
    EXPECT_EQ(dsopt::optimizer::adopt(opt).param_count(), 0);
    dsopt_scaler *scaler = nullptr;
    MUST(dsopt_scaler_create(ctx.get(), nullptr, &scaler));
    EXPECT_EQ(dsopt::scaler::adopt(scaler).info().scale, 65536);
    dsopt_comm *comm = nullptr;
    MUST(dsopt_comm_create(ctx.get(), nullptr, &comm));
    EXPECT_EQ(dsopt::comm::adopt(comm).info().ranks, 1);
}

TEST(CppContext, RejectsInvalidOptionsByName) {
    dsopt::context_options options;
    options.threads = -1;
    EXPECT_REFUSED(dsopt::context{options}, dsopt::argument_error, "threads");
    options = {};
    options.chunk = 5;
    EXPECT_REFUSED(dsopt::context{options}, dsopt::argument_error, "chunk");
    options = {};
    options.device = 3;
    EXPECT_REFUSED(dsopt::context{options}, dsopt::argument_error, "device");
    options = {};
    options.check_pointers = true;
    EXPECT_REFUSED(dsopt::context{options}, dsopt::unsupported_error, "CHECK_POINTERS");
}

TEST(CppOptimizer, AcceptsCommsOfEveryRole) {
    Large large;
    dsopt::context ctx;
    std::vector<dsopt::comm> experts;
    experts.push_back(dsopt::comm::self(ctx));
    dsopt::comm data = dsopt::comm::self(ctx), model = dsopt::comm::self(ctx);
    dsopt::optimizer_options options;
    options.max_norm = 1;
    options.data = &data;
    options.model = &model;
    options.experts = experts;
    dsopt::optimizer opt(ctx, options);
    experts.clear();
    large.param.expert = 2;
    EXPECT_REFUSED(opt.add_group(dsopt::adamw{}, {large.param}), dsopt::argument_error, "expert");
    large.param.expert = 1;
    opt.add_group(dsopt::adamw{}, {large.param});
    opt.step(large.grads);
    EXPECT_GT(opt.report().expert_norm, 0);
}

} // namespace hooks_tests
