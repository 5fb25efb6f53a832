/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_OPTIMIZER_HPP
#define DSOPT_OPTIMIZER_HPP
/** Optimizers: stepping, state, checkpoints. Programs include dsopt.hpp. */
#include "comm.hpp"
#include "groups.hpp"
#include "scaler.hpp"
#include <cerrno>
#include <cstring>
#include <memory>

namespace dsopt {

struct optimizer_options {
    dsopt::compat compat = dsopt::compat::none;
    dsopt::nonfinite nonfinite = dsopt::nonfinite::automatic;
    dsopt::masters masters = dsopt::masters::per_tensor;
    /// Needs `data` or `node`; shard::node needs `node`.
    dsopt::shard shard = dsopt::shard::none;
    /// 0 = off.
    double max_norm = 0, max_value = 0;
    /// The optimizer keeps these alive.
    dsopt::scaler *scaler = nullptr;
    comm *data = nullptr, *model = nullptr, *node = nullptr;
    span<comm> experts = {};
    std::int32_t skip_budget = 0;
    /// Of stochastic_rounding, and of moments in BF16_RANDOM.
    std::uint64_t seed = 0;
    bool no_master = false, report_norms = false, stochastic_rounding = false, accumulate = false, timing = false;
    /// averages: gradients are this rank's own, and the step averages them; needs `data` or `node`.
    bool averages = false, check_ranks = false, momentum_bits = false;
    /// Muon: the orthogonalisation is partitioned among the ranks. Needs `data` or `node`.
    bool split_matrices = false;
    /// optimizer::ready updates parameters.
    bool early_update = false;
    /// Elements of a bucket of gradients that ranks average while others are missing; 0: the step averages all.
    std::int64_t bucket = 0;
    /// Buckets that are copied and not sent yet; 0 = 2.
    std::int32_t buckets_in_flight = 0;
};

/// Arguments of step and apply, documented at dsopt_step. Lists have the length of the gradients' list.
struct step_options {
    /// Empty = the bound memory. Required by apply.
    span<const tensor> params = {};
    /// Receives the new weights. Empty = no output.
    span<const tensor> out = {};
    /// Empty = the bound memory. apply needs every entry.
    span<const tensor> state = {};
    /// apply: optimizer::workspace bytes of backend memory.
    span<std::byte> workspace = {};
    /* Backend memory, optional, read in stream order. */
    /// One per group.
    span<const float> lr = {};
    /// DSOPT_HYPER_FLOATS per group, NaN = the value set on the host.
    span<const float> hyper = {};
    /// One per group.
    span<const float> grad_norms = {};
    const float *grad_scale = nullptr;
    const std::int32_t *skip = nullptr;
    /// Out: DSOPT_REPORT_FLOATS.
    span<float> report = {};
    void *stream = nullptr;
    /// Thread pool of this call.
    pool_ref pool = {};
    bool zero_grads = false, out_only = false, delta = false, no_nan = false;
    /// The step ends one whose gradients were passed to ready; the list has nullptr for these.
    bool ready = false;
};

struct ready_options {
    void *stream = nullptr;
    /// The gradients are added to the accumulators, which are then complete.
    bool accumulated = false;
};

struct save_options {
    /// Save the parameters as well.
    bool params = false;
};
struct load_options {
    bool params = false;
    /// Exclude these from the load.
    bool no_state = false, no_masters = false, no_hyper = false, no_scaler = false;
    bool reset_errors = false;
    /// Convert moments that were saved in another format.
    bool convert = false;
};

using schedule_info = dsopt_schedule_info;

/// One entry of the state list. It keeps the optimizer's memory alive, and queries its tensor at each use.
class state_entry {
public:
    /// Static storage.
    const char *name() const noexcept { return info_.name; }
    /// Index of the parameter; -1: of the whole optimizer.
    std::int64_t param() const noexcept { return info_.param; }
    /// DSOPT_STATE_...
    std::int32_t flags() const noexcept { return info_.flags; }
    std::int32_t dtype() const noexcept { return info_.tensor.dtype; }
    std::int64_t numel() const noexcept { return info_.tensor.numel; }
    /// True if the entry is the part of its parameter that this rank keeps, see optimizer::shard.
    bool sharded() const noexcept { return (info_.flags & DSOPT_STATE_SHARDED) != 0; }
    /// The parameter's, or one dimension: of the whole optimizer, scales, and sharded entries.
    const std::vector<std::int64_t> &dims() const noexcept { return dims_; }
    /// Number of elements of the parameter per element: 256 for scales, 1 for other entries of a parameter, 0: of the
    /// whole optimizer.
    std::int32_t block() const noexcept { return info_.block; }
    /// The tensor with its memory; nullptr before the state is allocated. Throws state_error if the memory has changed
    /// since the entry was created: allocated, bound, or reallocated when parameters were added. Then query the
    /// optimizer again.
    dsopt::tensor tensor() const {
        if (current().generation != info_.generation)
            throw state_error(DSOPT_ERR_STATE,
                              "state tensor '" + std::string(name()) +
                                  "' has other memory than when this entry was created: query it again");
        return info_.tensor;
    }

private:
    friend class optimizer;
    using owner = std::shared_ptr<dsopt_optimizer>;
    state_entry(owner opt, std::int64_t index) : owner_(std::move(opt)), index_(index), info_(info_at(index)) {
        dims_.assign(info_.dims, info_.dims + info_.ndim);
        info_.dims = nullptr; // the optimizer's, until parameters are added
    }
    dsopt_state_info info_at(std::int64_t index) const {
        dsopt_state_info info = detail::desc_of<dsopt_state_info>();
        detail::check(dsopt_optimizer_state(owner_.get(), index, &info));
        return info;
    }
    /// Current info of the same entry. Entries of parameters keep their index; the other entries follow them.
    dsopt_state_info current() const {
        if (param() >= 0) return info_at(index_);
        std::int64_t index = 0;
        detail::check(dsopt_optimizer_state_count(owner_.get(), &index));
        dsopt_state_info info = info_at(--index);
        while (std::strcmp(info.name, name()) != 0) info = info_at(--index);
        return info;
    }

