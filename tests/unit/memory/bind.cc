// SPDX-License-Identifier: Apache-2.0
// dsopt_optimizer_bind with NULL addresses, which allocates nothing.
#include "support/alloc.h"
#include "support/harness.h"

using namespace test;

namespace memory_bind_tests {

class Unbind : public testing::Test {
protected:
    const Trainer trainer{shapes_of({5000, 0, 33}, DSOPT_DTYPE_BF16), make_group(DSOPT_ALGORITHM_ADAMW)};
    std::vector<dsopt_tensor> registered, unbound;

    void SetUp() override {
        trainer.train(1);
        for (const dsopt_param &param : trainer.model.registered()) registered.push_back(param.tensor);
        unbound = registered;
        for (dsopt_tensor &tensor : unbound) tensor.data = nullptr;
    }
    dsopt_status bind(const std::vector<dsopt_tensor> &list) const {
        return dsopt_optimizer_bind(trainer.opt(), DSOPT_BIND_PARAMS, list.data(), int64_t(list.size()));
    }
    /// Checks that bind(unbound) succeeds if every allocation fails.
    void expect_no_allocation() const {
        NewCounter::calls = 0;
        NewCounter::failure = {0, true};
        dsopt_status status;
        {
            const CountScope armed;
            status = bind(unbound);
        }
        NewCounter::failure = {};
        EXPECT_OK(status);
        EXPECT_EQ(NewCounter::calls, 0);
        EXPECT_TRUE(refused(trainer.step(trainer.arguments()), DSOPT_ERR_STATE, "no memory"));
    }
};

TEST_F(Unbind, AllocatesNothing) {
    expect_no_allocation();
    ASSERT_OK(bind(registered));
    expect_no_allocation();
    expect_no_allocation();
}

TEST_F(Unbind, AllocatesNothingAfterAddGroup) {
    const Array more(DSOPT_DTYPE_F32, 70, 1.0f);
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    dsopt_param param{};
    param.tensor = more.tensor();
    ASSERT_OK(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1));
    unbound.push_back(param.tensor);
    unbound.back().data = nullptr;
    NewCounter::calls = 0;
    NewCounter::failure = {0, true};
    dsopt_status status;
    {
        const CountScope armed;
        status = bind(unbound);
    }
    NewCounter::failure = {};
    EXPECT_OK(status);
    EXPECT_EQ(NewCounter::calls, 0);
}

TEST_F(Unbind, KeepsCheckingLaterBindsForOverlap) {
    ASSERT_OK(bind(unbound));
    std::vector<dsopt_tensor> list = registered;
    list[2].data = list[0].data;
    EXPECT_TRUE(refused(bind(list), DSOPT_ERR_OVERLAP));
    ASSERT_OK(bind(registered));
    list = registered;
    list[0].data = nullptr;
    ASSERT_OK(bind(list));
    const Array other(DSOPT_DTYPE_F32, 9, 1.0f);
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    dsopt_param param{};
    param.tensor = {registered[2].data, 33, DSOPT_DTYPE_BF16, 0};
    EXPECT_TRUE(refused(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1), DSOPT_ERR_OVERLAP));
}

} // namespace memory_bind_tests
