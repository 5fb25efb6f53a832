// SPDX-License-Identifier: Apache-2.0
// The process forks while another thread holds the lock of a global or initializes it.
#include "base/fork.h"
#include "support/fork.h"
#include "support/label.h"
#include <condition_variable>
#include <thread>

using namespace test;

LABEL_FILE(one_thread);

namespace inside_fork_tests {

/// A thread that stays inside a function until the destruction of this object.
class ThreadInside {
public:
    /// body(wait) runs in the thread; it calls wait().
    template <class Body> explicit ThreadInside(const Body &body) {
        thread_ = std::thread([this, body] {
            body([this] {
                std::unique_lock lock(mutex_);
                inside_ = true;
                changed_.notify_all();
                changed_.wait(lock, [this] { return leaves_; });
            });
        });
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return inside_; });
    }
    ~ThreadInside() {
        {
            const std::lock_guard lock(mutex_);
            leaves_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool inside_ = false, leaves_ = false;
    std::thread thread_;
};

TEST(PerProcess, LockHeldAtForkIsFreeInChild) {
    static constinit dsopt::PerProcess<std::vector<int>> shared;
    dsopt::watch_forks();
    const auto push = [](int value) {
        return shared.with([value](std::vector<int> &values) {
            values.push_back(value);
            return values.size();
        });
    };
    EXPECT_EQ(push(1), 1);
    EXPECT_EQ(push(2), 2);
    {
        const ThreadInside thread([](const auto &wait) {
            shared.with([&](std::vector<int> &values) {
                values.push_back(3);
                wait();
            });
        });
        EXPECT_TRUE(passes_in_child([&](const auto &expect) {
            expect(push(1) == 1); // the child has its own data
            expect(push(2) == 2);
            expect(bool(passes_in_child([&](const auto &expect) { expect(push(1) == 1); })));
        }));
    }
    EXPECT_EQ(push(4), 4);
}

TEST(Lazy, ChildComputesValueInProgressAtFork) {
    static constinit dsopt::Lazy<int> value;
    {
        const ThreadInside thread([](const auto &wait) {
            (void)value.get([&] {
                wait();
                return 1;
            });
        });
        EXPECT_TRUE(passes_in_child([&](const auto &expect) { expect(value.get([] { return 2; }) == 2); }));
    }
    EXPECT_EQ(value.get([] { return 3; }), 1);
    EXPECT_TRUE(passes_in_child([&](const auto &expect) { expect(value.get([] { return 4; }) == 1); }));
}

} // namespace inside_fork_tests