    owner owner_;
    std::int64_t index_;
    dsopt_state_info info_;
    std::vector<std::int64_t> dims_;
};

/// Elements [begin, begin + numel) of a parameter. Without elements `begin` is 0.
struct shard_range {
    std::int64_t begin = 0, numel = 0;
};

/// Parameters [first, first + count).
struct bucket_range {
    std::int64_t first = 0, count = 0;
};

/// Groups, parameters and their state.
class optimizer {
public:
    explicit optimizer(const context &ctx, const optimizer_options &options = {}) : handle_(create(ctx, options)) {}
    /// Takes over a handle that was made in C.
    static optimizer adopt(dsopt_optimizer *handle) noexcept { return optimizer(handle); }
    /// One more handle to the same optimizer, for an independent owner.
    optimizer retain() const { return optimizer(another()); }
    dsopt_optimizer *get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

    /* Groups and parameters. Names and shapes are copied, tensor memory is borrowed. */
    void add_group(const dsopt_group &group, span<const param> params = {}) {
        const std::vector<dsopt_param> list = detail::params_of(params);
        detail::check(dsopt_optimizer_add_group(get(), &group, list.data(), detail::count(list)));
    }
    void add_params(span<const param> params) {
        const std::vector<dsopt_param> list = detail::params_of(params);
        detail::check(dsopt_optimizer_add_params(get(), list.data(), detail::count(list)));
    }
    void set(key which, double value, std::int32_t group = all_groups) {
        detail::check(dsopt_optimizer_set(get(), group, static_cast<std::int32_t>(which), value));
    }
    double get(key which, std::int32_t group = all_groups) const {
        double value = 0;
        detail::check(dsopt_optimizer_get(get(), group, static_cast<std::int32_t>(which), &value));
        return value;
    }
    std::int64_t group_count() const {
        std::int64_t groups = 0;
        detail::check(dsopt_optimizer_count(get(), &groups, nullptr));
        return groups;
    }
    std::int64_t param_count() const {
        std::int64_t params = 0;
        detail::check(dsopt_optimizer_count(get(), nullptr, &params));
        return params;
    }

