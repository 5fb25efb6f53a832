// SPDX-License-Identifier: Apache-2.0
// Memory of state tensors and parameters: allocation, binding, checks, and reset to starting values.
#include "base/sizes.h"
#include "base/struct_io.h"
#include "optimizer/contents.h"
#include <algorithm>
#include <cstring>

namespace dsopt {
namespace {

const char *owner_of(const Optimizer &optimizer, const StateEntry &entry) {
    return entry.param < 0 ? "the optimizer" : optimizer.params()[size_t(entry.param)].name.c_str();
}

/// Fills a tensor, F32 or BF16, by copies within the device, each twice as long as the last one. Only the first copy is
/// from the host.
void fill(const Device &device, const dsopt_tensor &tensor, float value, void *stream) {
    const size_t size = dtype_size(tensor.dtype), total = size_t(tensor.numel) * size;
    char block[1024];
    const uint32_t bits = tensor.dtype == DSOPT_DTYPE_F32 ? bits_of(value) : f32_to_bf16(value);
    for (size_t at = 0; at < sizeof block; at += size) std::memcpy(block + at, &bits, size); // little-endian
    if (total == 0) return;
    if (!device.is_host()) (void)device.finished(stream); // refuses a stream that is being captured
    size_t done = std::min(total, sizeof block);
    device.enqueue_copy(tensor.data, block, done, stream);
    for (; done < total; done += std::min(done, total - done))
        device.enqueue_copy(static_cast<char *>(tensor.data) + done, tensor.data, std::min(done, total - done), stream);
}

} // namespace

void Optimizer::initialize(const StateEntry &entry, const dsopt_tensor *params, void *data, void *stream) const {
    const Device &device = context_->device();
    if (!(entry.flags & DSOPT_STATE_FROM_PARAM)) {
        device.clear(data, entry.bytes(), stream);
        if (entry.moment == nullptr || entry.moment->start == nullptr || is_scale(entry.kind)) return;
        const double start = groups()[size_t(this->params()[size_t(entry.param)].group)].*entry.moment->start;
        if (start != 0) fill(device, {data, entry.numel, entry.dtype, 0}, float(start), stream);
        return;
    }
    const Param &param = this->params()[size_t(entry.param)];
    if (entry.numel == 0) return;
    void *const source = params != nullptr ? params[entry.param].data : param.data;
    if (source == nullptr)
        throw Error(DSOPT_ERR_STATE, "the master of '%s' starts as a copy of the parameter, which has no memory yet",
                    param.name.c_str());
    const size_t offset = size_t(entry.begin) * dtype_size(param.dtype);
    const dsopt_tensor from{static_cast<char *>(source) + offset, entry.numel, param.dtype, 0},
        to{data, entry.numel, DSOPT_DTYPE_F32, 0};
    device.kernels().axpby({}, &from, 0, &to, 1, context_->parallel(), stream);
}

void Optimizer::wait_for_tensors() const {
    wait_for_calls();
    context_->device().wait_for_default_stream();
}

void Optimizer::decode_momentum() {
    if (onebit() == nullptr || state().find(StateKind::exp_avg_bits) == nullptr) return;
    wait_for_tensors();
    onebit()->decode_momentum(state(), params());
}

void Optimizer::prepare_for_host() {
    wait_for_tensors();
    ensure_state(nullptr, nullptr);
    decode_momentum();
    context_->device().wait_for_default_stream();
}

ReservedState Optimizer::reserve_state(void *stream) {
    ReservedState reserved;
    if (state().empty() || state().is_complete()) return reserved;
    // Flat masters come first, contiguous per group. All other tensors follow, each aligned to kCacheLine.
    constexpr int32_t apart = INT32_MAX;
    const auto flat_group = [&](size_t i) {
        const bool flat = desc_.masters == DSOPT_MASTERS_FLAT && (state()[i].flags & DSOPT_STATE_FROM_PARAM);
        return flat ? this->params()[size_t(state()[i].param)].group : apart;
    };
    auto &[missing, offsets, list, arena] = reserved;
    for (size_t i = 0; i < state().size(); ++i)
        if (state()[i].data == nullptr) missing.push_back(i);
    std::stable_sort(missing.begin(), missing.end(), [&](size_t a, size_t b) { return flat_group(a) < flat_group(b); });
    size_t bytes = 0;
    for (size_t k = 0; k < missing.size(); ++k) {
        const StateEntry &entry = state()[missing[k]];
        const EngineBlock &block = state().block(entry.kind); // empty for a tensor of a parameter
        if (block.data != nullptr && block.capacity >= entry.bytes()) {
            offsets.push_back(ReservedState::kInBlock);
            continue;
        }
        const int32_t group = flat_group(missing[k]);
        if (k == 0 || group == apart || group != flat_group(missing[k - 1])) bytes = round_up(bytes);
        offsets.push_back(bytes);
        bytes += block.grown(entry.bytes());
    }
    arena = Memory(context_, std::max(round_up(bytes), kCacheLine), stream);
    list = state().list();
    registry_.change().state.reserve_arena();
    return reserved;
}

void Optimizer::ensure_state(ReservedState reserved, const dsopt_tensor *params, void *stream, bool masters_follow) {
    auto &[missing, offsets, list, arena] = reserved;
    if (missing.empty()) return;
    state_changed();
    bool counters = false;
    for (size_t k = 0; k < missing.size(); ++k) {
        const StateEntry &entry = state()[missing[k]];
        void *const data = list[missing[k]].data = offsets[k] == ReservedState::kInBlock
                                                       ? state().block(entry.kind).data
                                                       : static_cast<char *>(arena.data()) + offsets[k];
        counters = counters || entry.per_param();
        if (!masters_follow || !(entry.flags & DSOPT_STATE_FROM_PARAM)) initialize(entry, params, data, stream);
    }
    Registry &registry = registry_.change();
    if (counters && wrapper() != Wrapper::none && !masters_follow) {
        ensure_workspace(stream);
        // The initial step changes parameters that have no separate master: nothing after it may fail.
        run_initial_step(params, list.data(), of_steps_.workspace.data(), stream);
    }
    (void)registry.state.add_arena(std::move(arena));
    for (size_t k = 0; k < missing.size(); ++k) {
        const StateEntry &entry = state()[missing[k]];
        if (entry.param >= 0) {
            registry.state.set_memory(missing[k], list[missing[k]].data);
            continue;
        }
        EngineBlock &block = registry.state.block(entry.kind);
        if (offsets[k] != ReservedState::kInBlock)
            block = {.data = list[missing[k]].data, .capacity = block.grown(entry.bytes()), .kept = {}};
        block.generation = 0; // the contents were not saved
        registry.state.set_memory_to_block(missing[k]);
    }
    registry.memory.reset();
}

/// Copies contents of tensors of the whole optimizer to their blocks, or to larger blocks, and zeroes the rest of the
/// tensors. If it fails, `state` is unchanged.
void Optimizer::fill_blocks(const std::vector<Move> &moves, StateTable &state) const {
    if (moves.empty()) return;
    const Device &device = context_->device();
    const auto fits = [&](const Move &move) { return move.bytes <= state.block(move.kind).capacity; };
    size_t bytes = 0;
    for (const Move &move : moves)
        if (!fits(move)) bytes += round_up(state.block(move.kind).grown(move.bytes));
    Memory arena;
    if (bytes != 0) {
        arena = Memory(context_, bytes, nullptr);
        state.reserve_arena();
    }
    auto *next = static_cast<char *>(arena.data());
    std::vector<EngineBlock> blocks;
    for (const Move &move : moves) {
        blocks.push_back(state.block(move.kind));
        EngineBlock &block = blocks.back();
        if (!fits(move)) {
            block.capacity = block.grown(move.bytes);
            block.data = next;
            next += round_up(block.capacity);
        }
        if (block.data != move.from) block.generation = 0;
    }
    device.wait_for_default_stream(); // throws if the default stream cannot be used now
    for (size_t i = 0; i < moves.size(); ++i) {
        const Move &move = moves[i];
        if (blocks[i].data != move.from) device.enqueue_copy(blocks[i].data, move.from, move.kept, nullptr);
        device.clear(static_cast<char *>(blocks[i].data) + move.kept, move.bytes - move.kept, nullptr);
    }
    device.wait_for_default_stream();
    if (bytes != 0) (void)state.add_arena(std::move(arena));
    for (size_t i = 0; i < moves.size(); ++i) state.block(moves[i].kind) = blocks[i];
}

/// Saves the contents of tensors of the whole optimizer in their blocks, except tensors with Growth::reset. Must be
/// called before longer tensors replace these in the list. Bound memory is not used afterwards.
void Optimizer::save_contents(const std::vector<StateEntry> &entries, StateTable &state) const {
    const auto is_kept = [](const StateEntry &entry) {
        return entry.data != nullptr && !entry.of_scaler() && record_of(entry.kind).growth != Growth::reset;
    };
    std::vector<Move> moves;
    for (const StateEntry &entry : entries)
        if (is_kept(entry) && entry.data != state.block(entry.kind).data)
            moves.push_back({entry.kind, entry.data, entry.bytes(), entry.bytes()});
    fill_blocks(moves, state);
    for (const StateEntry &entry : entries) {
        EngineBlock &block = state.block(entry.kind);
        if (entry.data != block.data || !is_kept(entry)) block.generation = 0;
        block.kept = is_kept(entry) ? std::optional(entry.bytes()) : std::nullopt;
    }
}

/// Copies kept contents to the tensors of the current list, in place if the block has room. Each of these tensors still
/// exists: groups are only added, and no option changes which tensors an algorithm has.
void Optimizer::restore_contents(Registry &registry) const {
    StateTable &state = registry.state;
    const std::vector<StateEntry> entries = state.of_optimizer();
    std::vector<Move> moves;
    for (const StateEntry &entry : entries)
        if (const EngineBlock &block = state.block(entry.kind); block.kept)
            moves.push_back({entry.kind, block.data, *block.kept, entry.bytes()});
    fill_blocks(moves, state);
    for (const Move &move : moves) {
        state.set_memory_to_block(size_t(state.index_of(move.kind)));
        state.block(move.kind).kept.reset();
    }
    if (!moves.empty()) registry.memory.reset(); // it lacks the tensors that have memory now
}

void Optimizer::init_state(const dsopt_tensor *params, int64_t count, const dsopt_tensor *state, int64_t state_count,
                           void *stream) const {
    check_groups(*this);
    if (params != nullptr || count != 0) check_length(params, count, this->params().size(), "the list of parameters");
    check_state_list(*this, state, state_count, true);
    for (size_t i = 0; params != nullptr && i < this->params().size(); ++i) check_param(params[i], this->params()[i]);
    const bool initial_step = wrapper() != Wrapper::none;
    for (size_t i = 0; i < this->params().size(); ++i) // the initial step changes parameters without a master
        if (this->params()[i].numel != 0 && (this->params()[i].starts_master() || initial_step) &&
            (params == nullptr || params[i].data == nullptr))
            throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has no memory: its state starts from it",
                        this->params()[i].name.c_str());
    Memory workspace;
    const Enqueues work(pending(), stream);
    if (initial_step) {
        (void)context_->device().finished(stream); // refuses a stream that is being captured
        workspace = Memory(context_, workspace_bytes(), stream);
    }
    for (size_t i = 0; i < this->state().size(); ++i) {
        const StateEntry &entry = this->state()[i];
        if (entry.kind == StateKind::scaler) // also writes the loss scale, which is the entry before
            attachments_.scaler->init_state(state + i - 1, 2, stream);
        else if (entry.kind != StateKind::loss_scale)
            initialize(entry, params, state[i].data, stream);
    }
    if (this->state().uses_engine_memory(state, StateKind::schedule)) state_changed();
    if (initial_step) run_initial_step(params, state, workspace.data(), stream);
}

