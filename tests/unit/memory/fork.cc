// SPDX-License-Identifier: Apache-2.0
// A fork() while another thread is inside the library: the child can create new objects.
#include "support/fork.h"
#include "support/alloc.h"
#include "support/harness.h"
#include <sys/mman.h>

using namespace test;

LABEL_FILE(one_thread);

namespace memory_fork_tests {

/// Makes the first calls of a process, up to a step over a comm. Returns the state.
std::string first_use() {
    if (dsopt_build_info() == nullptr) return "";
    const Context context = make_context(2);
    const Comm comm = local_comm(context, new_id(), 0, 1);
    Trainer trainer(context, desc_with(comm), make_group(DSOPT_ALGORITHM_ADAMW), {Array(DSOPT_DTYPE_F32, 100, 1.0f)});
    must(trainer.step({Array(DSOPT_DTYPE_F32, 100, 0.5f)}));
    return trainer.text();
}

std::atomic<bool> held{false};
[[noreturn]] void pause_forever() {
    for (;;) ::pause();
}
void block_in_allocation() {
    held.store(true);
    pause_forever();
}

TEST(Fork, WorksInTheChildDuringAnyAllocation) {
    struct Seen {
        std::atomic<bool> completed{false};
        std::atomic<int64_t> held{0};
    };
    void *const page = ::mmap(nullptr, sizeof(Seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(page, MAP_FAILED);
    Seen &seen = *new (page) Seen;
    // Each allocation is tested in a new process, in which the thread is the first user of the library.
    for (int64_t allocation = 0; !seen.completed; ++allocation) {
        ASSERT_TRUE(passes_in_child([&](const auto &expect) {
            NewCounter::calls = 0;
            NewCounter::failure.failing_call = allocation;
            NewCounter::on_failure = block_in_allocation;
            std::thread([&] {
                const CountScope armed;
                (void)first_use();
                seen.completed = true;
                pause_forever(); // a thread that ends may hold a lock of a sanitizer's runtime while the child forks
            }).detach();
            while (!held && !seen.completed) std::this_thread::yield();
            if (held) ++seen.held;
            expect(bool(passes_in_child([](const auto &expect) { expect(!first_use().empty()); })));
        })) << "allocation "
            << allocation;
    }
    EXPECT_GT(seen.held, 20);
    ::munmap(page, sizeof(Seen));
}

} // namespace memory_fork_tests
