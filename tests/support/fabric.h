// SPDX-License-Identifier: Apache-2.0
// Kinds of comms by which the same tests bring ranks together: threads of this process, or doubles of libraries.
#pragma once
#include "handles.h"
#include "memory.h"

namespace test {

/// Ranks on threads of their own, which make their comms at the same time.
class Fabric {
public:
    virtual ~Fabric() = default;
    /// The next comm is to be made, of so many ranks. Called by one thread, while no rank joins.
    virtual void renew(int ranks) = 0;
    /// As dsopt_comm_create.
    virtual dsopt_status join(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) = 0;
    virtual Context context(int) const { return make_context(1); }
    virtual Memory memory(int) const { return host_memory(); }
    /// For how long the end of a comm may wait for the other ranks.
    virtual int farewell_ms() const { return 0; }
    /// How much longer calls work on a device that the processor emulates: that is not waiting.
    virtual int work_factor() const { return 1; }
};

/// One whose library fails.
class FailingFabric : public Fabric {
public:
    /// The n-th call of rank 0 fails, from now on and until it is renewed. 0: none.
    virtual void fail_at(int64_t n) = 0;
    /// Of rank 0, since then.
    virtual int64_t calls() const = 0;
};

class LocalFabric final : public Fabric {
public:
    void renew(int ranks) override {
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
