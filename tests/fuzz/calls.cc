// SPDX-License-Identifier: Apache-2.0
// The input bytes choose calls of dsopt.h, in any order, with good and bad arguments, on the CPU or the emulated
// device, alone or as ranks on threads. Every call must return a status; a rejected call must not change an optimizer;
// no memory may be leaked.
#include "creation.h"
#include <cmath>
#include <cstdio>
#include <unistd.h>

namespace fuzz {
namespace {

constexpr int kMaxCalls = 60; // per input

class Calls : public Creation {
public:
    using Creation::Creation;
    void run() {
        static constexpr void (Calls::*kAll[])() = {&Calls::create_context,
                                                    &Calls::create_comm,
                                                    &Calls::create_scaler,
                                                    &Calls::create_optimizer,
                                                    &Calls::create_optimizer,
                                                    &Calls::add_group,
                                                    &Calls::add_params,
                                                    &Calls::step,
                                                    &Calls::step,
                                                    &Calls::step,
                                                    &Calls::step,
                                                    &Calls::apply,
                                                    &Calls::read_state,
                                                    &Calls::import_state,
                                                    &Calls::bind,
                                                    &Calls::save,
                                                    &Calls::load,
                                                    &Calls::save_file,
                                                    &Calls::load_file,
                                                    &Calls::query_scaler,
                                                    &Calls::scaler_on_arrays,
                                                    &Calls::lists,
                                                    &Calls::lists,
                                                    &Calls::compressed,
                                                    &Calls::query_optimizer,
                                                    &Calls::set,
                                                    &Calls::reset,
                                                    &Calls::accumulate,
                                                    &Calls::retain,
                                                    &Calls::reduction,
                                                    &Calls::destroy,
                                                    &Calls::without_objects,
                                                    &Calls::fail_allocations,
                                                    &Calls::query,
                                                    &Calls::ranks};
        create_context();
        for (int i = 0; choose.are_left() && i < kMaxCalls; ++i) (this->*kAll[choose.below(int(std::size(kAll)))])();
        release_all();
    }

private:
    // ----------------------------------------------------------------------------------------------------------- steps
    /// Fills everything except the lists of state.
    void fill_step(const OptimizerRecord &o, dsopt_step &step, StepLists &lists) {
        lists.gradients = list_like(o, false);
        step.grads = lists.gradients.data();
        step.count = choose.rarely(48) ? choose.of(kBadSizes) : int64_t(o.params.size());
        if (choose.rarely(3)) step.flags = 1 << choose.below(5);
        if (step.flags == DSOPT_STEP_ACCUMULATED) step.grads = nullptr;
        if (choose.rarely(3)) step.params = (lists.params = list_like(o, true)).data();
        if (choose.rarely(3) || (step.flags & (DSOPT_STEP_OUT_ONLY | DSOPT_STEP_DELTA)) != 0)
            step.out = (lists.out = list_like(o, false)).data();
        const auto scalars = [&](size_t count) { return static_cast<float *>(floats(count)); };
        if (choose.rarely(6)) step.lr = scalars(o.groups);
        if (choose.rarely(8)) step.hyper = scalars(o.groups * DSOPT_HYPER_FLOATS);
        if (choose.rarely(6)) step.grad_scale = scalars(1);
        if (choose.rarely(8)) step.grad_norms = scalars(o.groups);
        if (choose.rarely(8)) step.skip = static_cast<const int32_t *>(words({choose.below(2)}));
        if (choose.rarely(3)) step.report = scalars(DSOPT_REPORT_FLOATS);
        if (choose.rarely(8)) step.parallel_for = run_backwards;
        if (choose.rarely(48)) break_one({&step.flags, &step.reserved});
        if (choose.rarely(64)) step.size = choose.byte() % sizeof step;
    }
    void step() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr) return;
        DSOPT_NEW(dsopt_step, step);
        StepLists lists;
        fill_step(*o, step, lists);
        if (choose.rarely(8)) {
            lists.state = state_list(*o, choose.flip());
            for (dsopt_tensor &entry : lists.state)
                if (choose.rarely(3)) entry.data = nullptr;
            step.state = lists.state.data();
            step.state_count = count_of(lists.state);
        }
        for (int i = 1 + choose.below(3); i > 0; --i)
            watch(*o, "step", [&] { return counted("step", dsopt_optimizer_step(o->handle.get(), &step)); });
    }
    void apply() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr || o->is_large()) return;
        DSOPT_NEW(dsopt_step, step);
        StepLists lists;
        fill_step(*o, step, lists);
        lists.params = list_like(*o, true);
        lists.state = state_list(*o, false);
        if (lists.state.empty()) return;
        if (counted("init_state",
                    dsopt_optimizer_init_state(o->handle.get(), lists.params.data(), count_of(lists.params),
                                               lists.state.data(), count_of(lists.state), nullptr)) != DSOPT_OK)
            return;
        size_t bytes = 0;
        if (counted("workspace", dsopt_optimizer_workspace(o->handle.get(), &bytes)) != DSOPT_OK) return;
        if (bytes > kMaxBytes) return;
        if (choose.rarely(8)) fill_words(lists.state[size_t(choose.below(int(lists.state.size())))]);
        if (choose.rarely(32)) lists.state[0].data = nullptr;
        step.params = choose.rarely(32) ? nullptr : lists.params.data();
        step.state = lists.state.data();
        step.state_count = count_of(lists.state);
        step.workspace = allocate(bytes);
        step.workspace_bytes = choose.rarely(24) ? bytes / 2 : bytes;
        for (int i = 1 + choose.below(3); i > 0; --i)
            watch(*o, "apply", [&] { return counted("apply", dsopt_optimizer_apply(o->handle.get(), &step)); });
    }
    void accumulate() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr) return;
        const std::vector<dsopt_tensor> list = list_like(*o, false);
        watch(*o, "accumulate", [&] {
            return counted("accumulate",
                           dsopt_optimizer_accumulate(o->handle.get(), list.data(), count_of(list), nullptr));
        });
    }

    // ----------------------------------------------------------------------------------------------------------- state
    void read_state() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr) return;
        DSOPT_NEW(dsopt_state_info, info);
        if (!describe_state(*o, info)) return;
        const uint8_t byte = choose.byte();
        const bool is_longer = byte % 16 == 15;
        if (byte / 16 % 2 != 0) {
            std::vector<float> values(size_t(info.tensor.numel));
            (void)counted("export_f32", dsopt_optimizer_export_f32(o->handle.get(), described, values.data(),
                                                                   info.tensor.numel + is_longer));
            return;
        }
        std::vector<char> host(bytes_of(info.tensor));
        (void)counted("export", dsopt_optimizer_export(o->handle.get(), described, host.data(),
                                                       is_longer ? host.size() + 4 : host.size()));
    }
    void replace_words(char *data, size_t bytes, int count) {
        for (; count > 0 && bytes >= 4; --count) {
            const uint32_t word = choose.of(kWords);
            std::memcpy(&data[4 * (choose.byte() % (bytes / 4))], &word, 4);
        }
    }
    void import_state() {
        OptimizerRecord *const o = any_optimizer();
        DSOPT_NEW(dsopt_state_info, info);
        if (o == nullptr || !describe_state(*o, info)) return;
        std::vector<char> host(bytes_of(info.tensor));
        if (counted("export", dsopt_optimizer_export(o->handle.get(), described, host.data(), host.size())) != DSOPT_OK)
            return;
        const uint8_t byte = choose.byte();
        if (byte / 4 % 2 != 0) return import_f32(*o, info.tensor.numel, byte % 4);
        replace_words(host.data(), host.size(), byte % 4);
        watch(*o, "import", [&] {
            return counted("import", dsopt_optimizer_import(o->handle.get(), described,
                                                            choose.rarely(32) ? nullptr : host.data(), host.size()));
        });
    }
    void import_f32(OptimizerRecord &o, int64_t numel, int words) {
        std::vector<float> values(static_cast<size_t>(numel));
        if (counted("export_f32", dsopt_optimizer_export_f32(o.handle.get(), described, values.data(), numel)) ==
            DSOPT_OK)
            replace_words(reinterpret_cast<char *>(values.data()), values.size() * sizeof(float), words);
        const float *const host = choose.rarely(32) ? nullptr : values.data();
        watch(o, "import_f32", [&] {
            return counted("import_f32", dsopt_optimizer_import_f32(o.handle.get(), described, host, numel));
        });
    }
    void bind() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr || o->is_large()) return;
        if (choose.flip()) {
            const std::vector<dsopt_tensor> list = list_like(*o, true);
            watch(
                *o, "bind",
                [&] {
                    return counted(
                        "bind", dsopt_optimizer_bind(o->handle.get(), DSOPT_BIND_PARAMS, list.data(), count_of(list)));
                },
                [&] { o->params = list; });
            return;
        }
        std::vector<dsopt_tensor> list = state_list(*o, choose.flip());
        for (dsopt_tensor &entry : list)
            if (choose.rarely(4)) entry.data = nullptr;
        const int32_t what = choose.rarely(16) ? choose.of(kIntegers) : int32_t(DSOPT_BIND_STATE);
        watch(*o, "bind", [&] {
            return counted("bind", dsopt_optimizer_bind(o->handle.get(), what, list.data(), count_of(list)));
        });
    }
    void reset() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr) return;
        const int32_t what = choose.rarely(8) ? choose.of(kIntegers) : 1 << choose.below(5);
        watch(*o, "reset", [&] { return counted("reset", dsopt_optimizer_reset(o->handle.get(), what, nullptr)); });
    }

    // ----------------------------------------------------------------------------------------------------------- files
    int32_t io_flags() {
        const auto convert = [](int rest) { return rest % 2 != 0 ? int32_t(DSOPT_IO_CONVERT) : 0; };
        const bool one = choose.rarely(3);
        const uint8_t byte = choose.byte();
        if (one) return 1 << byte % 6 | convert(byte / 6);
        return byte % 16 == 15 ? choose.byte() : convert(byte / 16);
    }
    void save() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr || o->is_large()) return;
        DSOPT_NEW(dsopt_io, io);
        Bytes file;
        io.flags = choose.rarely(2) ? DSOPT_IO_PARAMS : choose.rarely(16) ? choose.byte() : 0;
        io.user = &file;
        io.write = append;
        if (choose.rarely(32)) io.files = choose.of(kIntegers);
        if (choose.rarely(16)) io.write = [](void *, const void *, size_t) { return 7; };
        const dsopt_status status = counted("save", dsopt_optimizer_save(o->handle.get(), nullptr, &io));
        if (status == DSOPT_OK && files.size() < 6) files.push_back(std::move(file));
    }
    void load() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr || o->is_large() || files.empty()) return;
        DSOPT_NEW(dsopt_io, io);
        io.flags = io_flags();
        io.read = read_at;
        std::vector<Bytes> copies; // modifiable, since they may be damaged
        for (int i = 1 + choose.below(3); i > 0; --i) copies.push_back(files[index_of(files)]);
        if (choose.rarely(4)) copies[0][choose.byte() * copies[0].size() / 256] ^= char(1 << choose.below(8));
        std::vector<void *> users;
        std::vector<uint64_t> totals;
        for (Bytes &copy : copies) users.push_back(&copy), totals.push_back(copy.size());
        if (copies.size() == 1) {
            io.user = users[0];
            io.total = totals[0];
        } else {
            io.files = choose.rarely(32) ? choose.of(kIntegers) % 3 : int32_t(copies.size());
            io.users = users.data();
            io.totals = totals.data();
        }
        watch(*o, "load", [&] { return counted("load", dsopt_optimizer_load(o->handle.get(), nullptr, &io)); });
    }
    void save_file() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr || o->is_large()) return;
        DSOPT_NEW(dsopt_io, io);
        io.flags = choose.rarely(2) ? DSOPT_IO_PARAMS : 0;
        (void)counted("save to a path", dsopt_optimizer_save(o->handle.get(), path(choose.below(3)).c_str(),
                                                             choose.flip() ? nullptr : &io));
    }
    void load_file() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr || o->is_large()) return;
        DSOPT_NEW(dsopt_io, io);
        io.flags = io_flags();
        const std::string first = path(choose.below(4)), second = path(choose.below(3)); // one folder does not exist
        const char *const paths[] = {first.c_str(), second.c_str()};
        const bool lists = choose.rarely(3);
        if (lists) io.files = 1 + choose.below(2), io.paths = paths;
        watch(*o, "load from a path", [&] {
            return counted("load from a path", dsopt_optimizer_load(o->handle.get(), lists ? nullptr : paths[0], &io));
        });
    }

    // --------------------------------------------------------------------------------------------------------- scalers
    void query_scaler() {
        if (scalers.empty()) return;
        dsopt_scaler *const scaler = scalers[index_of(scalers)].get();
        switch (choose.below(6)) {
        case 0: (void)counted("scaler_set", dsopt_scaler_set(scaler, choose.below(4), number(), nullptr)); break;
        case 1: {
            const void *const overflow = words({choose.below(2)});
            (void)counted(
                "scaler_update",
                dsopt_scaler_update(scaler, choose.flip() ? static_cast<const int32_t *>(overflow) : nullptr, nullptr));
            break;
        }
        case 2: {
            DSOPT_NEW(dsopt_scaler_info, info);
            (void)counted("scaler_query", dsopt_scaler_query(scaler, &info));
            break;
        }
        case 3: {
            dsopt_tensor loss = tensor(1, choose.of(kDtypes));
            if (choose.rarely(4)) make_invalid(loss);
            (void)counted("scaler_scale_loss", dsopt_scaler_scale_loss(scaler, &loss, nullptr));
            break;
        }
        case 4:
            if (dsopt_scaler_device_scale(scaler) == nullptr) finding("a scaler has no scale");
            break;
        case 5: (void)counted("scaler_detach", dsopt_scaler_detach(scaler)); break;
        }
    }
    void scaler_on_arrays() {
        if (scalers.empty()) return;
        dsopt_scaler *const scaler = scalers[index_of(scalers)].get();
        std::vector<dsopt_tensor> state = {{floats(1), 1, DSOPT_DTYPE_F32, 0}, {zeros(48), 12, DSOPT_DTYPE_I32, 0}};
        if (choose.rarely(8)) make_invalid(state[size_t(choose.below(2))]);
        if (counted("scaler_init_state", dsopt_scaler_init_state(scaler, state.data(), count_of(state), nullptr)) ==
            DSOPT_OK) {
            if (choose.rarely(4)) fill_words(state[1]);
            const auto *const overflow = static_cast<const int32_t *>(words({choose.below(2)}));
            (void)counted("scaler_update_arrays",
                          dsopt_scaler_update_arrays(scaler, state.data(), count_of(state), overflow, nullptr));
        }
        int32_t host[64];
        for (int32_t &word : host) word = choose.rarely(4) ? int32_t(choose.of(kWords)) : choose.byte();
        DSOPT_NEW(dsopt_scaler_info, info);
        (void)counted("scaler_decode", dsopt_scaler_decode(host, &info));
        DSOPT_NEW(dsopt_schedule_info, schedule);
        if (const OptimizerRecord *const o = any_optimizer(); o != nullptr)
            (void)counted("schedule_decode", dsopt_schedule_decode(o->handle.get(), host, &schedule));
    }

    // ----------------------------------------------------------------------------------------------------------- lists
    void lists() {
        std::vector<dsopt_tensor> x, y;
        for (int i = choose.below(5); i > 0; --i) {
            const int64_t numel = choose.of(kSizes);
            x.push_back(tensor(numel, choose.of(kDtypes)));
            y.push_back(choose.rarely(6) ? x.back() : tensor(numel, choose.of(kDtypes)));
            if (choose.rarely(8)) x.back().data = nullptr;
            if (choose.rarely(8)) make_invalid(x.back());
        }
        const int64_t count = choose.rarely(32) ? -1 : count_of(x);
        dsopt_context *const context = any_context();
        switch (choose.below(5)) {
        case 0: (void)counted("zero_grad", dsopt_zero_grad(context, x.data(), count, choose.below(3), nullptr)); break;
        case 1: {
            auto *const result = static_cast<dsopt_norm_result *>(allocate(sizeof(dsopt_norm_result)));
            (void)counted("tensors_norm", dsopt_tensors_norm(context, x.data(), count, choose.below(3), number(),
                                                             any_comm(), result, nullptr));
            break;
        }
        case 2: {
            const auto *const a = static_cast<const float *>(floats(1));
            (void)counted("tensors_axpby", dsopt_tensors_axpby(context, choose.flip() ? a : nullptr, x.data(),
                                                               float(number()), y.data(), count, nullptr));
            break;
        }
        case 3: (void)counted("tensors_clamp", dsopt_tensors_clamp(context, x.data(), count, number(), nullptr)); break;
        case 4:
            (void)counted("comm_all_reduce",
                          dsopt_comm_all_reduce(any_comm(), x.data(), count, choose.below(4), nullptr));
            break;
        }
    }
    void compressed() {
        if (comms.empty()) return;
        dsopt_comm *const comm = comms[index_of(comms)].get();
        DSOPT_NEW(dsopt_compressed, args);
        std::vector<dsopt_tensor> list;
        for (int i = choose.below(5); i > 0; --i) {
            list.push_back(tensor(choose.of(kSizes), DSOPT_DTYPE_F32));
            if (choose.rarely(32)) make_invalid(list.back());
        }
        args.tensors = list.data();
        args.count = choose.rarely(32) ? -1 : count_of(list);
        args.compat = choose.rarely(4);
        if (choose.rarely(4)) args.node = any_comm();
        int64_t worker = 0, server = 0;
        size_t bytes = 0;
        if (counted("compressed_sizes", dsopt_compressed_sizes(comm, &args, &worker, &server, &bytes)) != DSOPT_OK)
            return;
        if (bytes > kMaxBytes || worker > int64_t(kMaxBytes / 4)) return;
        args.worker_error = static_cast<float *>(zeros(size_t(worker) * 4));
        args.server_error = static_cast<float *>(zeros(size_t(server) * 4));
        args.workspace = allocate(bytes);
        args.workspace_bytes = choose.rarely(16) ? bytes / 2 : bytes;
        if (choose.rarely(32)) args.worker_error = nullptr;
        for (int i = 1 + choose.below(3); i > 0; --i)
            (void)counted("compressed_allreduce", dsopt_compressed_allreduce(comm, &args));
        std::vector<float> worker_residuals(static_cast<size_t>(worker)), server_residuals(static_cast<size_t>(server));
        (void)counted("compressed_errors", dsopt_compressed_errors(comm, &args, worker_residuals.data(),
                                                                   choose.flip() ? server_residuals.data() : nullptr));
    }

    // --------------------------------------------------------------------------------------------------------- queries
    int32_t any_group() { return choose.below(4) - 1; }
    void set() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr) return;
        const int32_t group = any_group(), key = choose.below(40);
        const double value = number();
        watch(*o, "set", [&] { return counted("set", dsopt_optimizer_set(o->handle.get(), group, key, value)); });
    }
    void query_optimizer() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr) return;
        double value = 0;
        int64_t groups = 0, params = 0;
        DSOPT_NEW(dsopt_report, report);
        if (choose.rarely(32)) report.size = choose.byte() % sizeof report;
        (void)counted("get", dsopt_optimizer_get(o->handle.get(), any_group(), choose.below(40), &value));
        (void)counted("report", dsopt_optimizer_report(o->handle.get(), &report));
        (void)counted("count", dsopt_optimizer_count(o->handle.get(), &groups, &params));
        if (size_t(params) != o->params.size())
            finding("count returned %ld parameters in place of %zu", long(params), o->params.size());
    }
    void reduction() {
        OptimizerRecord *const o = any_optimizer();
        if (o == nullptr) return;
        int32_t host = 0;
        const int64_t call = choose.rarely(8) ? choose.of(kBadSizes) % 1000000 : choose.byte();
        (void)counted("next_reduction", dsopt_optimizer_next_reduction(o->handle.get(), call, &host));
        if (o->is_large()) return;
        const std::vector<dsopt_tensor> state = state_list(*o, false);
        for (size_t i = 0; i < state.size(); ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must("state", dsopt_optimizer_state(o->handle.get(), int64_t(i), &info));
            if (std::strcmp(info.name, "schedule") != 0) continue;
            fill_words(state[i]);
            (void)counted("reduction", dsopt_optimizer_next_reduction_on_device(
                                           o->handle.get(), &state[i], static_cast<int32_t *>(allocate(4)), nullptr));
        }
    }
    void retain() {
        OptimizerRecord *const o = any_optimizer();
        dsopt_optimizer *other = nullptr;
        if (o == nullptr || counted("retain", dsopt_optimizer_retain(o->handle.get(), &other)) != DSOPT_OK) return;
        retained.push_back(test::Optimizer(other));
    }
    void query() {
        DSOPT_NEW(dsopt_context_info, about);
        if (!contexts.empty())
            (void)counted("context_query", dsopt_context_query(contexts.back().handle.get(), &about));
        DSOPT_NEW(dsopt_comm_info, info);
        if (comms.empty()) return;
        dsopt_comm *const comm = comms[index_of(comms)].get();
        (void)counted("comm_query", dsopt_comm_query(comm, &info));
        if (choose.rarely(8)) dsopt_comm_abort(comm);
    }
    void without_objects() {
        char id[256];
        size_t bytes = choose.rarely(4) ? choose.byte() : sizeof id;
        (void)counted("comm_unique_id", dsopt_comm_unique_id(choose.flip() ? DSOPT_COMM_KIND_LOCAL : choose.below(6),
                                                             choose.flip() ? id : nullptr, &bytes));
        if (dsopt_version() <= 0 || dsopt_abi_version() != DSOPT_ABI_VERSION || dsopt_build_info()[0] != '{')
            finding("the version is invalid");
        if (dsopt_status_name(choose.of(kIntegers))[0] == 0) finding("a status has no name");
        DSOPT_NEW(dsopt_step, step);
        (void)counted("step of NULL", dsopt_optimizer_step(nullptr, &step));
        (void)counted("report of NULL", dsopt_optimizer_report(nullptr, nullptr));
        (void)counted("compressed of NULL", dsopt_compressed_allreduce(nullptr, nullptr));
        if (const OptimizerRecord *const o = any_optimizer(); o != nullptr) {
            (void)counted("step by NULL", dsopt_optimizer_step(o->handle.get(), nullptr));
            (void)counted("get to NULL", dsopt_optimizer_get(o->handle.get(), 0, DSOPT_KEY_LR, nullptr));
        }
        dsopt_comm_abort(nullptr);
        if (dsopt_scaler_device_scale(nullptr) != nullptr) finding("device_scale(NULL) returned an address");
    }
    void fail_allocations() {
        for (const auto &hook : hooks) hook->fails_in = choose.rarely(3) ? choose.below(6) : -1;
    }
    void destroy() {
        switch (choose.below(4)) {
        case 0: erase_one(contexts); break;
        case 1: erase_one(comms); break;
        case 2: erase_one(scalers); break;
        case 3: erase_one(optimizers); break;
        }
    }

    // ----------------------------------------------------------------------------------------------------------- ranks
    /// Two or three ranks on threads, one of which may abort, leave or skip a step. Only statuses may depend on timing.
    void ranks();
};

