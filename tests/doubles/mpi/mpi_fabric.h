// SPDX-License-Identifier: Apache-2.0
// Ranks connected by the double of MPI, for tests of all kinds of comms.
#pragma once
#define DSOPT_MPI_PIECE 4096
#include "dsopt_mpi.h"
#include "fake_mpi.h"
#include "support/fabric.h"
#include <memory>

namespace test {

class MpiFabric : public FailingFabric {
public:
    void prepare_comm(int ranks) override {
        world_ = std::make_unique<FakeMpi>(ranks);
        FakeMpi::fail_at(0);
    }
    dsopt_status join(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) override {
        world_->enter(rank);
        return dsopt_mpi_comm_timeout(context, MPI_COMM_WORLD, timeout_ms, comm);
    }
    /// Same as join(), with means that MPI adds up.
    dsopt_status join_sums(int rank, int timeout_ms, dsopt_context *context, dsopt_comm **comm) {
        world_->enter(rank);
        return dsopt_mpi_comm_sums(context, MPI_COMM_WORLD, timeout_ms, comm);
    }
    void fail_at(int64_t n) override { FakeMpi::fail_at(n); }
    int64_t calls() const override { return FakeMpi::calls(); }

protected:
    const FakeMpi &world() const { return *world_; }

private:
    std::unique_ptr<FakeMpi> world_;
};

} // namespace test
