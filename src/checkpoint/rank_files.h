// SPDX-License-Identifier: Apache-2.0
// The files that one load reads: one rank's file, or the files of all ranks that saved together. For another number of
// ranks, identical state is read from one file, sharded state from the files that have it, and residuals are gathered
// from all files and partitioned again.
#pragma once
#include "checkpoint/saved_tensors.h"
#include <optional>

namespace dsopt {

/// The open files of a load, and the state that is computed from several of them.
class RankFiles {
public:
    /// Opens the files. Checks that a list has all files of one save: every rank once, and the same metadata.
    RankFiles(const Optimizer &optimizer, const char *path, const dsopt_io &io);

    /// Returns the file from which identical state is read: this rank's own file if as many ranks saved as load.
    const SafetensorsReader &file() const { return *files_[size_t(main_)]; }
    /// True if another number of ranks saved, or as many ranks in nodes of another size, or with other parts.
    bool resharded() const {
        return saved_.ranks != local_.ranks || saved_.node_ranks != local_.node_ranks || saved_parts_ != local_parts_;
    }
    /// True if state was sharded when it was saved.
    bool sharded() const { return pieces_.has_value(); }
    /// Returns the id of a save of sharded state, else "".
    std::string save_id() const;
    /// Returns the dtype of a tensor; 0: there is none of that name.
    int32_t dtype(const std::string &name) const;
    /// Returns a range of a tensor. `whole`: the tensor as in a file of unsharded state. `in_parts`: ranks have parts of
    /// it if state was sharded; otherwise it is read from file(). Throws MISMATCH if it is not there, or has another
    /// dtype or size.
    SavedRange find(const TensorEntry &whole, const Range &range, bool in_parts = true) const;
    int saved_ranks() const { return saved_.ranks; }
    /// Returns the number of ranks or, with two levels, of nodes that exchanged compressed values. With 1 there are no
    /// residuals.
    int saved_nodes() const { return saved_.nodes(); }

    /// Throws MISMATCH for state that another number of ranks, or another rank, cannot load. `errors`: error feedback
    /// is to be loaded.
    void check(const Optimizer &optimizer, bool errors) const;
    /// Throws MISMATCH unless a tensor that the ranks share is identical in the files of all ranks. `entry`: the state
    /// tensor, or NULL for a parameter.
    void check_identical(const StateEntry *entry, const SavedRange &range) const;
    /// Compares the checksums of all tensors in the files other than file().
    void verify_others() const;

    /// True for state whose size or existence depends on the number of ranks: compute() returns its contents, which
    /// are in no file.
    bool computes(const StateEntry &entry) const;
    std::vector<char> compute(const Optimizer &optimizer, const StateEntry &entry) const;

private:
    /// Returns a worker_error or server_error: each element is the mean of the residuals of the ranks that have it,
    /// added in double in rank order and rounded once.
    std::vector<float> errors(const Optimizer &optimizer, const StateEntry &entry) const;
    /// Returns `active` of the whole list.
    std::vector<int32_t> active(const Optimizer &optimizer) const;

    std::vector<std::unique_ptr<SafetensorsReader>> files_; // a list is in the order of ranks
    bool is_list_;                                          // the caller passed a list of files
    DataRank local_;                                        // the rank of this process
    DataRank saved_{};                                      // the rank that saved the first file
    std::string local_parts_, saved_parts_;                 // the field "shard", "" = unsharded
    bool old_layout_ = false;                               // error feedback is of a version before 0.3
    int main_ = 0;                                          // index of file()
    std::optional<SavedPieces> pieces_;                     // of sharded state
};

} // namespace dsopt
