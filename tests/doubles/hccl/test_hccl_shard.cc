// SPDX-License-Identifier: Apache-2.0
// Sharded state and means of gradients over the doubles of libhccl.so and libascendcl.so.
#include "../shard_faults.h"
#include <cstdlib>
#include <dlfcn.h>

using namespace test;

namespace hccl_shard_tests {

/// Selects a device, as a program must before it creates a comm.
void set_device() {
    void *const runtime = dlopen("libascendcl.so", RTLD_NOW);
    auto *const select_device =
        runtime != nullptr ? reinterpret_cast<int (*)(int)>(dlsym(runtime, "aclrtSetDevice")) : nullptr;
    if (select_device == nullptr || select_device(0) != 0) throw std::runtime_error("no device");
}
std::string hccl_id() {
    size_t bytes = 0;
    must(dsopt_comm_unique_id(DSOPT_COMM_KIND_HCCL, nullptr, &bytes));
    std::string id(bytes, '\0');
    must(dsopt_comm_unique_id(DSOPT_COMM_KIND_HCCL, id.data(), &bytes));
    return id;
}
dsopt_status join(const std::string &id, int rank, int ranks, int timeout_ms, int32_t flags, dsopt_context *context,
                  dsopt_comm **comm) {
    set_device();
    dsopt_comm_desc desc = comm_desc(DSOPT_COMM_KIND_HCCL, id.data(), id.size(), rank, ranks, timeout_ms);
    desc.flags = flags;
    return dsopt_comm_create(context, &desc, comm);
}
void with_comms(int32_t flags, int ranks, const std::function<void(dsopt_context *, dsopt_comm *, int rank)> &body) {
    const std::string id = hccl_id();
    run_ranks(ranks, [&](int rank) {
        const Context context = make_context(1);
        dsopt_comm *made = nullptr;
        must(join(id, rank, ranks, 60000, flags, context.get(), &made));
        const Comm comm(made);
        body(context.get(), made, rank);
    });
}

TEST(HcclShard, HasTheBitsOfOneRank) {
    for (const int ranks : {1, 2, 3})
        with_comms(0, ranks, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
            shard_run::expect_bits_of_one_rank(context, comm, rank, ranks, host_memory());
        });
}

TEST(HcclShard, AddsByReduceScatterWithProviderSums) {
    for (const int ranks : {2, 3}) {
        std::vector<std::string> weights{size_t(ranks)};
        with_comms(DSOPT_COMM_FLAG_PROVIDER_SUMS, ranks, [&](dsopt_context *context, dsopt_comm *comm, int rank) {
            weights[size_t(rank)] = shard_run::train_with_provider_sums(context, comm, ranks, rank, host_memory());
        });
        for (const std::string &of_rank : weights) EXPECT_TRUE(of_rank == weights[0]);
    }
}

/// Only the failing rank learns of a failure; the other one waits until the time-out.
class FaultyHccl final : public shard_run::FaultyFabric {
public:
    ~FaultyHccl() override { unsetenv(kVariable); }
    void prepare(shard_run::Fault fault, int64_t n) override {
        id_ = hccl_id();
        const std::string call = "0:" + std::to_string(n - 1);
        if (fault == shard_run::Fault::none)
            unsetenv(kVariable);
        else
            setenv(kVariable, (call + (fault == shard_run::Fault::hangs ? ":hang" : ":error")).c_str(), 1);
    }
    dsopt_status join(int rank, int timeout_ms, int32_t flags, dsopt_context *context, dsopt_comm **comm) override {
        return hccl_shard_tests::join(id_, rank, 2, timeout_ms, flags, context, comm);
    }
    bool reports_failures() const override { return false; }

private:
    static constexpr const char *kVariable = "DSOPT_FAKE_HCCL_FAULT";
    std::string id_;
};

TEST(HcclShardFaults, ReturnStatusAndLeaveThePartOfAStep) {
    FaultyHccl fabric;
    fail_each_call_of_sharded_steps(fabric);
}

} // namespace hccl_shard_tests
