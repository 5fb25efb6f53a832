// SPDX-License-Identifier: Apache-2.0
// pthread_cancel of a thread during a call, and before it.
#include "support/file.h"
#include "support/harness.h"
#include <pthread.h>
#include <unistd.h>

using namespace test;

namespace threads_cancel_tests {

using Run = std::function<void()>;

void *run(void *body) {
    (*static_cast<const Run *>(body))();
    return nullptr;
}
/// Runs `body` in a new thread, and `meanwhile` in this one. Returns true if cancellation ended the new thread.
bool is_cancelled(
    const Run &body, const std::function<void(pthread_t)> &meanwhile = [](pthread_t) {}) {
    pthread_t thread;
    void *result = nullptr;
    EXPECT_EQ(0, pthread_create(&thread, nullptr, run, const_cast<Run *>(&body)));
    meanwhile(thread);
    EXPECT_EQ(0, pthread_join(thread, &result));
    return result == PTHREAD_CANCELED;
}
/// Makes the next cancellation point end this thread.
void cancel_this_thread() { EXPECT_EQ(0, pthread_cancel(pthread_self())); }

class Cancel : public testing::Test {
protected:
    const Trainer trainer{shapes_of({1000}), make_group(DSOPT_ALGORITHM_ADAMW)};
    const Folder folder;
    const std::string file = folder / "a.safetensors";
    void SetUp() override { trainer.train(1); }
    void expect_usable() const {
        const Trainer other(shapes_of({1000}), make_group(DSOPT_ALGORITHM_ADAMW));
        EXPECT_OK(dsopt_optimizer_load(other.opt(), file.c_str(), nullptr));
        trainer.train(1);
        EXPECT_EQ(steps(trainer.opt())[0], 2);
    }
};

TEST_F(Cancel, EndsThreadAfterSaveIsComplete) {
    bool returned = false;
    EXPECT_TRUE(is_cancelled([&] {
        cancel_this_thread(); // write and fsync are cancellation points
        (void)!dsopt_optimizer_save(trainer.opt(), file.c_str(), nullptr);
        returned = true;
    }));
    EXPECT_FALSE(returned);
    expect_usable();
}

TEST_F(Cancel, EndsThreadThatSavesInLoop) {
    std::atomic<int> saves{0};
    std::atomic<bool> failed{false};
    EXPECT_TRUE(is_cancelled(
        [&] {
            for (;; ++saves)
                if (dsopt_optimizer_save(trainer.opt(), file.c_str(), nullptr) != DSOPT_OK) {
                    failed = true;
                    return;
                }
        },
        [&](pthread_t thread) {
            while (saves < 3 && !failed) std::this_thread::yield();
            EXPECT_EQ(0, pthread_cancel(thread));
        }));
    EXPECT_FALSE(failed);
    expect_usable();
}

TEST_F(Cancel, EndsThreadAfterTimeOutOfComm) {
    const Context context = make_context(1);
    const CommId id = new_id();
    EXPECT_TRUE(is_cancelled([&] {
        const dsopt_comm_desc desc = local_desc(id, 0, 2, 50);
        dsopt_comm *comm = nullptr;
        cancel_this_thread();
        (void)!dsopt_comm_create(context.get(), &desc, &comm);
    }));
    run_ranks(2, [&](int rank) { EXPECT_OK(call_collective(context, local_comm(context, id, rank, 2))); });
}

TEST_F(Cancel, DoesNotInterruptHooksAndStep) {
    const Context context = make_context(1);
    int completed = 0;
    DSOPT_NEW(dsopt_comm_table, table);
    table.self = &completed;
    table.ranks = 2;
    table.all_reduce = [](void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t, void *) {
        pthread_testcancel();
        if (send != recv) std::memcpy(recv, send, size_t(count) * (dtype == DSOPT_DTYPE_F64 ? 8 : 4));
        ++*static_cast<int *>(self);
        return 0;
    };
    DSOPT_NEW(dsopt_comm_desc, desc);
    desc.kind = DSOPT_COMM_KIND_TABLE;
    desc.table = &table;
    dsopt_comm *raw_comm = nullptr;
    ASSERT_OK(dsopt_comm_create(context.get(), &desc, &raw_comm));
    const Comm comm(raw_comm);
    dsopt_optimizer_desc desc_with_model = optimizer_desc(0.5);
    desc_with_model.model = comm.get();
    Trainer ranks(context, desc_with_model, make_group(DSOPT_ALGORITHM_ADAMW), {Array(DSOPT_DTYPE_F32, 100, 1.0f)});
    const std::vector<Array> gradients{Array(DSOPT_DTYPE_F32, 100, 0.5f)};
    EXPECT_TRUE(is_cancelled([&] {
        cancel_this_thread();
        (void)!ranks.step(gradients);
    }));
    EXPECT_GT(completed, 0);
    EXPECT_EQ(info_of(comm).status, DSOPT_OK);
    EXPECT_EQ(steps(ranks.opt())[0], 1);
    EXPECT_OK(ranks.step(gradients));
}

TEST_F(Cancel, IsDeferredWhileDisabled) {
    dsopt_status status = DSOPT_ERR_SIGNED;
    int state = PTHREAD_CANCEL_ENABLE;
    EXPECT_TRUE(is_cancelled([&] {
        EXPECT_EQ(0, pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, nullptr));
        cancel_this_thread();
        status = dsopt_optimizer_save(trainer.opt(), file.c_str(), nullptr);
        EXPECT_EQ(0, pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state));
        pthread_testcancel();
    }));
    EXPECT_OK(status);
    EXPECT_EQ(state, PTHREAD_CANCEL_DISABLE);
    expect_usable();
}

TEST_F(Cancel, IsDeferredInFunctionsWithoutStatus) {
    bool returned = false;
    EXPECT_TRUE(is_cancelled([&] {
        Context context = make_context(1);
        Comm comm = self_comm(context);
        Optimizer optimizer = make_optimizer(context);
        cancel_this_thread();
        dsopt_comm_abort(comm.get());
        optimizer.reset();
        comm.reset();
        context.reset();
        returned = dsopt_build_info()[0] == '{';
        pthread_testcancel();
    }));
    EXPECT_TRUE(returned);
}

} // namespace threads_cancel_tests
