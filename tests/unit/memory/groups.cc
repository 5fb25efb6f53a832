// SPDX-License-Identifier: Apache-2.0
// Groups that are added one by one: the memory per group does not grow with their number.
#include "support/alloc.h"
#include "support/onebit.h"

using namespace test;

namespace memory_groups_tests {

/// Returns a comm of two ranks that fails if used.
Comm idle_comm(const Context &context) {
    DSOPT_NEW(dsopt_comm_table, table);
    table.ranks = 2;
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 1; };
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    dsopt_comm *comm = nullptr;
    must(dsopt_comm_create(context.get(), &desc, &comm));
    return Comm(comm);
}

struct Kind {
    int32_t algorithm, compat;
};
class AddManyGroups : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(, AddManyGroups,
                         testing::Values(Kind{DSOPT_ALGORITHM_ADAMW, DSOPT_COMPAT_NONE},
                                         Kind{DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_NONE},
                                         Kind{DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_COMPAT_NONE},
                                         Kind{DSOPT_ALGORITHM_ONEBIT_LAMB, DSOPT_COMPAT_NONE},
                                         Kind{DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_DEEPSPEED}),
                         [](const auto &info) {
                             return name_of(info.param.algorithm) + (info.param.compat != 0 ? "Compat" : "");
                         });

TEST_P(AddManyGroups, AllocatesLinearlyInTheirNumber) {
    const Context context = make_context();
    const Comm comm = idle_comm(context);
    // Returns the bytes that all additions allocate, including memory that is freed.
    const auto bytes_of = [&](int64_t count) {
        const Optimizer opt = make_optimizer(context, desc_with(comm, GetParam().compat));
        const dsopt_group group = make_group(GetParam().algorithm);
        std::vector<float> weights(size_t(count), 1.0f);
        NewCounter::bytes = 0;
        {
            const CountScope armed;
            for (int64_t i = 0; i < count; ++i) {
                const dsopt_param param = param_of({&weights[size_t(i)], 1, DSOPT_DTYPE_F32, 0});
                must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
                double lr = 0;
                int64_t groups = 0;
                must(dsopt_optimizer_set(opt.get(), int32_t(i), DSOPT_KEY_LR, 0.5));
                must(dsopt_optimizer_get(opt.get(), int32_t(i), DSOPT_KEY_LR, &lr));
                must(dsopt_optimizer_count(opt.get(), &groups, nullptr));
                if (lr != 0.5 || groups != i + 1) throw std::runtime_error("the group is missing");
            }
        }
        const int64_t bytes = NewCounter::bytes;
        EXPECT_EQ(state_of(opt.get()).back().tensor.numel, count) << "steps of all parameters";
        return bytes;
    };
    // The factor is at most 16 if full lists double in size. It would be 64 if each addition visited all groups.
    EXPECT_LT(bytes_of(4000), 24 * bytes_of(500));
}

TEST(AddGroup, DoesNotCopyPerParameterState) {
    struct Count {
        int64_t calls = 0;
        size_t bytes = 0;
    } count;
    dsopt_context_desc desc = context_desc();
    desc.user = &count;
    desc.allocate = [](void *user, size_t bytes, size_t alignment, void *) {
        auto &all = *static_cast<Count *>(user);
        ++all.calls;
        all.bytes += bytes;
        return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    desc.release = [](void *, void *memory, size_t, void *) { std::free(memory); };
    const Context context = make_context(desc);
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        const Optimizer opt = make_optimizer(context);
        const dsopt_group group = make_group(algorithm);
        std::vector<float> weights(2001, 1.0f), ones(2001, 1.0f);
        std::vector<dsopt_tensor> list;
        const auto add = [&] {
            const size_t i = list.size();
            list.push_back({&ones[i], 1, DSOPT_DTYPE_F32, 0});
            const dsopt_param param = param_of({&weights[i], 1, DSOPT_DTYPE_F32, 0});
            must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
        };
        const auto step = [&] {
            DSOPT_NEW(dsopt_step, step);
            step.grads = list.data();
            step.count = int64_t(list.size());
            must(dsopt_optimizer_step(opt.get(), &step));
        };
        add();
        step();
        count = {};
        while (list.size() < weights.size()) add();
        EXPECT_LT(count.calls, 30) << name_of(algorithm); // a few lists that double in size
        EXPECT_LT(count.bytes, 2000 * 4 * 2 * 8u) << name_of(algorithm);
        step();
        const dsopt_state_info steps = state_of(opt.get()).back();
        ASSERT_EQ(steps.tensor.numel, 2001);
        const auto *const counts = static_cast<const int32_t *>(steps.tensor.data);
        EXPECT_EQ(counts[0], 2);
        EXPECT_EQ(std::count(counts + 1, counts + 2001, 1), 2000);
    }
}

