// SPDX-License-Identifier: Apache-2.0
#include "base/parallel.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/rank_files.h"
#include "device/host_copies.h"
#include "optimizer/contents.h"
#include <algorithm>
#include <cstring>
#include <memory>

namespace dsopt {
namespace {

/// Selects what a load restores, according to the caller's flags and the optimizer.
struct LoadSelection {
    bool state, masters, hyper, params;
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
            .errors = has_residuals && !drops_errors(optimizer) && state && !(flags & DSOPT_IO_RESET_ERRORS),
            .scaler = flags & DSOPT_IO_NO_SCALER ? nullptr : optimizer.attachments().scaler.get()};
}

/// A tensor to be copied from a file to memory.
struct Transfer {
    size_t index;            // in the file
    const StateEntry *entry; // NULL: the parameter at `param`
    void *param;
    size_t bytes;
    std::vector<char> computed{}; // contents that RankFiles::compute() returned; `index` is then unused
    bool from_file() const { return computed.empty(); }
    bool per_param() const { return entry != nullptr && entry->per_param(); }
    /// Returns the destination. State tensors have memory only after Optimizer::ensure_state().
    void *memory() const { return entry != nullptr ? entry->data : param; }
};

std::vector<Transfer> state_transfers(const Optimizer &optimizer, const RankFiles &files, const LoadSelection &wanted) {
    std::vector<Transfer> transfers;
    for (const StateEntry &entry : optimizer.state()) {
        if (!entry.saved() || (entry.is_error() && !wanted.errors)) continue;
        if (drops_errors(optimizer) && entry.kind == StateKind::exp_avg_pad) continue;
        const bool master = entry.flags & DSOPT_STATE_FROM_PARAM;
        if (!(entry.of_scaler() ? wanted.scaler != nullptr : master ? wanted.masters : wanted.state)) continue;
        if (!files.computes(entry))
            transfers.push_back(
                {find_tensor(files.file(), tensor_of(optimizer, entry)), &entry, nullptr, entry.bytes()});
        else if (entry.numel != 0)
            transfers.push_back({0, &entry, nullptr, entry.bytes(), files.compute(optimizer, entry)});
    }
    return transfers;
}

/// Adds the parameters if they are to be loaded. Throws STATE for a parameter without memory that is to be loaded, or
/// from which a master is initialized.
void add_params(const Optimizer &optimizer, const SafetensorsReader &file, const LoadSelection &wanted,
                std::vector<Transfer> &transfers) {
    for (const Param &param : optimizer.params()) {
        const bool missing = param.data == nullptr && param.numel != 0;
        if (wanted.params) {
            const size_t index = find_tensor(file, tensor_of(param));
            if (missing) throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to load into", param.name.c_str());
            transfers.push_back({index, nullptr, param.data, size_t(param.numel) * dtype_size(param.dtype)});
        } else if (!wanted.masters && param.has_master && missing) {
            throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to make its master from", param.name.c_str());
        }
    }
}

/// Reads a whole tensor and compares its checksum. A tensor with one element per parameter is permuted from the file's
/// order of parameters to this optimizer's.
void fetch(const SafetensorsReader &file, const Transfer &transfer, const std::vector<int64_t> &order, char *to) {
    file.verify(transfer.index, to);
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
        if (transfer.from_file() && !may_differ) files.check_identical(transfer.index);
        if (entry == nullptr || !needs_check(entry->kind) || entry->numel == 0) continue;
        words.resize(transfer.bytes);
        fetch(files.file(), transfer, order, words.data());
        check_contents(optimizer, *entry, words.data(), "the checkpoint", DSOPT_ERR_FORMAT, &rules);
    }
}

/// Compares the checksums of all tensors that are not loaded.
void verify_others(const RankFiles &files, const std::vector<Transfer> &transfers) {
    const SafetensorsReader &file = files.file();
    std::vector<bool> wanted(file.tensors().size());
    for (const Transfer &transfer : transfers)
        if (transfer.from_file()) wanted[transfer.index] = true;
    for (size_t i = 0; i < wanted.size(); ++i)
        if (!wanted[i]) file.verify(i);
    files.verify_others();
}