    /// The part of a parameter whose state a data-parallel rank keeps: without sharding the whole parameter. `rank` is
    /// the rank in `data` + ranks of `data` * rank in `node`; -1 = this one. Changes when parameters are added.
    shard_range shard(std::int64_t param, std::int32_t rank = -1) const {
        shard_range range;
        detail::check(dsopt_optimizer_shard(get(), param, rank, &range.begin, &range.numel));
        return range;
    }

    /* Stepping. */
    /// With averages an absent gradient counts as zeros: view(nullptr, numel, type), with the dtype of the gradient
    /// that the other ranks pass.
    void step(span<const tensor> grads, const step_options &options = {}) {
        const dsopt_step arguments = arguments_of(grads, detail::count(grads), options);
        detail::check(dsopt_optimizer_step(get(), &arguments));
    }
    /// A step on the accumulators, with DSOPT_STEP_ACCUMULATED.
    void step_accumulated(const step_options &options = {}) {
        dsopt_step arguments = arguments_of({}, param_count(), options);
        arguments.flags |= DSOPT_STEP_ACCUMULATED;
        detail::check(dsopt_optimizer_step(get(), &arguments));
    }
    /// Gradients of parameters [first, first + grads.size()) are complete: see dsopt_optimizer_ready. Their memory is
    /// borrowed until it is free. Returns the index from which on gradients are free.
    std::int64_t ready(std::int64_t first, span<const tensor> grads, const ready_options &options = {}) {
        return ready_of(nullptr, first, detail::count(grads), grads.data(), options);
    }
    /// The same for parameters in any order. `grads` may be empty with `accumulated`: there is nothing to add.
    std::int64_t ready(span<const std::int64_t> params, span<const tensor> grads, const ready_options &options = {}) {
        const tensor *list =
            grads.empty() && options.accumulated ? nullptr : detail::exactly("grads", grads, detail::count(params));
        return ready_of(params.data(), 0, detail::count(params), list, options);
    }
    /// Ends a step all of whose gradients were passed to ready. Accumulated gradients: see step_accumulated.
    void step_ready(step_options options = {}) {
        options.ready = true;
        const dsopt_step arguments = arguments_of({}, param_count(), options);
        detail::check(dsopt_optimizer_step(get(), &arguments));
    }
    /// Waits for work on parameters [first, first + count) that ready and step have begun; on CUDA the stream does.
    void wait(std::int64_t first, std::int64_t count, void *stream = nullptr) {
        detail::check(dsopt_optimizer_wait(get(), first, count, stream));
    }
    /// The parameters that are worked on together with this one; a count of 0: its gradient is kept for the step.
    bucket_range bucket(std::int64_t param) const {
        bucket_range found;
        detail::check(dsopt_optimizer_bucket(get(), param, &found.first, &found.count));
        return found;
    }
    /// The step as a pure function: any number of threads, on different memory.
    void apply(span<const tensor> grads, const step_options &options) const {
        const dsopt_step arguments = arguments_of(grads, detail::count(grads), options);
        detail::check(dsopt_optimizer_apply(get(), &arguments));
    }
    /// Adds gradients to the accumulators.
    void accumulate(span<const tensor> grads, void *stream = nullptr) {
        detail::check(dsopt_optimizer_accumulate(get(), grads.data(), detail::count(grads), stream));
    }
    /// Bytes of workspace that apply needs.
    std::size_t workspace() const {
        std::size_t bytes = 0;
        detail::check(dsopt_optimizer_workspace(get(), &bytes));
        return bytes;
    }
    /// Writes the initial values of every state tensor. `params` may be empty if there are no masters.
    void init_state(span<const tensor> params, span<const tensor> state, void *stream = nullptr) const {
        detail::check(dsopt_optimizer_init_state(get(), detail::exactly("params", params, param_count()),
                                                 detail::count(params), state.data(), detail::count(state), stream));
    }
    /// Reduction of call 1, 2, ..., or of the next one.
    reduction next_reduction(std::int64_t call = 0) {
        std::int32_t found = 0;
        detail::check(dsopt_optimizer_next_reduction(get(), call, &found));
        return static_cast<reduction>(found);
    }
    /// Writes the reduction of the next apply with this schedule to backend memory, in stream order. nullptr without
    /// the 1-bit family.
    void next_reduction_on_device(const tensor *schedule, std::int32_t *to, void *stream = nullptr) const {
        detail::check(dsopt_optimizer_next_reduction_on_device(get(), schedule, to, stream));
    }
    /// The 8 words of state tensor "schedule", in host memory.
    schedule_info decode_schedule(span<const std::int32_t> words) const {
        if (words.size() != 8) detail::refuse_size("words", words.size(), "the schedule's are", 8);
        schedule_info info = detail::desc_of<schedule_info>();
        detail::check(dsopt_schedule_decode(get(), words.data(), &info));
        return info;
    }
    /// Waits for earlier calls on the optimizer.
    dsopt_report report() {
        dsopt_report report = detail::desc_of<dsopt_report>();
        detail::check(dsopt_optimizer_report(get(), &report));
        return report;
    }

