// SPDX-License-Identifier: Apache-2.0
// Coalescing of stores: adjacent lanes of a warp write adjacent words, so that every 32-byte sector is written
// completely. Only the emulated device can show this.
#include "backend_optimizer.h"
#include "noop_comm.h"
#include <map>
#include <set>
#include <tuple>

using namespace cuda_test;

namespace cuda_stores_tests {

using CudaStep = Cuda;
using CudaLists = Cuda;
using CudaExchange = Cuda;

/// Records the stores of all kernels during its lifetime.
class Stores {
public:
    Stores() { cuemu::options().stores = &all_; }
    ~Stores() { cuemu::options().stores = nullptr; }
    Stores(const Stores &) = delete;
    Stores &operator=(const Stores &) = delete;

    /// Checks that the n-th stores of the lanes of a warp are contiguous and have the same size. Returns the kernels
    /// that stored anything.
    std::set<std::string> check() const {
        std::map<std::tuple<std::string, unsigned, unsigned>, std::vector<cuemu::Store>> by_thread;
        for (const cuemu::Store &store : all_) by_thread[{store.kernel, store.block, store.thread}].push_back(store);
        std::set<std::string> kernels;
        int wrong = 0;
        for (const auto &[key, stores] : by_thread) {
            const auto &[kernel, block, thread] = key;
            kernels.insert(kernel);
            if (thread % 32 == 0) continue;
            const auto before = by_thread.find({kernel, block, thread - 1});
            if (before == by_thread.end() || before->second.size() != stores.size()) {
                ADD_FAILURE() << kernel << ": adjacent lanes differ in their number of stores";
                return kernels;
            }
            for (size_t n = 0; n < stores.size() && wrong < 5; ++n) {
                const cuemu::Store &left = before->second[n];
                if (stores[n].bytes == left.bytes && stores[n].address == left.address + left.bytes) continue;
                ADD_FAILURE() << kernel << ": store " << n << " of thread " << thread << " has " << stores[n].bytes
                              << " bytes, at an offset of " << long(stores[n].address - left.address)
                              << " bytes from the store of the preceding lane, which has " << left.bytes;
                ++wrong;
            }
        }
        return kernels;
    }

private:
    std::vector<cuemu::Store> all_;
};

/// Returns settings with tensors that fill blocks completely.
Setting full_blocks(int32_t algorithm) {
    Setting s;
    s.algorithm = algorithm;
    s.sizes = {4096, 1024, 8192};
    return s;
}
using Names = std::set<std::string>;

TEST_F(CudaStep, CoalescesStores) {
    for (const bool shifted : {false, true})
        for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16})
            for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
                Setting s = full_blocks(algorithm);
                s.param = s.grad = dtype;
                s.scaler = dtype == DSOPT_DTYPE_F16;
                s.shifted = shifted;
                s.step_flags = DSOPT_STEP_ZERO_GRADS;
                BackendOptimizer side(true, s);
                side.fill_gradients(0);
                ASSERT_OK(side.step());
                ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                const Stores stores;
                ASSERT_OK(side.step());
                ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                EXPECT_EQ(stores.check(),
                          algorithm == DSOPT_ALGORITHM_ADAMW ? Names({"update"}) : Names({"update_weights", "update"}));
            }
}

TEST_F(CudaLists, CoalesceStores) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16}) {
        Setting s = full_blocks(DSOPT_ALGORITHM_ADAMW);
        s.param = s.grad = dtype;
        BackendOptimizer side(true, s);
        side.fill_gradients(0);
        std::vector<dsopt_tensor> weights = side.gradients;
        for (size_t i = 0; i < weights.size(); ++i) weights[i].data = side.params[i].data();
        const auto count = int64_t(weights.size());
        const Stores stores;
        ASSERT_OK(
            dsopt_tensors_axpby(side.context, nullptr, side.gradients.data(), 0.5f, weights.data(), count, nullptr));
        ASSERT_OK(dsopt_tensors_clamp(side.context, weights.data(), count, 0.25, nullptr));
        ASSERT_OK(dsopt_zero_grad(side.context, side.gradients.data(), count, DSOPT_ZERO_FILL, nullptr));
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_EQ(stores.check(), Names({"axpby", "clamp", "zero"}));
    }
}

TEST_F(CudaExchange, CoalescesStores) {
    const NoOpComm noop(DSOPT_COMM_FLAG_ENQUEUE);
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        Setting s = full_blocks(algorithm);
        s.sizes = {8192, 16384};
        s.context = noop.context;
        s.desc.data = noop.comm;
        s.change = [](dsopt_group &group, int) {
            group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
            group.freeze_step = 1;
            if (group.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
                group.local_interval_steps = group.max_local_interval = 2;
        };
        BackendOptimizer side(true, s);
        side.fill_gradients(0);
        for (int t = 0; t < 3; ++t) ASSERT_OK(side.step());
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const Stores stores;
        for (int t = 0; t < 2; ++t) ASSERT_OK(side.step());
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const Names adam{"apply_mean", "feed", "reduce_messages"},
            zero_one{"apply_mean", "feed", "local", "reduce_messages"},
            lamb{"feed", "onebit_lamb_moments", "onebit_lamb_weights", "reduce_messages"};
        EXPECT_EQ(stores.check(), algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM   ? adam
                                  : algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB ? lamb
                                                                             : zero_one);
    }
}

} // namespace cuda_stores_tests
