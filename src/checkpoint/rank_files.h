// SPDX-License-Identifier: Apache-2.0
// The files that one load reads, of one rank or of all ranks that saved together, and what another number of ranks
// makes of them: whatever ranks have alike is taken from one, error feedback is joined and cut anew.
#pragma once
#include "checkpoint/safetensors.h"
#include "optimizer/optimizer.h"
#include <charconv>

namespace dsopt {

/// Reads metadata; everything missing or malformed is a FORMAT error that names the key.
class Fields {
public:
    explicit Fields(const SafetensorsReader &file) : file_(file) {}
    bool has(const std::string &key) const { return file_.metadata().count(key) != 0; }
    const std::string &text(const std::string &key) const {
        const auto found = file_.metadata().find(key);
        if (found == file_.metadata().end())
            throw Error(DSOPT_ERR_FORMAT, "the checkpoint has no field '%s'", key.c_str());
        return found->second;
    }
    template <class T> T number(const std::string &key) const {
        const std::string &value = text(key);
        T number{};
        const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
        if (error != std::errc() || end != value.data() + value.size())
            throw Error(DSOPT_ERR_FORMAT, "field '%s' of the checkpoint is '%.40s', not a number", key.c_str(),
                        value.c_str());
        return number;
    }

private:
    const SafetensorsReader &file_;
};

std::string tensor_name(const Optimizer &optimizer, const StateEntry &entry);
/// Index of a tensor that fits, or MISMATCH naming it.
size_t find_tensor(const SafetensorsReader &file, const std::string &name, int32_t dtype, int64_t numel,
                   const std::vector<int64_t> &dims);

class RankFiles {
public:
    /// Opens them and checks that a list of them is all of one save: every rank once, and the same metadata.
    RankFiles(const Optimizer &optimizer, const char *path, const dsopt_io &io);

    /// Where what ranks have alike comes from: the own rank's where as many ranks saved as load.
    const SafetensorsReader &file() const { return *files_[size_t(main_)]; }
    /// Saved by another number of ranks, or by as many in other nodes.
    bool resharded() const { return saved_ != ranks_ || saved_node_ != node_ranks_; }
    int saved_ranks() const { return saved_; }
    /// Two levels: one node owed nothing, as one rank; else there were as many as ranks.
    int saved_nodes() const { return saved_ / saved_node_; }

    /// Refuses what cannot be taken over by another number of ranks, or by another rank. `errors`: the error feedback
    /// is wanted.
    void check(const Optimizer &optimizer, bool errors) const;
    /// Refuses a tensor of file() that other ranks have in another form.
    void check_alike(size_t index) const;
    /// Every tensor's checksum in the files beside file().
    void verify_others() const;

    /// Whether the entry has another size, or is not there, with another number of ranks; make() then has its contents.
    bool makes(const StateEntry &entry) const;
    std::vector<char> make(const Optimizer &optimizer, const StateEntry &entry) const;

private:
    std::vector<float> worker_errors(const Optimizer &optimizer) const;
    std::vector<float> server_errors(const Optimizer &optimizer) const;
    std::vector<int32_t> active(const Optimizer &optimizer) const;
    /// The layout of the ranks that saved, as if they had one level: with two levels the chunks are the same, and each
    /// worker has kept one slice.
    CompressLayout saved_layout(const Optimizer &optimizer) const;

    std::vector<std::unique_ptr<SafetensorsReader>> files_; // in the order of ranks where a list was given
    bool list_;
    int rank_, ranks_, node_ranks_; // of this process
    int saved_ = 1, saved_node_ = 1, main_ = 0, saved_rank_ = 0;
};

} // namespace dsopt