    /* State tensors. */
    std::int64_t state_count() const {
        std::int64_t count = 0;
        detail::check(dsopt_optimizer_state_count(get(), &count));
        return count;
    }
    state_entry state(std::int64_t index) const { return state_entry(shared(), index); }
    std::vector<state_entry> state_list() const {
        const std::shared_ptr<dsopt_optimizer> owner = shared();
        std::vector<state_entry> list;
        const std::int64_t count = state_count();
        for (std::int64_t i = 0; i < count; ++i) list.push_back(state_entry(owner, i));
        return list;
    }
    /// Copies an entry to host memory of exactly its size, and back.
    template <class T> void export_state(std::int64_t index, span<T> to) {
        static_assert(std::is_trivially_copyable_v<T>);
        detail::check(dsopt_optimizer_export(get(), index, to.data(), to.size() * sizeof(T)));
    }
    template <class C> void export_state(std::int64_t index, C &to) {
        export_state(index, span<std::remove_pointer_t<decltype(std::data(to))>>(to));
    }
    template <class T> void import_state(std::int64_t index, span<T> from) {
        static_assert(std::is_trivially_copyable_v<T>);
        detail::check(dsopt_optimizer_import(get(), index, from.data(), from.size() * sizeof(T)));
    }
    template <class C> void import_state(std::int64_t index, const C &from) {
        import_state(index, span<std::remove_pointer_t<decltype(std::data(from))>>(from));
    }
    /// Copies a moment, or the master of which "remainder" is a part, to host memory as fp32, whatever its format. Other
    /// F32 entries are copied as they are.
    void export_f32(std::int64_t index, span<float> to) {
        detail::check(dsopt_optimizer_export_f32(get(), index, to.data(), detail::count(to)));
    }
    /// The reverse, rounded to nearest. "remainder" also sets the parameter.
    void import_f32(std::int64_t index, span<const float> from) {
        detail::check(dsopt_optimizer_import_f32(get(), index, from.data(), detail::count(from)));
    }
    void bind_params(span<const tensor> list) { bind(DSOPT_BIND_PARAMS, list); }
    /// Entries with nullptr keep their memory.
    void bind_state(span<const tensor> list) { bind(DSOPT_BIND_STATE, list); }
    void reset(parts what, void *stream = nullptr) {
        detail::check(dsopt_optimizer_reset(get(), static_cast<std::int32_t>(what), stream));
    }

