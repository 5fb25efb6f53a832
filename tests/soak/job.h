// SPDX-License-Identifier: Apache-2.0
// One job: ranks that are processes. Starts from a checkpoint or from scratch. Ends when all ranks are done, or after
// one of them ends early.
#pragma once
#include "learner.h"
#include "shared_comm.h"
#include <string>
#include <sys/types.h>
#include <vector>

namespace soak {

constexpr int64_t kMaxSteps = 4096, kSaveEvery = 5;

enum class Event { none, kill, kill_all, stop, abort, leave };

/// An event during a job, and when it occurs.
struct Plan {
    Event event = Event::none;
    int victim = 0;
    int64_t step = 0;     // earliest step
    bool in_save = false; // kill: while the victim is saving
    int64_t delay_us = 0; // kill: after this delay
    // True: the launcher aborts the comm of the remaining ranks. False: they end after the time-out.
    bool aborts_others = true;
};

/// In memory shared by the ranks and the launcher.
struct Board {
    SharedComm comm;
    struct RankProgress {
        // `saved`: step of the rank's last written file of a set
        std::atomic<int64_t> step, saved, saves;
        std::atomic<int> saving;
    } ranks[kMaxRanks];
    double losses[kMaxSteps + 1]; // by step at which files were saved
};

// Exit status of a rank.
enum Exit { kDone = 0, kFailed = 2, kUnusableComm = 3, kLeft = 4 };

struct Job {
    Course course;
    int ranks = kMaxRanks;
    std::vector<std::string> files; // checkpoint to start from
    bool own_file = false;          // each rank loads only its own file
    std::string folder;
    int timeout_ms = 1000;
    Plan plan;
};

/// <folder>/<kind>-<rank>-of-<ranks>
std::string file_of(const std::string &folder, const std::string &kind, int rank, int ranks);
std::string set_folder(const std::string &folder, int64_t step); ///< for the files of one step

/// A comm and an optimizer that uses it.
struct Member {
    Member(Board &board, const Job &job, int rank);
    SharedEndpoint endpoint;
    test::Context context = test::make_context();
    test::Comm comm; // NULL: one rank
    Learner learner;
};

/// Runs one rank. Returns an enum Exit; prints the reason on standard error if it is kFailed.
int run_rank(Board &board, const Job &job, int rank) noexcept;

} // namespace soak
