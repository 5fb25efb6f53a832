// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of this process, with collectives implemented here, so that transferred data can be inspected.
#pragma once
#include "dsopt.h"
#include "engine.h"
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace replay {

class Wire {
public:
    explicit Wire(int64_t ranks) : endpoints_(static_cast<size_t>(ranks)) {
        for (size_t r = 0; r < endpoints_.size(); ++r) endpoints_[r] = {this, int(r), nullptr, {}, {}, 0};
    }
    Wire(const Wire &) = delete;
    Wire &operator=(const Wire &) = delete;

    int64_t ranks() const { return int64_t(endpoints_.size()); }
    /// Calls run(rank) on one thread per rank; rethrows the first Failure of any rank.
    void on_all(const std::function<void(int64_t)> &run);

    dsopt_comm_table table(int64_t rank);
    // The rank's last sent data in an all-to-all (one message per receiver) and in an all-gather, and the number of
    // exchanges.
    const std::vector<unsigned char> &sent_to_all(int64_t rank) const { return endpoints_[size_t(rank)].to_all; }
    const std::vector<unsigned char> &gathered(int64_t rank) const { return endpoints_[size_t(rank)].gathered; }
    int64_t exchanges(int64_t rank) const { return endpoints_[size_t(rank)].exchanges; }

private:
    struct Endpoint {
        Wire *wire;
        int rank;
        const void *data;
        std::vector<unsigned char> to_all, gathered;
        int64_t exchanges;
    };
    bool barrier(); ///< waits for all ranks; false if a rank has failed
    void abort();
    static int all_reduce(void *self, const void *send, void *recv, int64_t count, int32_t dtype, int32_t op, void *);
    static int all_to_all(void *self, const void *send, void *recv, int64_t bytes, void *);
    static int all_gather(void *self, const void *send, void *recv, int64_t bytes, void *);

    std::vector<Endpoint> endpoints_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int arrived_ = 0;
    int64_t round_ = 0;
    bool failed_ = false;
};

class Comm {
public:
    Comm(const Engine &engine, Wire &wire, int64_t rank) {
        const dsopt_comm_table table = wire.table(rank);
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        dsopt_comm *comm = nullptr;
        check(dsopt_comm_create(engine.context(), &desc, &comm), "dsopt_comm_create");
        handle_.reset(comm);
    }
    dsopt_comm *get() const { return handle_.get(); }

private:
    struct Destroy {
        void operator()(dsopt_comm *comm) const { dsopt_comm_destroy(comm); }
    };
    std::unique_ptr<dsopt_comm, Destroy> handle_;
};

/// Position of a compressed vector among others, each padded as in the original: see dsopt.h about compat mode.
struct Padded {
    int64_t padded, chunk;  ///< elements in total, and per rank
    int64_t worker, server; ///< index of its first element in the residual buffers
};
std::vector<Padded> padded_layout(const std::vector<int64_t> &numels, int64_t ranks);

/// One message: one scale per vector, then bits.
struct Message {
    const unsigned char *data;
    size_t vectors;
    double scale(size_t vector) const { return to_double(data, DSOPT_DTYPE_F32, int64_t(vector)); }
    std::vector<double> bytes(const Padded &vector) const;
};

} // namespace replay