void Calls::ranks() {
    const int count = 2 + choose.below(2), faulty_rank = choose.rarely(3) ? choose.below(count) : -1,
              fault = choose.byte();
    const AlgorithmChoice chosen(choose.byte());
    const int32_t algorithm = chosen.algorithm;
    const bool differ = fault / 4 % 2 != 0; // the formats of a faulty rank
    const int sharded = fault / 8 % 4;      // 1: over the ranks, 2: the same as ranks of a node, 3: matrices of Muon
    const bool checks = choose.rarely(3), averages = choose.flip();
    const int steps = 1 + choose.below(5);
    const int64_t size = choose.of(kSizes), rows = 20, cols = 16;
    const bool matrices = algorithm == DSOPT_ALGORITHM_MUON;
    const int64_t numel = matrices ? 3 * rows * cols : size;
    const test::CommId id = test::new_id();
    const std::string folder = path(0) + ".rank";
    test::run_ranks(count, [&](int rank) {
        const test::Context context = test::make_context(test::context_desc(1, backend));
        dsopt_comm_desc desc = test::local_desc(id, rank, count, faulty_rank >= 0 ? 4 : 20000);
        dsopt_comm *handle = nullptr;
        if (faulty_rank == rank && fault % 4 == 0) return;
        if (counted("local comm_create", dsopt_comm_create(context.get(), &desc, &handle)) != DSOPT_OK) return;
        const test::Comm comm(handle);
        Block weights = block(size_t(numel) * 4), gradients = block(size_t(numel) * 4);
        const dsopt_tensor weight{weights.data(), numel, DSOPT_DTYPE_F32, 0},
            gradient{gradients.data(), numel, DSOPT_DTYPE_F32, 0};
        DSOPT_NEW(dsopt_optimizer_desc, od);
        (sharded == 2 ? od.node : od.data) = comm.get();
        if (sharded == 1) od.flags |= DSOPT_OPTIMIZER_SHARD;
        if (sharded == 2) od.flags |= DSOPT_OPTIMIZER_SHARD_NODE;
        if (matrices && sharded == 3) od.flags |= DSOPT_OPTIMIZER_SPLIT_MATRICES;
        od.max_norm = 1;
        if (checks) od.flags |= DSOPT_OPTIMIZER_CHECK_RANKS;
        dsopt_group group;
        must("group_init", dsopt_group_init(&group, sizeof group, algorithm));
        const bool onebit = algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM;
        if (averages && (onebit || sharded != 0)) od.flags |= DSOPT_OPTIMIZER_AVERAGES;
        if (onebit) {
            group.freeze_step = 2;
            od.max_norm = 0;
        }
        if (!(differ && faulty_rank == rank)) set_formats(group, chosen.formats);
        if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
            group.var_interval_steps = group.local_interval_steps = group.max_local_interval = 1;
        const test::Optimizer optimizer = test::make_optimizer(context, od);
        dsopt_param param{};
        param.tensor = weight;
        if (matrices) param.rows = rows, param.cols = cols;
        if (counted("ranks' add_group", dsopt_optimizer_add_group(optimizer.get(), &group, &param, 1)) != DSOPT_OK)
            return;
        for (int call = 0; call < steps; ++call) {
            if (faulty_rank == rank && call == 1) {
                if (fault % 4 == 1) return dsopt_comm_abort(comm.get());
                if (fault % 4 == 2) return;
                if (fault % 4 == 3) continue; // takes one step less than the others
            }
            DSOPT_NEW(dsopt_step, step);
            step.grads = &gradient;
            step.count = 1;
            (void)counted("ranks' step", dsopt_optimizer_step(optimizer.get(), &step));
        }
        dsopt_tensor list = gradient;
        (void)counted("ranks' comm_all_reduce", dsopt_comm_all_reduce(comm.get(), &list, 1, DSOPT_OP_MEAN, nullptr));
        const std::string file = folder + std::to_string(rank);
        (void)counted("ranks' save", dsopt_optimizer_save(optimizer.get(), file.c_str(), nullptr));
        (void)counted("ranks' load", dsopt_optimizer_load(optimizer.get(), file.c_str(), nullptr));
        (void)std::remove(file.c_str());
    });
}

} // namespace
} // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz::count_runs();
    fuzz::Calls(fuzz::Choices(data, size)).run();
    return 0;
}
