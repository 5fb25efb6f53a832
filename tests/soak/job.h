// SPDX-License-Identifier: Apache-2.0
// One job: ranks that are processes, from a checkpoint or from nothing until they are done or one of them goes.
#pragma once
#include "learner.h"
#include "shared_comm.h"
#include <string>
#include <sys/types.h>
#include <vector>

namespace soak {

constexpr int64_t kMostSteps = 4096, kSaveEvery = 5;

enum class Event { none, kill, kill_all, stop, abort, leave };

/// What happens to a job, and when.
struct Plan {
    Event event = Event::none;
    int victim = 0;
    int64_t step = 0;        // not before it
    bool in_save = false;    // kill: while the victim saves
    int64_t delay_us = 0;    // kill: after that
    bool others_told = true; // by the launcher; else they find out by their time-out
};

/// In memory that the ranks share with the launcher.
struct Board {
    SharedComm comm;
    struct Rank {
        std::atomic<int64_t> step, saved, saves; // `saved`: step of the last set of files of which its own is written
        std::atomic<int> saving;
    } ranks[kMostRanks];
    double losses[kMostSteps + 1]; // by step, where files were saved
};

// Of a rank.
enum Exit { kDone = 0, kFailed = 2, kLost = 3, kLeft = 4 };

struct Job {
    Course course;
    int ranks = kMostRanks;
    std::vector<std::string> files; // to begin with
    bool own_file = false;          // each rank loads its own one of them
    std::string folder;
    int timeout_ms = 1000;
    Plan plan;
};

/// <folder>/<kind>-<rank>-of-<ranks>
std::string file_of(const std::string &folder, const std::string &kind, int rank, int ranks);
std::string set_folder(const std::string &folder, int64_t step); ///< for the files of one step

/// A comm and an optimizer on it.
struct Member {
    Member(Board &board, const Job &job, int rank);
    SharedEnd end;
    test::Context context = test::make_context();
    test::Comm comm; // NULL: one rank
    Learner learner;
};

/// The life of one rank. An enum Exit; says why on standard error if it is kFailed.
int run_rank(Board &board, const Job &job, int rank) noexcept;

} // namespace soak
