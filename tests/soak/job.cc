// SPDX-License-Identifier: Apache-2.0
#include "job.h"
#include <cstdio>
#include <filesystem>

namespace soak {
namespace {

int fail(int rank, const char *what) {
    std::fprintf(stderr, "rank %d: %s; last error: %s\n", rank, what, dsopt_last_error());
    return kFailed;
}

/// Checks that an unusable comm keeps its status, and that this rank's state can be saved nevertheless. Sharded state
/// cannot: all ranks save together.
int check_unusable(Learner &learner, const Job &job, int rank, dsopt_status status) {
    if (status != DSOPT_ERR_TIMEOUT && status != DSOPT_ERR_ABORTED)
        return fail(rank, "the status is neither a time-out nor an abort");
    if (learner.step() != status) return fail(rank, "the unusable comm returns another status");
    const std::string file = file_of(job.folder, "unusable", rank, job.ranks);
    const bool together = job.course.shard != 0;
    if (learner.save(file) != (together ? status : DSOPT_OK))
        return fail(rank, together ? "the save with an unusable comm returns another status"
                                   : "the save with an unusable comm failed");
    if (together && std::filesystem::exists(file)) return fail(rank, "a save that failed has written a file");
    return kUnusableComm;
}

test::Comm make_comm(const test::Context &context, SharedEndpoint &endpoint, int ranks) {
    if (ranks == 1) return {};
    return test::table_comm(context, endpoint.table());
}

int train_rank(Board &board, const Job &job, int rank) {
    Member member(board, job, rank);
    Learner &learner = member.learner;
    if (!job.files.empty()) {
        const std::vector<std::string> own = {job.files[size_t(rank) % job.files.size()]};
        const dsopt_status status = learner.load(job.own_file ? own : job.files);
        if (status != DSOPT_OK && job.course.shard != 0) return check_unusable(learner, job, rank, status);
        if (status != DSOPT_OK) return fail(rank, "the load failed");
    }
    Board::RankProgress &progress = board.ranks[rank];
    const auto save = [&](const std::string &file) {
        progress.saving = 1;
        const dsopt_status status = learner.save(file);
        progress.saving = 0;
        progress.saves += status == DSOPT_OK;
        return status;
    };
    const auto fail_save = [&](dsopt_status status) { // other ranks are needed for sharded state
        return job.course.shard != 0 ? check_unusable(learner, job, rank, status) : fail(rank, "the save failed");
    };
    while (learner.steps() < job.course.steps) {
        if (rank == job.plan.victim && learner.steps() >= job.plan.step) {
            if (job.plan.event == Event::leave) return kLeft;
            if (job.plan.event == Event::abort) dsopt_comm_abort(member.comm.get());
        }
        const dsopt_status status = learner.step();
        if (status != DSOPT_OK) return check_unusable(learner, job, rank, status);
        const int64_t step = learner.steps();
        progress.step = step;
        if (const dsopt_status failed = save(file_of(job.folder, "latest", rank, job.ranks))) return fail_save(failed);
        if (step % kSaveEvery != 0 && step != job.course.steps) continue;
        if (rank == 0) board.losses[step] = learner.loss();
        const std::string set = set_folder(job.folder, step);
        std::filesystem::create_directories(set);
        if (const dsopt_status failed = save(file_of(set, "rank", rank, job.ranks))) return fail_save(failed);
        progress.saved = step;
    }
    return kDone;
}

} // namespace

Member::Member(Board &board, const Job &job, int rank) :
    endpoint(board.comm, rank, job.ranks, std::chrono::milliseconds(job.timeout_ms)),
    comm(make_comm(context, endpoint, job.ranks)),
    learner(context, comm, rank, job.course) {}

std::string file_of(const std::string &folder, const std::string &kind, int rank, int ranks) {
    return folder + "/" + kind + "-" + std::to_string(rank) + "-of-" + std::to_string(ranks);
}
std::string set_folder(const std::string &folder, int64_t step) { return folder + "/step-" + std::to_string(step); }

int run_rank(Board &board, const Job &job, int rank) noexcept {
    try {
        return train_rank(board, job, rank);
    } catch (const std::exception &e) { return fail(rank, e.what()); }
}

} // namespace soak
