// SPDX-License-Identifier: Apache-2.0
// Ranks of a comm on emulated devices, each with its own context and stream.
#pragma once
#include "comm/provider.h"
#include "cuda_runtime.h"
#include "fake_nccl.h"
#include "support/cuda_memory.h"
#include "support/handles.h"
#include "support/numbers.h"
#include <barrier>
#include <chrono>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <vector>

namespace nccl_test {

using dsopt::Comm;
using dsopt::Place;
using Bytes = std::vector<char>;
using Clock = std::chrono::steady_clock;

constexpr int kDevices = 12; // for three ranks of several comms at once
/// Less than the time-out of a comm that must not wait for it, and longer than a loaded machine pauses.
constexpr int kLongestMs = 50000;

inline int milliseconds_since(Clock::time_point begin) {
    return int(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count());
}
inline void sleep_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }

inline void run_ranks(int ranks, const std::function<void(int rank)> &body) {
    test::run_ranks(ranks, [&body](int rank) {
        // One device per rank, as the library needs: cudaFree waits for all work of a device, including that of peers.
        if (cudaSetDevice(rank) != cudaSuccess) throw std::runtime_error("no device");
        body(rank);
    });
}

/// The status and text that the C boundary makes of an exception of `body`.
struct Outcome {
    dsopt_status status = DSOPT_OK;
    std::string text;
};
template <class Body> Outcome outcome_of(Body &&body) {
    try {
        body();
        return {};
    } catch (const dsopt::Error &error) { return {error.status(), error.what()}; }
}
inline testing::AssertionResult fails(const Outcome &outcome, dsopt_status status, const char *text = "") {
    if (outcome.status == status && outcome.text.find(text) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << outcome.status << " instead of " << status << ": " << outcome.text;
}

inline std::shared_ptr<const dsopt::Context> cuda_context(int device = 0) {
    dsopt_context_desc desc{};
    desc.size = sizeof desc;
    desc.backend = DSOPT_BACKEND_CUDA;
    desc.device = device;
    desc.threads = 1;
    return std::make_shared<const dsopt::Context>(desc);
}
inline std::string new_id() {
    std::string id(dsopt::kNcclIdBytes, '\0');
    dsopt::make_nccl_id(id.data());
    return id;
}
inline dsopt_comm_desc desc_of(const std::string &id, int rank, int ranks, int timeout_ms, uint32_t flags = 0) {
    dsopt_comm_desc desc = test::comm_desc(DSOPT_COMM_KIND_NCCL, id.data(), id.size(), rank, ranks, timeout_ms);
    desc.flags = flags;
    return desc;
}

/// Bytes in device memory, with copies from and to the host.
class DeviceBytes : public test::Block {
public:
    explicit DeviceBytes(const Bytes &from) : Block(memory(), from.size()) {
        set(static_cast<const void *>(from.data()));
    }
    Bytes get() const {
        const std::string all = text();
        return {all.begin(), all.end()};
    }

private:
    static const test::Memory &memory() {
        static const test::Memory device = test::cuda_memory(nullptr);
        return device;
    }
};

/// A comm, and the stream of its calls.
class StreamComm {
public:
    StreamComm(const std::shared_ptr<const dsopt::Context> &context, const dsopt_comm_desc &desc) :
        comm(dsopt::make_comm(context, desc)) {
        EXPECT_EQ(cudaSetDevice(context->ordinal()), cudaSuccess);
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    ~StreamComm() {
        comm.reset();
        (void)cudaStreamDestroy(stream);
    }
    StreamComm(const StreamComm &) = delete;
    StreamComm &operator=(const StreamComm &) = delete;

    /// Runs call(data, result) on copies in `place`, and returns the contents of the result.
    template <class Call> Bytes on(Place place, const Bytes &from, size_t result_bytes, const Call &call) const {
        Bytes to(result_bytes, 0x55);
        if (place == Place::host) {
            Bytes copy = from;
            call(copy.data(), to.data());
            return to;
        }
        const DeviceBytes copy(from), result(to);
        call(copy.data(), result.data());
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        return result.get();
    }
    /// Returns the sum of one number over the ranks.
    double add(double value) const {
        comm->all_reduce(&value, 1, DSOPT_DTYPE_F64, DSOPT_OP_SUM, stream);
        return value;
    }

    std::unique_ptr<Comm> comm;
    cudaStream_t stream = nullptr;
};

/// Ranks in one process, each on its own device.
class World {
public:
    explicit World(int ranks, int timeout_ms = 60000, uint32_t flags = 0) : ranks_(static_cast<size_t>(ranks)) {
        const std::string id = new_id();
        std::barrier barrier(ranks); // the time-out includes the creation
        run_ranks(ranks, [&](int rank) {
            const auto context = cuda_context(rank);
            barrier.arrive_and_wait();
            ranks_[size_t(rank)] = std::make_unique<StreamComm>(context, desc_of(id, rank, ranks, timeout_ms, flags));
        });
    }
    ~World() {
        run_ranks(int(ranks_.size()), [&](int rank) { ranks_[size_t(rank)].reset(); });
    }
    World(const World &) = delete;
    World &operator=(const World &) = delete;
    StreamComm &operator[](int rank) const { return *ranks_[size_t(rank)]; }
    void destroy(int rank) { ranks_[size_t(rank)].reset(); }

private:
    std::vector<std::unique_ptr<StreamComm>> ranks_;
};

/// Sets a variable of the double for one test.
class Environment {
public:
    Environment(const char *name, const char *value) : name_(name) { setenv(name, value, 1); }
    ~Environment() { unsetenv(name_); }
    Environment(const Environment &) = delete;
    Environment &operator=(const Environment &) = delete;

private:
    const char *name_;
};

/// Returns a function of the library that the engine has loaded.
template <class F> F *function_of_double(const char *name) {
    const char *const path = std::getenv("DSOPT_NCCL_LIBRARY");
    void *const library = dlopen(path != nullptr ? path : "libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    void *const found = library != nullptr ? dlsym(library, name) : nullptr;
    if (found == nullptr) throw std::runtime_error(std::string("not loaded: ") + name);
    return reinterpret_cast<F *>(found);
}
inline FakeNcclCounts counts() { return function_of_double<FakeNcclCounts()>("fake_nccl_counts")(); }

/// Runs every collective in host and in device memory, with sizes around a word and around the provider's piece size.
void run_all_collectives(const StreamComm &rank);

} // namespace nccl_test
