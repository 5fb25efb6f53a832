// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/rank_files.h"
#include "base/sizes.h"
#include "exchange/vector.h"
#include <algorithm>
#include <cstring>

namespace dsopt {
namespace {

constexpr int64_t kFloats = int64_t(kPiece / sizeof(float));

size_t find_floats(const SafetensorsReader &file, const std::string &name, int64_t count,
                   const std::vector<int64_t> &dims = {}) {
    return find_tensor(file, {name, DSOPT_DTYPE_F32, dims, uint64_t(count) * sizeof(float)});
}
void read_floats(const SafetensorsReader &file, size_t index, int64_t first, int64_t count, float *to) {
    file.read(index, uint64_t(first) * sizeof(float), to, size_t(count) * sizeof(float));
}

/// The elements of a scale group for which a rank keeps errors.
struct StoredErrors {
    Range range;          // relative to the group
    int64_t index, scale; // indices of the first of these elements, and of their scale, in the rank's error buffer
};
/// Returns the elements of a group that are in a rank's error buffer. `layout`: the layout on that rank. `kind`:
/// worker_error or server_error.
StoredErrors stored_errors_of(const ExchangeLayout &layout, StateKind kind, int32_t group) {
    const CompressLayout &vector = layout.whole;
    const CompressLayout::ScaleGroup &all = vector.groups[group];
    if (kind == StateKind::worker_error) {
        const Range slice = layout.slice_range(), range = intersection(all, slice);
        return {range.within(all), range.begin - slice.begin, group};
    }
    const CompressLayout::Segment segment = CompressLayout::segment_of(all, vector.rank);
    return {segment.within(all), segment.server, group - vector.local_chunk().first_group};
}

/// One rank's error buffer in its file, read in pieces.
class ErrorList {
public:
    ErrorList(const SafetensorsReader &file, const StateEntry &entry, const ExchangeLayout &layout) :
        file_(file),
        layout_(layout),
        kind_(entry.kind),
        index_(find_floats(file, std::string("optimizer.") + entry.name(), elements() + scales())),
        scales_(size_t(scales())) {
        file.verify(index_);
        if (!scales_.empty()) read_floats(file, index_, elements(), scales(), scales_.data());
    }
    /// Adds this rank's residuals of the elements in `range`, which is relative to the scale group, to `sums`, which
    /// has one element per element of `range`. `errors`: scratch memory of that size.
    void add(int32_t group, const Range &range, float *errors, double *sums) const {
        const StoredErrors stored = stored_errors_of(layout_, kind_, group);
        const Range both = intersection(range, stored.range);
        if (both.numel == 0) return;
        read_floats(file_, index_, stored.index + both.begin - stored.range.begin, both.numel, errors);
        for (int64_t i = 0; i < both.numel; ++i)
            sums[both.begin - range.begin + i] += double(error_of(errors[i], scales_[size_t(stored.scale)]));
    }

private:
    bool of_worker() const { return kind_ == StateKind::worker_error; }
    int64_t elements() const { return of_worker() ? layout_.slice_range().numel : layout_.whole.server_numel; }
    int64_t scales() const { return of_worker() ? layout_.whole.group_count : layout_.whole.message_scales; }