void check_state_list(const Optimizer &optimizer, const dsopt_tensor *list, int64_t count, bool required) {
    const StateTable &state = optimizer.state();
    check_length(list, count, state.size(), "the state list");
    for (size_t i = 0; i < state.size(); ++i) check_state_tensor(optimizer, list[i], state[i], required);
}

void check_state_tensor(const Optimizer &optimizer, const dsopt_tensor &tensor, const StateEntry &entry,
                        bool required) {
    const Label label{entry.name(), owner_of(optimizer, entry)};
    check_like(tensor, entry.dtype, entry.numel, label);
    if (required && tensor.data == nullptr && entry.numel != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "%s '%s' has no memory", label.role, label.name);
}

void Optimizer::bind_params(const dsopt_tensor *list, int64_t count) {
    check_length(list, count, params().size(), "the list of parameters");
    bool moves = false;
    for (size_t i = 0; i < params().size(); ++i) {
        check_param(list[i], params()[i]);
        moves = moves || (list[i].data != nullptr && list[i].data != params()[i].data);
    }
    // Unbinding must not fail for lack of memory, so overlaps are checked only if there are new addresses.
    if (moves) finalize_groups();
    Registry &registry = registry_.change();
    if (moves)
        registry.memory = registry.map_memory(list, nullptr);
    else
        registry.memory.reset();
    for (size_t i = 0; i < registry.params.size(); ++i) registry.params[i].data = list[i].data;
}

