// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"
#include "checkpoint/agreement.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/rank_files.h"
#include "device/host_copies.h"
#include "optimizer/contents.h"
#include "optimizer/convert.h"
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>

namespace dsopt {
namespace {

/// Selects what a load restores, according to the caller's flags and the optimizer.
struct LoadSelection {
    bool state, masters, hyper, params;
    bool converts;  // moments of other formats
    bool errors;    // of the 1-bit family
    Scaler *scaler; // NULL: the scaler stays unchanged
};

/// True if a load drops error feedback, as the original does (OneBit::reset_as_original_load()). The sizes of saved
/// errors are then not checked.
bool drops_errors(const Optimizer &optimizer) {
    return optimizer.onebit() != nullptr && optimizer.onebit()->setup().rules.compat;
}

LoadSelection selection_of(const Optimizer &optimizer, uint32_t flags) {
    const OneBitSetup *const onebit = optimizer.onebit() != nullptr ? &optimizer.onebit()->setup() : nullptr;
    const bool has_residuals = onebit != nullptr && onebit->compresses && !onebit->layout.is_exact();
    const bool state = !(flags & DSOPT_IO_NO_STATE);
    return {.state = state,
            .masters = !(flags & DSOPT_IO_NO_MASTERS),
            .hyper = !(flags & DSOPT_IO_NO_HYPER),
            .params = (flags & DSOPT_IO_PARAMS) != 0,
            .converts = (flags & DSOPT_IO_CONVERT) != 0,
            .errors = has_residuals && !drops_errors(optimizer) && state && !(flags & DSOPT_IO_RESET_ERRORS),
            .scaler = flags & DSOPT_IO_NO_SCALER ? nullptr : optimizer.attachments().scaler.get()};
}

/// A moment of a file in another format.
struct Conversion {
    Format saved;
    SavedRange scales;       // empty: it has none
    const StateEntry *scale; // NULL: the format here has no scales
};

/// A tensor to be copied from files to memory.
struct Transfer {
    SavedRange from;
    const StateEntry *entry;      // NULL: the parameter at `param`
    void *param;                  // the parameter; for a remainder, the parameter that belongs to it
    size_t bytes;                 // in memory
    std::vector<char> computed{}; // contents that RankFiles::compute() returned; `from` is then unused
    std::optional<Conversion> conversion{};
    bool from_file() const { return computed.empty(); }
    bool per_param() const { return entry != nullptr && entry->per_param(); }
    bool is_master() const { return entry != nullptr && entry->kind == StateKind::remainder; }
    /// True if the bytes of the file are not those in memory.
    bool converts() const { return conversion || is_master(); }
    /// Returns the number of elements that are converted. The masters of remainders are those of the whole parameter,
    /// whose weights they are, although a sharded remainder is a part.
    int64_t numel() const { return is_master() ? entry->whole : entry->numel; }
    /// Returns the destination. State tensors have memory only after Optimizer::ensure_state().
    void *memory() const { return entry != nullptr ? entry->data : param; }
};

/// Returns the transfer of a moment that was saved in another format; nullopt if the formats are the same.
std::optional<Transfer> conversion_of(const Optimizer &optimizer, const RankFiles &files, const StateEntry &entry) {
    if (entry.moment == nullptr || is_scale(entry.kind)) return {};
    TensorEntry wanted = tensor_of(optimizer, entry);
    const int32_t saved = files.dtype(wanted.name);
    const std::optional<Format> format = format_from(saved, entry.moment->squares);
    if (saved == entry.dtype || !format) return {};
    wanted.dtype = saved;
    wanted.bytes = uint64_t(entry.whole) * dtype_size(saved);
    const Param &param = optimizer.params()[size_t(entry.param)];
    Transfer transfer{files.find(wanted, entry), &entry, nullptr, entry.bytes()};
    Conversion conversion{*format, {}, optimizer.state().find(scale_of(entry.kind), entry.param)};
    if (has_scales(conversion.saved)) {
        const int64_t blocks = blocks_of(entry.whole);
        conversion.scales = files.find(
            {param.name + "." + entry.moment->scale_name, DSOPT_DTYPE_F32, {blocks}, uint64_t(blocks) * sizeof(float)},
            {entry.begin / kBlock, blocks_of(entry.numel), blocks});
    }
    transfer.conversion = std::move(conversion);
    return transfer;
}

/// Returns the parameter that belongs to a remainder; NULL for other entries.
void *param_of_remainder(const Optimizer &optimizer, const StateEntry &entry) {
    if (entry.kind != StateKind::remainder) return nullptr;
    const Param &param = optimizer.params()[size_t(entry.param)];
    check_master_memory(param);
    return param.data;
}

std::vector<Transfer> state_transfers(const Optimizer &optimizer, const RankFiles &files, const LoadSelection &wanted) {
    std::vector<Transfer> transfers;
    const StateEntry *converted = nullptr; // the scales, if any, follow their moment
    for (const StateEntry &entry : optimizer.state()) {
        if (!entry.saved() || (entry.is_error() && !wanted.errors)) continue;
        if (drops_errors(optimizer) && entry.kind == StateKind::exp_avg_pad) continue;
        const bool master = is_master(entry.kind);
        if (!(entry.of_scaler() ? wanted.scaler != nullptr : master ? wanted.masters : wanted.state)) continue;
        if (is_scale(entry.kind) && converted != nullptr && converted->moment == entry.moment &&
            converted->param == entry.param)
            continue;
        if (std::optional<Transfer> conversion =
                wanted.converts ? conversion_of(optimizer, files, entry) : std::nullopt) {
            converted = &entry;
            transfers.push_back(std::move(*conversion));
        } else if (!files.computes(entry)) {
            const bool whole = entry.kind == StateKind::remainder,
                       in_parts = entry.param >= 0 && entry.kind != StateKind::grad_accum;
            transfers.push_back(
                {files.find(tensor_of(optimizer, entry), whole ? whole_range(entry.whole) : Range(entry), in_parts),
                 &entry, param_of_remainder(optimizer, entry), entry.bytes()});
        } else if (entry.numel != 0) {
            transfers.push_back({{}, &entry, nullptr, entry.bytes(), files.compute(optimizer, entry)});
        }
    }
    return transfers;
}

/// Adds the parameters if they are to be loaded. Throws STATE for a parameter without memory that is to be loaded, or
/// from which a master is initialized.
void add_params(const Optimizer &optimizer, const RankFiles &files, const LoadSelection &wanted,
                std::vector<Transfer> &transfers) {
    for (const Param &param : optimizer.params()) {
        const bool missing = param.data == nullptr && param.numel != 0;
        if (wanted.params) {
            SavedRange from = files.find(tensor_of(param), whole_range(param.numel));
            if (missing) throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to load into", param.name.c_str());
            if (param.has_remainder && wanted.masters) continue; // the master decides
            transfers.push_back({std::move(from), nullptr, param.data, size_t(param.numel) * dtype_size(param.dtype)});
        } else if (!wanted.masters && param.starts_master() && missing) {
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to make its master from", param.name.c_str());
        }
    }
}

/// Reads all bytes and compares their checksums. A tensor with one element per parameter is permuted from the file's
/// order of parameters to this optimizer's.
void fetch(const Transfer &transfer, const std::vector<int64_t> &order, char *to) {
    transfer.from.verify(to);
    if (!transfer.per_param()) return;
    const std::vector<char> saved(to, to + transfer.bytes);
    for (size_t i = 0; i < order.size(); ++i) std::memcpy(to + size_t(order[i]) * 4, saved.data() + i * 4, 4);
}

/// Checks that tensors that ranks share are identical in all files, and that counters and scales are valid.
void check_transfers(const Optimizer &optimizer, const RankFiles &files, const std::vector<Transfer> &transfers,
                     const std::vector<int64_t> &order, const ScalerRules &rules) {
    std::vector<char> words;
    for (const Transfer &transfer : transfers) {
        const StateEntry *const entry = transfer.entry;
        // Ranks of 0/1 Adam may differ in "step": each rank counts the gradients that it had in local steps, and
        // nothing depends on that count.
        const bool may_differ = entry != nullptr && entry->kind == StateKind::step && optimizer.onebit() != nullptr &&
                                optimizer.onebit()->setup().rules.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM;
        if (transfer.from_file() && !may_differ) files.check_identical(entry, transfer.from);
        if (transfer.conversion) files.check_identical(entry, transfer.conversion->scales);
        if (entry == nullptr || !needs_check(entry->kind) || entry->numel == 0) continue;
        words.resize(transfer.bytes);
        fetch(transfer, order, words.data());
        check_contents(optimizer, *entry, words.data(), "the checkpoint", DSOPT_ERR_FORMAT, &rules);
    }
}

/// Reads bytes [offset, offset + bytes) of a saved tensor.
using ReadPiece = FunctionRef<const void *(const SavedRange &from, size_t offset, size_t bytes)>;
/// Writes bytes to a state tensor, or to a parameter if `entry` is NULL.
using WritePiece =
    FunctionRef<void(const StateEntry *entry, void *param, size_t offset, const void *from, size_t bytes)>;

/// Memory for convert(), allocated before the first byte of the optimizer changes.
struct ConversionBuffers {
    std::vector<float> values, scales;
    std::vector<char> codes;
    explicit ConversionBuffers(const std::vector<Transfer> &transfers) {
        int64_t most = 0;
        for (const Transfer &transfer : transfers)
            if (transfer.converts()) most = std::max(most, std::min(transfer.numel(), kConverted));
        values.resize(size_t(most));
        scales.resize(size_t(blocks_of(most)));
        codes.resize(size_t(most) * sizeof(float));
    }
};

/// Reads a tensor that Transfer::converts(), piece by piece, and writes what belongs to it in memory.
void convert(const Transfer &transfer, ConversionBuffers &buffers, ReadPiece read, WritePiece write) {
    auto &[values, scales, codes] = buffers;
    const StateEntry &entry = *transfer.entry;
    for (int64_t first = 0; first < transfer.numel(); first += kConverted) {
        const int64_t n = std::min(kConverted, transfer.numel() - first);
        const auto at = [first](size_t size) { return size_t(first) * size; };
        if (!transfer.conversion) { // a master
            auto *const weights = reinterpret_cast<uint16_t *>(codes.data()), *const remainders = weights + n;
            const void *const masters = read(transfer.from, at(sizeof(float)), size_t(n) * sizeof(float));
            std::memcpy(values.data(), masters, size_t(n) * sizeof(float)); // a file's bytes are not aligned
            split_masters(values.data(), n, weights, remainders);
            write(nullptr, transfer.param, at(2), weights, size_t(n) * 2);
            const Range part = intersection({first, n, entry.whole}, entry);
            if (part.numel != 0)
                write(&entry, nullptr, size_t(part.begin - entry.begin) * 2, remainders + (part.begin - first),
                      size_t(part.numel) * 2);
            continue;
        }
        const auto &[saved, saved_scales, scale] = *transfer.conversion;
        const auto from_size = size_t(size_of(saved)), to_size = dtype_size(entry.dtype);
        const size_t block = size_t(first / kBlock) * sizeof(float), scale_bytes = size_t(blocks_of(n)) * sizeof(float);
        if (has_scales(saved)) std::memcpy(scales.data(), read(saved_scales, block, scale_bytes), scale_bytes);
        std::memcpy(codes.data(), read(transfer.from, at(from_size), size_t(n) * from_size), size_t(n) * from_size);
        decode(saved, codes.data(), scales.data(), n, values.data());
        encode(*format_from(entry.dtype, entry.moment->squares), values.data(), n, codes.data(), scales.data());
        write(&entry, nullptr, at(to_size), codes.data(), size_t(n) * to_size);
        if (scale != nullptr) write(scale, nullptr, block, scales.data(), scale_bytes);
    }
}

/// Compares the checksums of all tensors that are not loaded. Of sharded state a rank reads only what it loads.
void verify_others(const RankFiles &files, const std::vector<Transfer> &transfers) {
    if (files.sharded()) return;
    const SafetensorsReader &file = files.file();
    std::vector<bool> wanted(file.tensors().size());
    for (const Transfer &transfer : transfers) // scales that are converted are compared twice
        for (const SavedSegment &segment : transfer.from.segments()) wanted[segment.index] = true;
    for (size_t i = 0; i < wanted.size(); ++i)
        if (!wanted[i]) file.verify(i);
    files.verify_others();
}

/// Reads all tensors and compares their checksums before the first byte of the optimizer changes.
void load_in_host_memory(Optimizer &optimizer, LoadedMetadata loaded, const std::vector<Transfer> &transfers,
                         const std::vector<int64_t> &order, FunctionRef<void()> before_adopt) {
    struct Piece {
        const StateEntry *entry; // NULL: a parameter
        void *param;
        size_t offset; // in the tensor
        std::unique_ptr<char[]> contents;
        size_t bytes;
    };
    std::vector<Piece> pieces;
    ConversionBuffers buffers(transfers);
    const auto add = [&](const StateEntry *entry, void *param, size_t offset, size_t bytes) {
        pieces.push_back({entry, param, offset, std::make_unique_for_overwrite<char[]>(bytes), bytes});
        return pieces.back().contents.get();
    };
    for (const Transfer &transfer : transfers) {
        // An empty part of a remainder is converted nevertheless: each rank writes the whole parameter.
        if (transfer.bytes == 0 && transfer.from_file() && !transfer.converts()) {
            fetch(transfer, order, nullptr);
        } else if (!transfer.converts()) {
            char *const contents = add(transfer.entry, transfer.param, 0, transfer.bytes);
            if (transfer.from_file())
                fetch(transfer, order, contents);
            else
                std::memcpy(contents, transfer.computed.data(), transfer.bytes);
        } else {
            std::map<const SavedRange *, std::vector<char>> sources;
            const auto read = [&](const SavedRange &from, size_t offset, size_t) -> const void * {
                std::vector<char> &source = sources[&from];
                if (source.empty()) {
                    source.resize(size_t(from.bytes()));
                    from.verify(source.data());
                }
                return source.data() + offset;
            };
            convert(transfer, buffers, read,
                    [&](const StateEntry *entry, void *param, size_t offset, const void *from, size_t bytes) {
                        std::memcpy(add(entry, param, offset, bytes), from, bytes);
                    });
        }
    }
    ReservedState state = optimizer.reserve_state(nullptr);
    before_adopt();
    optimizer.adopt(std::move(loaded), std::move(state), [&] {
        for (const Piece &piece : pieces) {
            void *const memory = piece.entry != nullptr ? piece.entry->data : piece.param;
            std::memcpy(static_cast<char *>(memory) + piece.offset, piece.contents.get(), piece.bytes);
        }
    });
}

/// Loads in two passes, because device memory may be larger than host memory: the first pass compares every checksum,
/// the second pass copies through two buffers. If the source fails or changes between the passes, the state is half
/// loaded, and the error text says so.
void load_in_pieces(Optimizer &optimizer, LoadedMetadata loaded, const std::vector<Transfer> &transfers,
                    const std::vector<int64_t> &order, FunctionRef<void()> before_adopt) {
    const Device &device = optimizer.context().device();
    std::vector<char> words(order.size() * 4);
    ConversionBuffers buffers(transfers);
    std::vector<char> piece(buffers.codes.size());
    for (const Transfer &transfer : transfers) {
        if (transfer.from_file()) transfer.from.verify();
        if (transfer.conversion) transfer.conversion->scales.verify();
    }
    ReservedState state = optimizer.reserve_state(nullptr);
    HostWriter writer(device);
    before_adopt();
    optimizer.wait_for_tensors();
    optimizer.adopt(std::move(loaded), std::move(state), [&] {
        const auto read = [&](const SavedRange &from, size_t offset, size_t bytes) -> const void * {
            from.read(offset, piece.data(), bytes);
            return piece.data();
        };
        const auto write = [&](const StateEntry *entry, void *param, size_t offset, const void *from, size_t bytes) {
            void *const memory = entry != nullptr ? entry->data : param;
            std::memcpy(writer.buffer(), from, bytes);
            writer.write(static_cast<char *>(memory) + offset, bytes);
        };
        try {
            for (const Transfer &transfer : transfers) {
                char *const memory = static_cast<char *>(transfer.memory());
                if (!transfer.from_file()) {
                    device.copy(memory, transfer.computed.data(), transfer.bytes);
                } else if (transfer.converts()) {
                    convert(transfer, buffers, read, write);
                } else if (transfer.per_param()) {
                    fetch(transfer, order, words.data());
                    device.copy(memory, words.data(), transfer.bytes);
                } else {
                    for (size_t offset = 0; offset < transfer.bytes; offset += kPiece) {
                        const size_t bytes = std::min(kPiece, transfer.bytes - offset);
                        transfer.from.read(offset, static_cast<char *>(writer.buffer()), bytes);
                        writer.write(memory + offset, bytes);
                    }
                }
            }
            writer.finish();
        } catch (const Error &e) { throw Error(e.status(), "%s; the state is half loaded: load it again", e.what()); }
    });
}

void log_conversions(const Optimizer &optimizer, const std::vector<Transfer> &transfers) {
    for (const Transfer &transfer : transfers) {
        if (!transfer.conversion || transfer.from.segments().empty()) continue;
        optimizer.context().log(DSOPT_LOG_INFO, "%s was saved in %s, and was converted to %s",
                                tensor_of(optimizer, *transfer.entry).name.c_str(),
                                dtype_name(transfer.from.tensor().dtype), dtype_name(transfer.entry->dtype));
    }
}
void log_resharding(const Optimizer &optimizer, const RankFiles &files, bool with_errors) {
    if (!files.resharded() || optimizer.onebit() == nullptr) return;
    optimizer.context().log(DSOPT_LOG_INFO, "re-sharded a checkpoint of %d ranks for rank %d of %d: %s",
                            files.saved_ranks(), optimizer.data_rank().rank, optimizer.data_rank().ranks,
                            !with_errors               ? "error feedback is dropped"
                            : files.saved_nodes() == 1 ? "no residuals were saved, error feedback begins with zeros"
                                                       : "the mean of the worker errors and this rank's part of the "
                                                         "joined server errors");
}

/// Words of a hash of the save, which must be the same on all ranks.
AgreedWords words_of(const std::string &save_id) {
    AgreedWords words{};
    for (size_t i = 0; i < save_id.size(); ++i) // FNV-1a in each word, from different starts
        for (size_t k = 0; k < words.size(); ++k)
            words[k] = int32_t((uint32_t(words[k]) ^ (uint8_t(save_id[i]) + uint32_t(k))) * 16777619u);
    return words;
}

/// Returns what ranks that load together must have in common. Files of sharded state have an id; others are compared
/// themselves, except what belongs to the rank that saved.
Alike alike_of(const Optimizer &optimizer, const RankFiles &files, const dsopt_io &io, const LoadSelection &wanted) {
    Alike alike;
    if (!optimizer.shards()) return alike;
    alike.add("dsopt_io.flags", std::to_string(io.flags));
    if (files.sharded()) return alike;
    for (const auto &[key, value] : files.file().metadata()) {
        if (is_rank_field(key) || (key == "calls" && !wanted.state)) continue;
        if (wanted.hyper || !is_hyper_field(key)) alike.add(key, value);
    }
    for (const StateEntry &entry : optimizer.state()) {
        if (entry.of_scaler() ? wanted.scaler == nullptr : is_master(entry.kind) ? !wanted.masters : !wanted.state)
            continue;
        const std::string name = tensor_of(optimizer, entry).name;
        const size_t index = files.file().find(name);
        if (index == SafetensorsReader::npos || (entry.flags & DSOPT_STATE_RANK_LOCAL)) continue;
        const std::string &checksum = files.file().checksum(index);
        alike.add(name, checksum.data(), checksum.size());
    }
    return alike;
}

void load_together(Optimizer &optimizer, const char *path, const dsopt_io &io, Agreement &ranks) {
    constexpr uint32_t known = DSOPT_IO_NO_STATE | DSOPT_IO_NO_MASTERS | DSOPT_IO_NO_HYPER | DSOPT_IO_NO_SCALER |
                               DSOPT_IO_PARAMS | DSOPT_IO_RESET_ERRORS | DSOPT_IO_CONVERT;
    check_io(path, io, io.read != nullptr, known);
    check_groups(optimizer);
    const LoadSelection wanted = selection_of(optimizer, io.flags);
    if (wanted.scaler != nullptr) optimizer.check_scaler();

    const RankFiles files(optimizer, path, io);
    const Fields fields(files.file());
    SavedOptimizer saved = read_optimizer(optimizer, fields);
    files.check(optimizer, wanted.errors);
    std::vector<Transfer> transfers = state_transfers(optimizer, files, wanted);
    add_params(optimizer, files, wanted, transfers);
    // Read after the tensors, so that a checkpoint without a loss scale fails with MISMATCH, not with FORMAT.
    const ScalerRules rules =
        wanted.scaler != nullptr ? read_scaler_rules(fields, wanted.scaler->rules()) : ScalerRules{};
    if (optimizer.compat() && rules.hysteresis > 1 && wanted.hyper)
        throw Error(DSOPT_ERR_MISMATCH,
                    "the checkpoint's loss scale has a hysteresis of %d, which the original's wrappers ignore",
                    rules.hysteresis);
    check_transfers(optimizer, files, transfers, saved.order, rules);
    verify_others(files, transfers);

    const bool accumulates = optimizer.desc().flags & DSOPT_OPTIMIZER_ACCUMULATE;
    LoadedMetadata loaded{.groups = wanted.hyper ? std::move(saved.groups) : optimizer.groups(),
                          .max_norm = wanted.hyper ? saved.max_norm : optimizer.desc().max_norm,
                          .max_value = wanted.hyper ? saved.max_value : optimizer.desc().max_value,
                          .calls = wanted.state ? saved.calls : optimizer.calls(),
                          .accumulated = accumulates && wanted.state ? read_accumulated(fields, saved.order) : "",
                          .resharded_from = files.resharded() ? files.saved_ranks() : 0,
                          .state = wanted.state,
                          .masters = wanted.masters,
                          .resets_errors = (io.flags & DSOPT_IO_RESET_ERRORS) != 0,
                          .has_scaler = wanted.scaler != nullptr,
                          .rules = wanted.scaler != nullptr && wanted.hyper ? std::optional(rules) : std::nullopt};
    const auto load = optimizer.context().device().is_host() ? load_in_host_memory : load_in_pieces;
    load(optimizer, std::move(loaded), transfers, saved.order, [&] {
        AgreedWords words = words_of(files.save_id());
        if (!ranks.reach(words, alike_of(optimizer, files, io, wanted)))
            throw Error(DSOPT_ERR_MISMATCH, "ranks load files of different saves");
    });
    log_conversions(optimizer, transfers);
    log_resharding(optimizer, files, wanted.errors);
}

} // namespace

void load_state(Optimizer &optimizer, const char *path, const dsopt_io &io) {
    const DefaultFloatEnvironment environment; // conversion of text to numbers rounds, too
    Agreement ranks(optimizer, CallPoint::load_begins, "dsopt_optimizer_load", "refuses its files, so no rank loads");
    ranks.run([&] { load_together(optimizer, path, io, ranks); });
}

} // namespace dsopt