    /* Checkpoints. */
    void save(const std::string &path, const save_options &options = {}) {
        const dsopt_io io = io_of(options);
        detail::check(dsopt_optimizer_save(get(), detail::text_of("path", path), &io));
    }
    /// Saves to an object with `void write(const void *data, std::size_t bytes)`, which throws if it cannot.
    template <class Sink> void save_to(Sink &sink, const save_options &options = {}) {
        dsopt_io io = io_of(options);
        io.user = std::addressof(sink);
        io.write = [](void *user, const void *data, std::size_t bytes) {
            try {
                static_cast<Sink *>(user)->write(data, bytes);
                return 0;
            } catch (...) { detail::keep_exception(); }
            return EIO;
        };
        detail::check(dsopt_optimizer_save(get(), nullptr, &io));
    }
    void load(const std::string &path, const load_options &options = {}) {
        const dsopt_io io = io_of(options);
        detail::check(dsopt_optimizer_load(get(), detail::text_of("path", path), &io));
    }
    /// Loads with another number of ranks: the files of all ranks that saved.
    void load(span<const std::string> paths, const load_options &options = {}) {
        std::vector<const char *> names;
        for (const std::string &path : paths) names.push_back(detail::text_of("path", path));
        dsopt_io io = io_of(options);
        io.files = length(paths.size());
        io.paths = names.data();
        detail::check(dsopt_optimizer_load(get(), nullptr, &io));
    }
    /// Loads from an object with `std::uint64_t size()` and `void read(std::uint64_t offset, void *data, std::size_t
    /// bytes)`, which throws if it cannot.
    template <class Source> void load_from(Source &source, const load_options &options = {}) {
        dsopt_io io = io_of(options);
        io.user = std::addressof(source);
        io.read = read<Source>;
        io.total = source.size();
        detail::check(dsopt_optimizer_load(get(), nullptr, &io));
    }
    /// Loads from one such object per rank that saved.
    template <class Source> void load_from(span<Source> sources, const load_options &options = {}) {
        std::vector<void *> users;
        std::vector<std::uint64_t> totals;
        for (Source &source : sources) {
            users.push_back(std::addressof(source));
            totals.push_back(source.size());
        }
        dsopt_io io = io_of(options);
        io.files = length(sources.size());
        io.read = read<Source>;
        io.users = users.data();
        io.totals = totals.data();
        detail::check(dsopt_optimizer_load(get(), nullptr, &io));
    }

private:
    using handle = detail::handle<dsopt_optimizer, dsopt_optimizer_destroy>;
    explicit optimizer(dsopt_optimizer *made) noexcept : handle_(made) {}
    explicit optimizer(handle made) noexcept : handle_(std::move(made)) {}
    handle another() const {
        return detail::make<handle>([&](dsopt_optimizer **other) { return dsopt_optimizer_retain(get(), other); });
    }
    std::shared_ptr<dsopt_optimizer> shared() const { return another(); }
    static handle create(const context &ctx, const optimizer_options &options) {
        dsopt_optimizer_desc desc = detail::desc_of<dsopt_optimizer_desc>();
        desc.compat = static_cast<std::int32_t>(options.compat);
        if (options.no_master) desc.flags |= DSOPT_OPTIMIZER_NO_MASTER;
        if (options.report_norms) desc.flags |= DSOPT_OPTIMIZER_REPORT_NORMS;
        if (options.stochastic_rounding) desc.flags |= DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
        if (options.accumulate) desc.flags |= DSOPT_OPTIMIZER_ACCUMULATE;
        if (options.timing) desc.flags |= DSOPT_OPTIMIZER_TIMING;
        if (options.averages) desc.flags |= DSOPT_OPTIMIZER_AVERAGES;
        if (options.check_ranks) desc.flags |= DSOPT_OPTIMIZER_CHECK_RANKS;
        if (options.momentum_bits) desc.flags |= DSOPT_OPTIMIZER_MOMENTUM_BITS;
        if (options.split_matrices) desc.flags |= DSOPT_OPTIMIZER_SPLIT_MATRICES;
        if (options.early_update) desc.flags |= DSOPT_OPTIMIZER_EARLY_UPDATE;
        desc.flags |= static_cast<std::int32_t>(options.shard);
        desc.nonfinite = static_cast<std::int32_t>(options.nonfinite);
        desc.masters = static_cast<std::int32_t>(options.masters);
        desc.max_norm = options.max_norm;
        desc.max_value = options.max_value;
        desc.scaler = detail::get_or_null("scaler", options.scaler);
        desc.data = detail::get_or_null("data", options.data);
        desc.model = detail::get_or_null("model", options.model);
        desc.node = detail::get_or_null("node", options.node);
        std::vector<dsopt_comm *> experts;
        for (comm &expert : options.experts) experts.push_back(expert.get());
        desc.experts = experts.data();
        desc.expert_count = length(experts.size());
        desc.skip_budget = options.skip_budget;
        desc.seed = options.seed;
        desc.bucket = options.bucket;
        desc.buckets_in_flight = options.buckets_in_flight;
        return detail::make<handle>(
            [&](dsopt_optimizer **made) { return dsopt_optimizer_create(ctx.get(), &desc, made); });
    }
    static std::int32_t length(std::size_t size) noexcept {
        return static_cast<std::int32_t>(size < INT32_MAX ? size : INT32_MAX);
    }

