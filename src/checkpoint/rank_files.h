// SPDX-License-Identifier: Apache-2.0
// The files that one load reads, of one rank or of all ranks that saved together, and what another number of ranks
// makes of them: whatever ranks have alike is taken from one, residuals are joined and divided again.
#pragma once
#include "checkpoint/metadata.h"

namespace dsopt {

class RankFiles {
public:
    /// Opens them and checks that a list of them is all of one save: every rank once, and the same metadata.
    RankFiles(const Optimizer &optimizer, const char *path, const dsopt_io &io);

    /// Where what ranks have alike comes from: the own rank's where as many ranks saved as load.
    const SafetensorsReader &file() const { return *files_[size_t(main_)]; }
    /// Saved by another number of ranks, or by as many in other nodes.
    bool resharded() const { return saved_.ranks != own_.ranks || saved_.node_ranks != own_.node_ranks; }
    int saved_ranks() const { return saved_.ranks; }
    /// The ranks or, with two levels, nodes that exchanged compressed values. One alone has no residuals.
    int saved_nodes() const { return saved_.ranks / saved_.node_ranks; }

    /// Refuses what cannot be taken over by another number of ranks, or by another rank. `errors`: the error feedback
    /// is wanted.
    void check(const Optimizer &optimizer, bool errors) const;
    /// Refuses a tensor of file() that other ranks have in another form.
    void check_alike(size_t index) const;
    /// Every tensor's checksum in the files beside file().
    void verify_others() const;

    /// True if the entry has another size, or does not exist, with another number of ranks: make() returns its
    /// contents.
    bool makes(const StateEntry &entry) const;
    std::vector<char> make(const Optimizer &optimizer, const StateEntry &entry) const;

private:
    /// Returns a worker_error or server_error: each element is the mean of the residuals of the ranks that have it,
    /// added in double in rank order and rounded once.
    std::vector<float> errors(const Optimizer &optimizer, const StateEntry &entry) const;
    std::vector<int32_t> active(const Optimizer &optimizer) const;

    std::vector<std::unique_ptr<SafetensorsReader>> files_; // in the order of ranks where a list was given
    bool list_;
    DataRank own_;     // of this process
    DataRank saved_{}; // who saved the first file that was given
    int main_ = 0;
};

} // namespace dsopt