/// Reads all tensors and compares their checksums before the first byte of the optimizer changes.
void load_in_host_memory(Optimizer &optimizer, LoadedMetadata loaded, const SafetensorsReader &file,
                         const std::vector<Transfer> &transfers, const std::vector<int64_t> &order) {
    size_t total = 0;
    for (const Transfer &transfer : transfers) total += transfer.bytes;
    const auto staging = std::make_unique_for_overwrite<char[]>(std::max<size_t>(total, 1));
    size_t offset = 0;
    for (const Transfer &transfer : transfers) {
        if (transfer.from_file())
            fetch(file, transfer, order, staging.get() + offset);
        else
            std::memcpy(staging.get() + offset, transfer.computed.data(), transfer.bytes);
        offset += transfer.bytes;
    }
    optimizer.adopt(std::move(loaded), [&] {
        offset = 0;
        for (const Transfer &transfer : transfers) {
            if (transfer.bytes != 0) std::memcpy(transfer.memory(), staging.get() + offset, transfer.bytes);
            offset += transfer.bytes;
        }
    });
}

/// Loads in two passes, because device memory may be larger than host memory: the first pass compares every checksum,
/// the second pass copies through two buffers. If the source fails or changes between the passes, the state is half
/// loaded, and the error text says so.
void load_in_pieces(Optimizer &optimizer, LoadedMetadata loaded, const SafetensorsReader &file,
                    const std::vector<Transfer> &transfers, const std::vector<int64_t> &order) {
    const Device &device = optimizer.context().device();
    std::vector<char> words(order.size() * 4);
    for (const Transfer &transfer : transfers)
        if (transfer.from_file()) file.verify(transfer.index);
    optimizer.wait_for_tensors();
    optimizer.adopt(std::move(loaded), [&] {
        HostWriter writer(device);
        try {
            for (const Transfer &transfer : transfers) {
                char *const memory = static_cast<char *>(transfer.memory());
                if (!transfer.from_file()) {
                    device.copy(memory, transfer.computed.data(), transfer.bytes);
                } else if (transfer.per_param()) {
                    fetch(file, transfer, order, words.data());
                    device.copy(memory, words.data(), transfer.bytes);
                } else {
                    for (size_t offset = 0; offset < transfer.bytes; offset += kPiece) {
                        const size_t bytes = std::min(kPiece, transfer.bytes - offset);
                        file.read(transfer.index, offset, writer.buffer(), bytes);
                        writer.write(memory + offset, bytes);
                    }
                }
            }
            writer.finish();
        } catch (const Error &e) { throw Error(e.status(), "%s; the state is half loaded: load it again", e.what()); }
    });
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

} // namespace

void load_state(Optimizer &optimizer, const char *path, const dsopt_io &io) {
    const DefaultFloatEnvironment environment; // conversion of text to numbers rounds, too
    constexpr uint32_t known = DSOPT_IO_NO_STATE | DSOPT_IO_NO_MASTERS | DSOPT_IO_NO_HYPER | DSOPT_IO_NO_SCALER |
                               DSOPT_IO_PARAMS | DSOPT_IO_RESET_ERRORS;
    check_io(path, io, io.read != nullptr, known);
    check_groups(optimizer);
    const LoadSelection wanted = selection_of(optimizer, io.flags);
    if (wanted.scaler != nullptr) optimizer.check_scaler();

    const RankFiles files(optimizer, path, io);
    const Fields fields(files.file());
    SavedOptimizer saved = read_optimizer(optimizer, fields);
    files.check(optimizer, wanted.errors);
    std::vector<Transfer> transfers = state_transfers(optimizer, files, wanted);
    add_params(optimizer, files.file(), wanted, transfers);
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
    load(optimizer, std::move(loaded), files.file(), transfers, saved.order);
    log_resharding(optimizer, files, wanted.errors);
}

} // namespace dsopt