TEST(AddGroup, KeepsStateIfItFails) {
    const Context context = make_context();
    const Comm comm = idle_comm(context);
    const Optimizer opt = make_optimizer(context, desc_with(comm));
    std::vector<float> weights(100, 1.0f);
    const dsopt_param param = param_of({weights.data(), 100, DSOPT_DTYPE_F32, 0}, "one");
    const dsopt_group adam = make_group(DSOPT_ALGORITHM_ONEBIT_ADAM), lamb = make_group(DSOPT_ALGORITHM_ONEBIT_LAMB);
    dsopt_group later = adam;
    ++later.freeze_step;
    const auto names = [&] {
        std::vector<std::pair<std::string, int64_t>> list;
        for (const dsopt_state_info &info : state_of(opt.get())) list.emplace_back(info.name, info.tensor.numel);
        return list;
    };
    must(dsopt_optimizer_add_group(opt.get(), &adam, &param, 1));
    for (const bool queried : {false, true}) { // the state is queried for the first time after the first round
        EXPECT_TRUE(refused(dsopt_optimizer_add_group(opt.get(), &adam, &param, 1), DSOPT_ERR_ARGUMENT, "'one'"));
        EXPECT_TRUE(refused(dsopt_optimizer_add_group(opt.get(), &lamb, nullptr, 0), DSOPT_ERR_UNSUPPORTED, "not two"));
        EXPECT_TRUE(refused(dsopt_optimizer_add_group(opt.get(), &later, nullptr, 0), DSOPT_ERR_ARGUMENT, "freeze"));
        const auto list = names();
        ASSERT_GT(list.size(), 5u) << queried;
        EXPECT_EQ(list[2].first, "worker_error");
        EXPECT_EQ(list.back(), (std::pair<std::string, int64_t>("step", 1)));
    }
}

/// Returns the bytes of the engine after `count` additions. After each, the test views all tensors without a parameter.
int64_t bytes_with_views(int32_t algorithm, int64_t count) {
    HookCounter hook;
    dsopt_context_desc desc = context_desc();
    hook.attach(desc);
    int64_t bytes = 0;
    {
        const Context context = make_context(desc);
        const Comm comm = idle_comm(context);
        const Optimizer opt = make_optimizer(context, desc_with(comm));
        const dsopt_group group = make_group(algorithm);
        std::vector<float> weights(size_t(count), 1.0f);
        std::vector<std::pair<const void *, char>> views; // addresses and first bytes of tensors
        for (int64_t i = 0; i < count; ++i) {
            const dsopt_param param = param_of({&weights[size_t(i)], 1, DSOPT_DTYPE_F32, 0});
            must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
            int64_t entries = 0;
            must(dsopt_optimizer_state_count(opt.get(), &entries));
            for (int64_t k = entries - 1; k >= 0; --k) {
                dsopt_state_info info = state_info(opt.get(), k);
                if (info.param >= 0) break;
                if (k == entries - 1) (void)exported_text(opt.get(), k); // allocates all state
                info = state_info(opt.get(), k);
                if (info.tensor.numel != 0) views.emplace_back(info.tensor.data, 0);
            }
        }
        for (auto &[data, byte] : views) byte = *static_cast<const char *>(data); // sanitizers detect freed memory
        bytes = hook.live_bytes;
    }
    EXPECT_EQ(hook.live_bytes, 0);
    return bytes;
}

LABEL(numbers_only);
LABEL(slow);
TEST(AddGroup, KeepsMemoryOfStateViewsLinear) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        const int64_t count = algorithm == DSOPT_ALGORITHM_ADAMW ? 2000 : 1000;
        const int64_t quarter = bytes_with_views(algorithm, count / 4), all = bytes_with_views(algorithm, count);
        EXPECT_LT(all, 8 * quarter) << name_of(algorithm); // the factor would be 16 if each addition allocated a block
    }
}

} // namespace memory_groups_tests