    std::int64_t ready_of(const std::int64_t *params, std::int64_t first, std::int64_t count, const tensor *grads,
                          const ready_options &options) {
        dsopt_ready ready = detail::desc_of<dsopt_ready>();
        ready.params = params;
        ready.first = first;
        ready.count = count;
        ready.grads = grads;
        ready.stream = options.stream;
        if (options.accumulated) ready.flags |= DSOPT_READY_ACCUMULATED;
        detail::check(dsopt_optimizer_ready(get(), &ready));
        return ready.free_from;
    }
    dsopt_step arguments_of(span<const tensor> grads, std::int64_t count, const step_options &options) const {
        dsopt_step step = detail::desc_of<dsopt_step>();
        step.grads = grads.data();
        step.count = count;
        step.params = detail::exactly("params", options.params, count);
        step.out = detail::exactly("out", options.out, count);
        step.state = options.state.data();
        step.state_count = detail::count(options.state);
        if (!options.lr.empty() || !options.hyper.empty() || !options.grad_norms.empty()) {
            const std::int64_t groups = group_count();
            step.lr = detail::at_least("lr", options.lr, groups);
            step.hyper = detail::at_least("hyper", options.hyper, groups * DSOPT_HYPER_FLOATS);
            step.grad_norms = detail::at_least("grad_norms", options.grad_norms, groups);
        }
        step.grad_scale = options.grad_scale;
        step.skip = options.skip;
        step.report = detail::at_least("report", options.report, DSOPT_REPORT_FLOATS);
        step.workspace = options.workspace.data();
        step.workspace_bytes = options.workspace.size();
        step.stream = options.stream;
        step.parallel_for = options.pool.function();
        step.parallel_user = options.pool.user();
        if (options.zero_grads) step.flags |= DSOPT_STEP_ZERO_GRADS;
        if (options.out_only) step.flags |= DSOPT_STEP_OUT_ONLY;
        if (options.delta) step.flags |= DSOPT_STEP_DELTA;
        if (options.no_nan) step.flags |= DSOPT_STEP_NO_NAN;
        if (options.ready) step.flags |= DSOPT_STEP_READY;
        return step;
    }
    void bind(std::int32_t what, span<const tensor> list) {
        detail::check(dsopt_optimizer_bind(get(), what, list.data(), detail::count(list)));
    }

    static dsopt_io io_of(const save_options &options) noexcept {
        dsopt_io io = detail::desc_of<dsopt_io>();
        if (options.params) io.flags |= DSOPT_IO_PARAMS;
        return io;
    }
    static dsopt_io io_of(const load_options &options) noexcept {
        dsopt_io io = detail::desc_of<dsopt_io>();
        if (options.params) io.flags |= DSOPT_IO_PARAMS;
        if (options.no_state) io.flags |= DSOPT_IO_NO_STATE;
        if (options.no_masters) io.flags |= DSOPT_IO_NO_MASTERS;
        if (options.no_hyper) io.flags |= DSOPT_IO_NO_HYPER;
        if (options.no_scaler) io.flags |= DSOPT_IO_NO_SCALER;
        if (options.reset_errors) io.flags |= DSOPT_IO_RESET_ERRORS;
        if (options.convert) io.flags |= DSOPT_IO_CONVERT;
        return io;
    }
    template <class Source> static int read(void *user, std::uint64_t offset, void *data, std::size_t bytes) {
        try {
            static_cast<Source *>(user)->read(offset, data, bytes);
            return 0;
        } catch (...) { detail::keep_exception(); }
        return EIO;
    }
    handle handle_;
};

} // namespace dsopt
#endif