    const SafetensorsReader &file_;
    const ExchangeLayout layout_;
    const StateKind kind_;
    const size_t index_;
    std::vector<float> scales_;
};

using Files = std::vector<std::unique_ptr<SafetensorsReader>>;

Files open_files(const Optimizer &optimizer, const char *path, const dsopt_io &io) {
    constexpr int32_t most_open = 64;
    const uint64_t longest = longest_header(optimizer);
    Files files;
    for (int32_t i = 0; i < std::max(io.files, 1); ++i) {
        const char *const name = io.paths != nullptr ? io.paths[i] : path;
        dsopt_io file_io = io;
        if (io.users != nullptr) {
            file_io.user = io.users[i];
            file_io.total = io.totals[i];
        }
        files.push_back(std::make_unique<SafetensorsReader>(
            name != nullptr ? file_source(name, io.files <= most_open) : callback_source(file_io), longest));
    }
    return files;
}

/// Returns the rank that saved a file.
DataRank origin_of(const SafetensorsReader &file) {
    const Fields fields(file);
    const auto ranks = fields.number<int32_t>("ranks");
    const auto node_ranks = fields.has("node_ranks") ? fields.number<int32_t>("node_ranks") : 1; // with two levels
    return {fields.number<int32_t>("rank"), ranks, node_ranks};
}

/// Returns the files in the order of ranks. Throws MISMATCH unless there is exactly one file per rank, and all files
/// have the numbers of ranks of `first`, the rank that saved the first file.
Files sort_by_rank(Files files, const DataRank &first) {
    Files sorted{size_t(first.ranks)};
    for (size_t i = 0; i < files.size(); ++i) {
        const DataRank origin = origin_of(*files[i]);
        if (origin.ranks != first.ranks || origin.rank < 0 || origin.rank >= origin.ranks)
            throw Error(DSOPT_ERR_MISMATCH, "file %zu is of rank %d of %d, file 0 of rank %d of %d", i, origin.rank,
                        origin.ranks, first.rank, first.ranks);
        if (origin.node_ranks != first.node_ranks)
            throw Error(DSOPT_ERR_MISMATCH, "file %zu is of nodes of %d ranks, file 0 of %d", i, origin.node_ranks,
                        first.node_ranks);
        auto &slot = sorted[size_t(origin.rank)];
        if (slot) throw Error(DSOPT_ERR_MISMATCH, "file %zu is a second file of rank %d", i, origin.rank);
        slot = std::move(files[i]);
    }
    for (size_t rank = 0; rank < sorted.size(); ++rank)
        if (!sorted[rank])
            throw Error(DSOPT_ERR_MISMATCH, "the checkpoint is of %d ranks, and the file of rank %zu is not there",
                        first.ranks, rank);
    return sorted;
}

/// Throws MISMATCH unless all files have the same metadata. `hyper`: hyper-parameters are loaded.
void check_one_save(const Files &files, bool hyper) {
    const auto &first = files[0]->metadata();
    for (size_t rank = 1; rank < files.size(); ++rank) {
        const auto &other = files[rank]->metadata();
        const auto id = first.find("save_id"), other_id = other.find("save_id");
        if (id != first.end() && other_id != other.end() && id->second != other_id->second)
            throw Error(DSOPT_ERR_MISMATCH, "file of rank %zu is of another save than that of rank 0", rank);
        for (const auto &[key, value] : first) {
            if (is_rank_field(key)) continue; // check() handles accumulators
            if (!hyper && is_hyper_field(key)) continue;
            const auto found = other.find(key);
            if (found == other.end() || found->second != value)
                throw Error(DSOPT_ERR_MISMATCH,
                            "the files are from different saves: %s is %s on rank 0 and %s on rank %zu",
                            quoted(key).c_str(), quoted(value).c_str(),
                            found == other.end() ? "absent" : quoted(found->second).c_str(), rank);
        }
    }
}

bool is_zero(const SafetensorsReader &file, const std::string &name) {
    const size_t index = file.find(name);
    if (index == SafetensorsReader::npos) return true;
    std::vector<char> bytes(size_t(file.tensors()[index].bytes));
    file.verify(index, bytes.data());
    return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
}

} // namespace

RankFiles::RankFiles(const Optimizer &optimizer, const char *path, const dsopt_io &io) :
    files_(open_files(optimizer, path, io)),
    is_list_(io.files != 0),
    local_(optimizer.data_rank()) {
    for (const auto &file : files_)
        if (Fields(*file).text("format") != "dsopt")
            throw Error(DSOPT_ERR_FORMAT, "not an optimizer checkpoint of dsopt");
    saved_ = origin_of(*files_[0]);
    if (saved_.ranks < 1 || saved_.ranks > kMaxRanks || saved_.rank < 0 || saved_.rank >= saved_.ranks)
        throw Error(DSOPT_ERR_FORMAT, "the checkpoint is of rank %d of %d", saved_.rank, saved_.ranks);
    if (saved_.node_ranks < 1 || saved_.ranks % saved_.node_ranks != 0)
        throw Error(DSOPT_ERR_FORMAT, "the checkpoint is of %d ranks in nodes of %d", saved_.ranks, saved_.node_ranks);
    const Fields fields(*files_[0]);
    const bool sharded = fields.has("shard");
    if (sharded) saved_parts_ = fields.text("shard");
    if (optimizer.shards()) local_parts_ = sharding_name(optimizer.parts()->sharding());
    old_layout_ = optimizer.onebit() != nullptr && !optimizer.compat() && saved_nodes() > 1 && !fields.has("layout");
    if (!is_list_ && !sharded) return;
    files_ = sort_by_rank(std::move(files_), saved_);
    check_one_save(files_, (io.flags & DSOPT_IO_NO_HYPER) == 0);
    main_ = resharded() ? 0 : local_.rank;
    if (sharded) pieces_.emplace(files_);
}

std::string RankFiles::save_id() const { return sharded() ? Fields(file()).text("save_id") : ""; }

int32_t RankFiles::dtype(const std::string &name) const {
    if (sharded()) return pieces_->dtype(name);
    const size_t index = file().find(name);
    return index != SafetensorsReader::npos ? file().tensors()[index].dtype : 0;
}

SavedRange RankFiles::find(const TensorEntry &whole, const Range &range, bool in_parts) const {
    const auto size = int64_t(dtype_size(whole.dtype));
    SavedRange result;
    if (!sharded() || !in_parts) {
        result.add({&file(), find_tensor(file(), whole), uint64_t(range.begin * size), uint64_t(range.numel * size)});
        return result;
    }
    result = pieces_->find(whole, range);
    for (const SavedSegment &segment : result.segments()) // a tensor that is not in pieces has its shape
        if (segment.is_whole()) check_shape(segment.file->tensors()[segment.index], whole);
    return result;
}

void RankFiles::check(const Optimizer &optimizer, bool errors) const {
    if (errors && old_layout_)
        throw Error(DSOPT_ERR_MISMATCH, "error feedback of a version before 0.3: DSOPT_IO_RESET_ERRORS");
    if (optimizer.onebit() == nullptr && !is_list_) return; // all ranks have identical state
    if (!resharded()) {
        if (errors && !is_list_ && saved_.rank != local_.rank)
            throw Error(DSOPT_ERR_MISMATCH, "the checkpoint is of rank %d of %d, and this is rank %d", saved_.rank,
                        saved_.ranks, local_.rank);
        return;
    }
    // If one rank saved, its parameters are the common ones, and its accumulators contain all gradients.
    if (saved_.ranks > 1 && !is_zero(file(), "optimizer.lr_sum"))
        throw Error(DSOPT_ERR_MISMATCH,
                    "the checkpoint is from between two synchronisations of 0/1 Adam ('optimizer.lr_sum' is not 0): "
                    "its %d ranks have no common parameters, and %d cannot go on with them",
                    saved_.ranks, local_.ranks);
    if (saved_.ranks > 1)
        for (const auto &file : files_) {
            const Fields fields(*file);
            const size_t param = fields.has("accumulated") ? fields.text("accumulated").find('1') : std::string::npos;
            if (param != std::string::npos)
                throw Error(DSOPT_ERR_MISMATCH,
                            "the checkpoint has gradients in accumulators, the first for parameter %zu: each of its %d "
                            "ranks has its own, and %d cannot go on with them",
                            param, saved_.ranks, local_.ranks);
        }
    if (errors && !is_list_ && saved_nodes() > 1)
        throw Error(DSOPT_ERR_MISMATCH,
                    "the checkpoint is of rank %d of %d, and this is rank %d of %d: error feedback ('worker_error', "
                    "'server_error') needs the files of all of them in dsopt_io.files, or DSOPT_IO_RESET_ERRORS",
                    saved_.rank, saved_.ranks, local_.rank, local_.ranks);
}

void RankFiles::check_identical(const StateEntry *entry, const SavedRange &range) const {
    const bool of_optimizer = entry != nullptr && entry->param < 0 && !(entry->flags & DSOPT_STATE_RANK_LOCAL);
    if (files_.size() == 1 || !(sharded() ? of_optimizer : resharded())) return;
    for (const SavedSegment &segment : range.segments()) {
        const TensorEntry &tensor = segment.file->tensors()[segment.index];
        for (size_t rank = 0; rank < files_.size(); ++rank) {
            const size_t other = files_[rank]->find(tensor.name);
            if (other == SafetensorsReader::npos)
                throw Error(DSOPT_ERR_MISMATCH, "rank %zu's file has no tensor %s", rank, quoted(tensor.name).c_str());
            const TensorEntry &found = files_[rank]->tensors()[other];
            if (found.dtype != tensor.dtype || found.bytes != tensor.bytes ||
                files_[rank]->checksum(other) != segment.file->checksum(segment.index))
                throw Error(DSOPT_ERR_MISMATCH,
                            "tensor %s is not the same in the files of ranks %d and %zu: they are from different saves",
                            quoted(tensor.name).c_str(), main_, rank);
        }
    }
}

void RankFiles::verify_others() const {
    for (const auto &file : files_)
        if (file.get() != &this->file())
            for (size_t i = 0; i < file->tensors().size(); ++i) file->verify(i);
}

bool RankFiles::computes(const StateEntry &entry) const {
    if (entry.kind == StateKind::active) // of a slice if state is sharded in the node
        return old_layout_ || (resharded() && (saved_nodes() == 1 || saved_parts_ == "node" || local_parts_ == "node"));
    return resharded() && entry.is_error();
}

std::vector<char> RankFiles::compute(const Optimizer &optimizer, const StateEntry &entry) const {
    std::vector<char> bytes(entry.bytes());
    const auto store = [&](const auto &list) { std::memcpy(bytes.data(), list.data(), bytes.size()); };
    if (bytes.empty()) return bytes;
    if (entry.kind == StateKind::active) {
        const OneBitSetup &setup = optimizer.onebit()->setup();
        const std::vector<int32_t> words = active(optimizer);
        const int64_t first = setup.use == ExchangeUse::sharded_step ? setup.layout.slice_range().begin / 32 : 0;
        std::memcpy(bytes.data(), words.data() + first, bytes.size());
    } else if (saved_nodes() > 1)
        store(errors(optimizer, entry));
    return bytes; // zeros if one rank or one node saved: there were no residuals
}

/// Returns the bits of the active elements, which take part in exchanges. Other elements have no residual, whatever
/// their compensated value and scale are.
std::vector<int32_t> RankFiles::active(const Optimizer &optimizer) const {
    const OwnedLayout &layout = optimizer.onebit()->setup().layout;
    std::vector<int32_t> words(size_t(layout.used_words()));
    if (saved_nodes() > 1 && saved_parts_ == "node") { // joins the slices of the first node
        const int64_t chunk = VectorPartition{vector_of(optimizer.params()).blocks(), saved_.ranks}.chunk_numel();
        for (int l = 0; l < saved_.node_ranks; ++l) {
            const SafetensorsReader &file = *files_[size_t(l * saved_nodes())];
            const int64_t first = l * saved_nodes() * chunk / 32;
            const int64_t count = std::clamp<int64_t>(int64_t(words.size()) - first, 0, saved_nodes() * chunk / 32);
            const uint64_t size = uint64_t(count) * sizeof(int32_t);
            std::vector<int32_t> slice(static_cast<size_t>(count));
            file.verify(find_tensor(file, {"optimizer.active", DSOPT_DTYPE_I32, {}, size}), slice.data());
            std::copy(slice.begin(), slice.end(), words.begin() + std::min(first, int64_t(words.size())));
        }
        return words;
    }
    if (saved_nodes() > 1 && !old_layout_) {
        const uint64_t bytes = words.size() * sizeof(int32_t);
        file().verify(find_tensor(file(), {"optimizer.active", DSOPT_DTYPE_I32, {}, bytes}), words.data());
        return words;
    }
    // A checkpoint of one rank or one node has no such bits, and before 0.3 they are others. They are computed from the
    // variance, like by the step that last changed the variance.
    std::vector<float> v(size_t(kFloats), 0.0f);
    for (size_t i = 0; i < optimizer.params().size(); ++i) {
        const Param &param = optimizer.params()[i];
        const int64_t worker = optimizer.onebit()->setup().worker[i];
        if (worker < 0) continue;
        const SavedRange saved =
            find({param.name + ".exp_avg_sq", DSOPT_DTYPE_F32, param.dims, uint64_t(param.numel) * sizeof(float)},
                 whole_range(param.numel));
        for (int64_t begin = 0; begin < param.numel; begin += kFloats) {
            const int64_t count = std::min(kFloats, param.numel - begin);
            saved.read(uint64_t(begin) * sizeof(float), reinterpret_cast<char *>(v.data()),
                       size_t(count) * sizeof(float));
            for (int64_t k = 0; k < count; ++k) {
                const int64_t element = worker + begin + k;
                if (v[size_t(k)] != 0)
                    words[size_t(element / 32)] = int32_t(uint32_t(words[size_t(element / 32)]) | 1u << (element % 32));
            }
        }
    }
    return words;
}

/// Relies on tensors having the same indices in the whole vector for any number of ranks.
std::vector<float> RankFiles::errors(const Optimizer &optimizer, const StateEntry &entry) const {
    const OwnedLayout saved =
        OneBitSetup(optimizer.groups(), optimizer.params(), optimizer.desc(), {0, saved_.ranks, 1}).layout;
    const ExchangeLayout &local = optimizer.onebit()->setup().layout;
    const std::vector<int32_t> active_words = active(optimizer);
    // Number of ranks that have an error of the same element.
    const int owners = entry.kind == StateKind::worker_error ? saved_nodes() : 1;
    std::vector<ErrorList> lists;
    for (size_t rank = 0; rank < files_.size(); ++rank) {
        ExchangeLayout layout = saved; // with two levels chunks are the same, and a worker has one slice
        layout.whole.rank = int32_t(rank);
        layout.node_ranks = saved_.node_ranks;
        layout.node_rank = int32_t(rank) / saved_nodes();
        lists.emplace_back(*files_[rank], entry, layout);
    }
    std::vector<float> result(size_t(entry.numel)), errors(size_t(kFloats), 0.0f);
    std::vector<double> sums(size_t(kFloats), 0.0);
    for (int32_t group = 0; group < local.whole.group_count; ++group) {
        const StoredErrors stored = stored_errors_of(local, entry.kind, group);
        for (Range piece = stored.range; piece.begin < stored.range.end(); piece.begin += kFloats) {
            piece.numel = std::min(kFloats, stored.range.end() - piece.begin);
            std::fill_n(sums.begin(), piece.numel, owners > 1 ? 0.0 : -0.0); // the bits of -0 + x are those of x
            for (const ErrorList &list : lists) list.add(group, piece, errors.data(), sums.data());
            float *const to = result.data() + stored.index + piece.begin - stored.range.begin;
            for (int64_t i = 0; i < piece.numel; ++i)
                if (is_active(active_words.data(), local.whole.groups[group].begin + piece.begin + i))
                    to[i] = float(sums[size_t(i)] / owners);
        }
    }
    return result;
}

} // namespace dsopt