void Optimizer::bind_state(const dsopt_tensor *list, int64_t count) {
    finalize_groups();
    check_state_list(*this, list, count, false);
    wait_for_tensors();
    std::vector<char> words;
    for (size_t i = 0; i < state().size(); ++i) {
        const StateEntry &entry = state()[i];
        if (list[i].data == nullptr || entry.numel == 0 || !needs_check(entry.kind)) continue;
        words.resize(entry.bytes());
        context_->device().copy(words.data(), list[i].data, words.size());
        check_contents(*this, entry, words.data(), "bound memory");
    }
    decode_momentum();
    std::vector<dsopt_tensor> bound = state().list();
    for (size_t i = 0; i < bound.size(); ++i)
        if (list[i].data != nullptr) bound[i].data = list[i].data;
    Registry &registry = registry_.change();
    registry.memory = registry.map_memory(nullptr, bound.data());
    for (size_t i = 0; i < bound.size(); ++i) // in place: callers hold pointers to dims
        if (state()[i].data != bound[i].data) registry.state.set_memory(i, bound[i].data);
    state_changed();
}

void Optimizer::reset(int32_t what, void *stream) {
    constexpr int32_t known = DSOPT_RESET_MASTERS | DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS | DSOPT_RESET_GRADS |
                              DSOPT_RESET_ERRORS | DSOPT_RESET_READY;
    if (what & ~known) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_reset: unknown parts 0x%x", what);
    if (what & DSOPT_RESET_READY) forget_ready(stream);
    if (what == DSOPT_RESET_READY) return;
    check_nothing_ready();
    if (what & DSOPT_RESET_MASTERS)
        for (const Param &param : params())
            if (param.starts_master() && param.numel != 0 && param.data == nullptr)
                throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to make its master from",
                            param.name.c_str());
    if ((what & DSOPT_RESET_COUNTERS) || state().find(StateKind::exp_avg_bits) != nullptr) {
        (void)context_->device().finished(stream); // refuses a stream that is being captured
        wait_for_calls();
    }
    decode_momentum(); // first: counters say where the momentum is
    const Enqueues work(pending(), stream);
    for (const StateEntry &entry : state())
        if (entry.data != nullptr && (what & record_of(entry.kind).reset))
            initialize(entry, nullptr, entry.data, stream);
    state_changed();
    if (what & DSOPT_RESET_COUNTERS) {
        calls_ = logged_.skipped = 0;
        outcome_.change(context_->device(),
                        [](Outcome &outcome) { outcome.total_skipped = outcome.skipped_in_row = 0; });
    }
    if (what & DSOPT_RESET_GRADS)
        for (Param &param : registry_.change().params) param.accumulated = false;
}

} // namespace dsopt
