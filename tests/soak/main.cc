// SPDX-License-Identifier: Apache-2.0
// Training runs of four ranks, each a process. Ranks are killed, stopped and aborted at random. The next job resumes
// from the files, often with another number of ranks.
//
//     soak [--seconds N] [--trainings N] [--first N] [--steps N] [--seed S] FOLDER
//
// Ends after N training runs (default 1) and N seconds (default 0). --first: index of the first run's kind. Checks:
// every file can be read, also while it is being replaced; saved data are not lost; the loss after a restart equals the
// loss at the save, and decreases; if a rank ends, the other ranks end with a status. Of sharded state a complete set of
// files can be read, and its weights have the bits of a run of one rank that is not interrupted; while a set is being
// replaced, a load refuses files of two saves. Exits with 1 at the first violation, and does not remove the files.
#include "job.h"
#include "support/numbers.h"
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace soak {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kHang = std::chrono::seconds(240); // longer than any rank needs on a slow machine

struct Totals {
    int64_t jobs, kills, kills_in_saves, stops, aborts, leaves, timeouts, restarts, resharded, saves, reads, steps;
    int64_t mixed; // sets that were read while they were being replaced
} totals{};

[[noreturn]] void fail(const std::string &what) {
    std::printf("FAILED: %s\n", what.c_str());
    std::exit(1);
}

/// Reads the files of one training run, in a single process.
class Reader {
public:
    Reader(Board &board, std::string folder, const Course &course) :
        board_(board),
        folder_(std::move(folder)),
        course_(course) {}

    /// Loads all of a file, as the rank that saved it; of sharded state, all files of the set.
    void read(const std::string &file) {
        if (!fs::exists(file)) return;
        int rank = 0, ranks = 0;
        const size_t slash = file.rfind('/');
        if (std::sscanf(file.c_str() + slash + 1, "%*[a-z]-%d-of-%d", &rank, &ranks) != 2)
            fail(file + " is an unexpected file");
        if (course_.shard != 0)
            return read_set(file.substr(0, slash), file.substr(slash + 1, file.find('-', slash) - slash - 1), ranks);
        Job job;
        job.course = course_;
        job.ranks = ranks;
        Member member(board_, job, rank);
        if (member.learner.load({file}) != DSOPT_OK) fail(file + " is unreadable: " + dsopt_last_error());
        ++totals.reads;
    }
    void read_all() {
        for (const fs::directory_entry &entry : fs::recursive_directory_iterator(folder_))
            if (entry.is_regular_file() && !entry.path().filename().string().starts_with(".dsopt-")) read(entry.path());
    }

    /// Loads the files of all ranks. Files that are being replaced may be of two saves, and are then refused.
    void read_set(const std::string &folder, const std::string &kind, int ranks) {
        std::vector<std::string> files;
        for (int rank = 0; rank < ranks; ++rank) files.push_back(file_of(folder, kind, rank, ranks));
        for (const std::string &file : files)
            if (!fs::exists(file)) return;
        Learner learner(context_, {}, 0, course_);
        const dsopt_status status = learner.load(files);
        const bool mixed = std::strstr(dsopt_last_error(), "another save") != nullptr ||
                           std::strstr(dsopt_last_error(), "different saves") != nullptr,
                   replaced = kind == "latest" && status == DSOPT_ERR_MISMATCH && mixed;
        if (status != DSOPT_OK && !replaced) fail(files[0] + " and others are unreadable: " + dsopt_last_error());
        totals.reads += status == DSOPT_OK ? ranks : 0;
        totals.mixed += replaced;
    }

    struct Set {
        int64_t step = 0;
        std::vector<std::string> files; // empty: nothing was saved yet
        bool any_count = true;          // any number of ranks can resume from it
        double loss = 0;                // set if any_count
    };
    /// Returns the newest complete set. Removes the others, except for the one before it.
    Set newest(int ranks) {
        Set found;
        int64_t before = 0;
        std::vector<int64_t> steps;
        for (int64_t step = 1; step <= course_.steps; ++step)
            if (fs::exists(set_folder(folder_, step))) steps.push_back(step);
        for (const int64_t step : steps)
            for (int count = 1; count <= kMaxRanks; ++count) {
                std::vector<std::string> files;
                for (int rank = 0; rank < count; ++rank)
                    files.push_back(file_of(set_folder(folder_, step), "rank", rank, count));
                bool complete = true;
                for (const std::string &file : files) complete = complete && fs::exists(file);
                // If a step has sets of two numbers of ranks, the set of the last job counts.
                if (!complete || (count != ranks && found.step == step)) continue;
                before = found.step == step ? before : found.step;
                found.step = step;
                found.files = files;
            }
        for (const int64_t step : steps)
            if (step != found.step && step != before) fs::remove_all(set_folder(folder_, step));
        if (found.files.empty()) return found;
        Learner learner(context_, {}, 0, course_);
        const dsopt_status status = learner.load(found.files);
        // 0/1 Adam between two exchanges: the ranks have different parameters.
        found.any_count = status == DSOPT_OK;
        if (status != DSOPT_OK && (status != DSOPT_ERR_MISMATCH || course_.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM))
            fail(found.files[0] + " and the other files of the set do not load: " + dsopt_last_error());
        if (found.any_count && learner.steps() != found.step) fail(found.files[0] + " has another step number");
        found.loss = learner.loss();
        if (course_.shard != 0) {
            while (reference_.steps() < found.step) test::must(reference_.step());
            if (!learner.same_weights(reference_)) fail(found.files[0] + " has other weights than a run of one rank");
        }
        return found;
    }

private:
    Board &board_; // of a finished job, or of one that does not use its comm
    std::string folder_;
    Course course_;
    test::Context context_ = test::make_context();
    Learner reference_{context_, {}, 0, course_}; // a run that is not interrupted
};

Plan random_plan(test::Random &random, const Course &course, int64_t begin, int ranks) {
    Plan plan;
    const int dice = random.below(20);
    plan.event = dice < 9    ? Event::kill
                 : dice < 13 ? Event::kill_all
                 : dice < 14 ? Event::stop
                 : dice < 17 ? Event::abort
                 : dice < 18 ? Event::leave
                             : Event::none;
    if (ranks == 1 && plan.event != Event::none) plan.event = Event::kill;
    plan.victim = random.below(ranks);
    plan.step = begin + random.below(int(course.steps / 8) + 1);
    plan.in_save = random.below(2) == 0;
    plan.delay_us = random.below(3000);
    plan.aborts_others = random.below(4) != 0;
    return plan;
}

void check_exit(int rank, int status, const Plan &plan) {
    const std::string who = "rank " + std::to_string(rank);
    if (WIFSIGNALED(status)) {
        if (WTERMSIG(status) != SIGKILL) fail(who + " ended by signal " + std::to_string(WTERMSIG(status)));
        if (plan.event != Event::kill && plan.event != Event::kill_all) fail(who + " was killed by another process");
        return;
    }
    switch (WEXITSTATUS(status)) {
    case kDone:
    case kLeft: return;
    case kUnusableComm: totals.timeouts += plan.event == Event::none; return; // the machine is too slow
    default: fail(who + " failed");
    }
}

/// Runs the job to its end and triggers the planned event.
void run_job(Board &board, const Job &job, Reader &reader, test::Random &random) {
    board.comm.aborted = board.comm.arrived = board.comm.round = 0;
    for (Board::RankProgress &rank : board.ranks) rank.step = rank.saved = rank.saves = rank.saving = 0;
    std::fflush(stdout);
    std::vector<pid_t> children;
    for (int rank = 0; rank < job.ranks; ++rank) {
        const pid_t child = ::fork();
        if (child < 0) fail(std::string("fork: ") + std::strerror(errno));
        if (child == 0) ::_exit(run_rank(board, job, rank));
        children.push_back(child);
    }
    ++totals.jobs;
    const Plan &plan = job.plan;
    bool done = false;                 // the planned event has occurred
    test::Random reads(random.next()); // separate: the number of reads depends on the machine, and the plans must not
    size_t left = children.size();
    const auto end = Clock::now() + kHang;
    while (left > 0) {
        ::usleep(100);
        for (size_t rank = 0; rank < children.size(); ++rank) {
            int status = 0;
            if (children[rank] == 0 || ::waitpid(children[rank], &status, WNOHANG) != children[rank]) continue;
            children[rank] = 0;
            --left;
            check_exit(int(rank), status, plan);
            totals.leaves += WIFEXITED(status) && WEXITSTATUS(status) == kLeft;
            const bool complete = WIFEXITED(status) && WEXITSTATUS(status) == kDone;
            if (!complete && plan.aborts_others && plan.event != Event::stop) board.comm.aborted = 1;
        }
        const pid_t victim = children[size_t(plan.victim)];
        Board::RankProgress &progress = board.ranks[plan.victim];
        const bool kills = plan.event == Event::kill || plan.event == Event::kill_all;
        if (!done && victim != 0 && progress.step >= plan.step && (kills || plan.event == Event::stop)) {
            while (kills && plan.in_save && progress.saving == 0 &&
                   ::waitpid(victim, nullptr, WNOHANG | WNOWAIT) == 0) {}
            ::usleep(useconds_t(plan.delay_us));
            totals.kills_in_saves += kills && progress.saving == 1;
            done = true;
            if (plan.event == Event::stop) {
                ::kill(victim, SIGSTOP);
                ++totals.stops;
            } else {
                for (size_t rank = 0; rank < children.size(); ++rank)
                    if (children[rank] != 0 && (int(rank) == plan.victim || plan.event == Event::kill_all)) {
                        ::kill(children[rank], SIGKILL);
                        ++totals.kills;
                    }
            }
        }
        if (plan.event == Event::stop && done && left == 1 && victim != 0) ::kill(victim, SIGCONT);
        if (reads.below(64) == 0) reader.read(file_of(job.folder, "latest", reads.below(job.ranks), job.ranks));
        if (Clock::now() > end) {
            for (const pid_t child : children)
                if (child != 0) ::kill(child, SIGKILL);
            fail("a rank hangs");
        }
    }
    totals.aborts += plan.event == Event::abort;
    for (const Board::RankProgress &rank : board.ranks) totals.saves += rank.saves;
}

/// Trains from step 0 to the last one.
void train(const Course &course, const std::string &folder, test::Random &random) {
    fs::create_directories(folder);
    void *const memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    Board &board = *static_cast<Board *>(memory);
    Reader reader(board, folder, course);
    const double first = Learner(test::make_context(), {}, 0, course).loss();
    double lowest = first, last = first;
    Reader::Set from;
    int ranks = kMaxRanks, jobs_without_progress = 0;
    while (from.step < course.steps) {
        Job job;
        job.course = course;
        job.folder = folder;
        job.files = from.files;
        // Ranks: the number of ranks that saved, else fewer after four, else four.
        job.ranks = !from.any_count || random.below(2) == 0 ? ranks
                    : ranks == kMaxRanks                    ? 1 + random.below(kMaxRanks - 1)
                                                            : kMaxRanks;
        if (course.averages() && job.ranks == 3) job.ranks = 2;
        job.own_file = job.ranks == ranks && random.below(2) == 0 && course.shard == 0;
        // After two jobs without progress, the next job has no event.
        if (jobs_without_progress < 2) job.plan = random_plan(random, course, from.step, job.ranks);
        totals.restarts += !from.files.empty();
        totals.resharded += !from.files.empty() && job.ranks != ranks;
        run_job(board, job, reader, random);
        ranks = job.ranks;
        int64_t acknowledged = course.steps;
        for (int rank = 0; rank < ranks; ++rank) acknowledged = std::min(acknowledged, board.ranks[rank].saved.load());
        reader.read_all();
        const Reader::Set now = reader.newest(ranks);
        if (now.step < std::max(acknowledged, from.step))
            fail("files of step " + std::to_string(acknowledged) + " are missing");
        if (now.any_count && !now.files.empty()) {
            if (now.loss != board.losses[now.step]) fail("the loss differs from the loss at the save");
            // The rules without bias correction overshoot at first.
            const double limit = now.step < course.steps / 2 ? first : lowest + first / 20;
            if (now.loss > limit)
                fail("the loss rose from " + std::to_string(lowest) + " to " + std::to_string(now.loss));
            lowest = std::min(lowest, now.loss);
            last = now.loss;
        }
        jobs_without_progress = now.step > from.step ? 0 : jobs_without_progress + 1;
        totals.steps += now.step - from.step;
        ranks = int(now.files.empty() ? kMaxRanks : now.files.size());
        from = now;
    }
    ::munmap(memory, sizeof(Board));
    std::printf("%s: loss %.4f to %.6f in %" PRId64 " steps\n", course.name().c_str(), first, last, course.steps);
    if (last > first / 10) fail("the loss did not fall to a tenth");
    fs::remove_all(folder);
}

/// Kinds of training runs, in the order in which they alternate.
constexpr Course kKinds[] = {
    {.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM},
    {.algorithm = DSOPT_ALGORITHM_ADAMW},
    {.algorithm = DSOPT_ALGORITHM_ZERO_ONE_ADAM},
    {.algorithm = DSOPT_ALGORITHM_ONEBIT_LAMB},
    {.first_format = DSOPT_MOMENT_E4M3, .second_format = DSOPT_MOMENT_BF16_RANDOM, .remainders = true},
    {.first_format = DSOPT_MOMENT_Q8, .second_format = DSOPT_MOMENT_Q8},
    {.shard = DSOPT_OPTIMIZER_SHARD},
    {.algorithm = DSOPT_ALGORITHM_LAMB, .shard = DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES},
    {.first_format = DSOPT_MOMENT_E4M3,
     .second_format = DSOPT_MOMENT_BF16_RANDOM,
     .remainders = true,
     .shard = DSOPT_OPTIMIZER_SHARD},
};

int run(int argc, char **argv) {
    int64_t seconds = 0, trainings = 1, first = 0, steps = 200;
    uint64_t seed = 1;
    std::string folder;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word.starts_with("--") && i + 1 < argc) {
            const int64_t value = std::atoll(argv[++i]);
            if (word == "--seconds")
                seconds = value;
            else if (word == "--trainings")
                trainings = value;
            else if (word == "--first")
                first = value;
            else if (word == "--steps")
                steps = std::clamp<int64_t>(value, 20, kMaxSteps);
            else if (word == "--seed")
                seed = uint64_t(value);
        } else {
            folder = word;
        }
    }
    if (folder.empty()) {
        std::fprintf(stderr, "usage: soak [--seconds N] [--trainings N] [--first N] [--steps N] [--seed S] FOLDER\n");
        return 2;
    }
    folder += "/soak-" + std::to_string(::getpid());
    test::Random random(seed);
    const auto begin = Clock::now();
    int64_t ended = 0;
    for (; ended < trainings || Clock::now() < begin + std::chrono::seconds(seconds); ++ended) {
        Course course = kKinds[size_t(first + ended) % std::size(kKinds)];
        course.steps = steps;
        course.seed = seed + uint64_t(ended);
        train(course, folder, random);
    }
    const auto duration = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin);
    std::printf("seed %" PRIu64 ", %" PRId64 " s: %" PRId64 " trainings, %" PRId64 " steps, %" PRId64 " saves; %" PRId64
                " ranks killed (%" PRId64 " times during a save), %" PRId64 " stopped, %" PRId64 " left, %" PRId64
                " aborts, %" PRId64 " time-outs by chance; %" PRId64 " restarts, %" PRId64
                " of them with another number of ranks; %" PRId64 " files read, all of them valid; %" PRId64
                " sharded sets refused while they were replaced\n",
                seed, int64_t(duration.count()), ended, totals.steps, totals.saves, totals.kills, totals.kills_in_saves,
                totals.stops, totals.leaves, totals.aborts, totals.timeouts, totals.restarts, totals.resharded,
                totals.reads, totals.mixed);
    return 0;
}

} // namespace
} // namespace soak

int main(int argc, char **argv) {
    try {
        return soak::run(argc, argv);
    } catch (const std::exception &e) {
        std::printf("FAILED: %s\n", e.what());
        return 1;
    }
}
