// SPDX-License-Identifier: Apache-2.0
// Kinds of comms on which the same tests run: threads of this process, or doubles of libraries.
#pragma once
#include "handles.h"
#include "memory.h"

namespace test {

/// Connects ranks on separate threads, which create their comms at the same time.
class Fabric {
public:
    virtual ~Fabric() = default;
    /// Prepares the next comm, of `ranks` ranks. Called by one thread, while no rank joins.
    virtual void prepare_comm(int ranks) = 0;
    /// Same as dsopt_comm_create.
    virtual dsopt_status join(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) = 0;
    virtual Context context(int) const { return make_context(1); }
    virtual Memory memory(int) const { return memory_under_test(); }
    /// Returns for how many milliseconds dsopt_comm_destroy may wait for the other ranks.
    virtual int destroy_timeout_ms() const { return 0; }
    /// Returns the factor by which calls take longer on a device emulated by the CPU, without waits.
    virtual int work_factor() const { return 1; }
};

/// A fabric whose library can fail.
class FailingFabric : public Fabric {
public:
    /// Makes the n-th call of rank 0 fail, counted from now on, until prepare_comm(). 0: none.
    virtual void fail_at(int64_t n) = 0;
    /// Returns the number of calls of rank 0 since fail_at().
    virtual int64_t calls() const = 0;
};

class LocalFabric final : public Fabric {
public:
    void prepare_comm(int ranks) override {
        id_ = new_id();
        ranks_ = ranks;
    }
    dsopt_status join(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) override {
        const dsopt_comm_desc desc = local_desc(id_, rank, ranks_, timeout_ms);
        return dsopt_comm_create(context, &desc, comm);
    }

private:
    CommId id_{};
    int ranks_ = 0;
};

} // namespace test
