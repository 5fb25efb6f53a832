// SPDX-License-Identifier: Apache-2.0
// The CUDA backend on the emulated device: the bits of the CPU backend, what a step costs in launches, graphs, staging,
// faults.
#include "dsopt.h"
#include "fakert.h"
#include <cmath>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

#define OK(call) ASSERT_EQ(call, DSOPT_OK) << dsopt_last_error()

size_t element(int32_t dtype) { return dtype == DSOPT_F32 ? 4 : 2; }

/// Bits of a value in a dtype, good enough to make inputs.
void put(char *to, int32_t dtype, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == DSOPT_F32)
        std::memcpy(to, &bits, 4);
    else {
        const uint16_t bf16 = uint16_t(bits >> 16);
        const auto exponent = int((bits >> 23) & 0xff) - 112;
        const uint16_t f16 = uint16_t((bits >> 16 & 0x8000) |
                                      (exponent >= 31 ? 0x7c00 | ((bits & 0x7fffff) != 0 && exponent > 31 ? 0x200 : 0)
                                       : exponent > 0 ? uint32_t(exponent) << 10 | (bits >> 13 & 0x3ff)
                                                      : 0));
        std::memcpy(to, dtype == DSOPT_F16 ? &f16 : &bf16, 2);
    }
}

/// Bytes on the host or on the emulated device.
class Bytes {
public:
    Bytes(bool device, size_t bytes, size_t shift) : device_(device), bytes_(bytes), shift_(shift) {
        if (device_)
            EXPECT_EQ(cudaMalloc(&base_, bytes + 64), cudaSuccess);
        else
            base_ = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
    }
    ~Bytes() {
        if (device_)
            (void)cudaFree(base_);
        else
            std::free(base_);
    }
    Bytes(Bytes &&other) noexcept :
        device_(other.device_),
        bytes_(other.bytes_),
        shift_(other.shift_),
        base_(other.base_) {
        other.base_ = nullptr;
    }
    Bytes &operator=(Bytes &&) = delete;
    char *data() const { return static_cast<char *>(base_) + shift_; }
    void set(const std::vector<char> &from) {
        if (from.empty()) return;
        if (device_)
            EXPECT_EQ(cudaMemcpy(data(), from.data(), from.size(), cudaMemcpyHostToDevice), cudaSuccess);
        else
            std::memcpy(data(), from.data(), from.size());
    }
    std::vector<char> get() const {
        std::vector<char> to(bytes_);
        if (to.empty()) return to;
        if (device_)
            EXPECT_EQ(cudaMemcpy(to.data(), data(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
        else
            std::memcpy(to.data(), data(), bytes_);
        return to;
    }

private:
    bool device_;
    size_t bytes_, shift_;
    void *base_ = nullptr;
};

struct Setting {
    int32_t algorithm = DSOPT_ADAMW;
    int32_t param = DSOPT_F32, grad = DSOPT_F32;
    dsopt_optimizer_desc desc{};
    uint32_t group_flags = 0;
    bool scaler = false;
    uint32_t step_flags = 0;
    int32_t out = 0; // dtype, 0 = none
    bool shifted = false;
    bool mixed = false; // dtypes differ from tensor to tensor
    std::vector<int64_t> sizes{1, 7, 0, 1023, 4095, 4096, 4097, 9000, 33};
};

/// An optimizer with its lists, on one of the two backends.
class Side {
public:
    Side(bool device, const Setting &setting) : device_(device), setting_(setting) {
        DSOPT_NEW(dsopt_context_desc, where);
        where.backend = device ? DSOPT_CUDA : DSOPT_CPU;
        good(dsopt_context_create(&where, &context));
        dsopt_optimizer_desc desc = setting.desc;
        desc.size = sizeof desc;
        if (setting.scaler) {
            DSOPT_NEW(dsopt_scaler_desc, how);
            how.init = 8;
            how.window = 2;
            good(dsopt_scaler_create(context, &how, &scaler));
            desc.scaler = scaler;
        }
        good(dsopt_optimizer_create(context, &desc, &optimizer));
        const int32_t dtypes[] = {DSOPT_F32, DSOPT_F16, DSOPT_BF16};
        std::vector<dsopt_param> list;
        for (size_t i = 0; i < setting.sizes.size(); ++i) {
            const int64_t n = setting.sizes[i];
            const int32_t param = setting.mixed ? dtypes[i % 3] : setting.param,
                          grad = setting.mixed ? dtypes[i / 3 % 3] : setting.grad;
            const size_t shift = setting.shifted && i % 2 ? 1 : 0; // in elements
            params.emplace_back(device, size_t(n) * element(param), shift * element(param));
            grads.emplace_back(device, size_t(n) * element(grad), shift * element(grad));
            std::vector<char> p(size_t(n) * element(param));
            for (int64_t k = 0; k < n; ++k) put(&p[size_t(k) * element(param)], param, std::sin(float(k + n)) * 0.5f);
            params.back().set(p);
            dsopt_param entry{};
            entry.tensor = {params.back().data(), n, param, 0};
            list.push_back(entry);
            gradients.push_back({grads.back().data(), n, grad, 0});
            if (setting.out != 0) {
                outs.emplace_back(device, size_t(n) * element(setting.out), 0);
                outputs.push_back({outs.back().data(), n, setting.out, 0});
            }
        }
        const size_t half = list.size() / 2;
        dsopt_group group;
        good(dsopt_group_init(&group, sizeof group, setting.algorithm));
        group.flags = setting.group_flags;
        group.weight_decay = 0.1;
        good(dsopt_optimizer_add_group(optimizer, &group, list.data(), int64_t(half)));
        group.lr = 2e-3;
        group.beta1 = 0.8;
        group.weight_decay = 0;
        good(dsopt_optimizer_add_group(optimizer, &group, list.data() + half, int64_t(list.size() - half)));
    }
    ~Side() {
        dsopt_optimizer_destroy(optimizer);
        dsopt_scaler_destroy(scaler);
        dsopt_context_destroy(context);
    }

    void fill_gradients(int t, int bad = -1) {
        for (size_t i = 0; i < gradients.size(); ++i) {
            const int32_t dtype = gradients[i].dtype;
            std::vector<char> g(size_t(gradients[i].numel) * element(dtype));
            for (int64_t k = 0; k < gradients[i].numel; ++k)
                put(&g[size_t(k) * element(dtype)], dtype, std::cos(float(3 * k + 7 * t)) + 0.1f);
            if (bad == int(i) && !g.empty()) put(&g[g.size() - element(dtype)], dtype, t % 2 ? INFINITY : NAN);
            grads[i].set(g);
        }
    }
    dsopt_step arguments() {
        DSOPT_NEW(dsopt_step, step);
        step.grads = gradients.data();
        step.count = int64_t(gradients.size());
        step.flags = setting_.step_flags;
        if (!outputs.empty()) step.out = outputs.data();
        return step;
    }
    dsopt_status step() {
        const dsopt_step arguments_ = arguments();
        return dsopt_optimizer_step(optimizer, &arguments_);
    }
    /// Everything that a step changes, and its report.
    std::vector<std::vector<char>> everything() {
        std::vector<std::vector<char>> all;
        int64_t count = 0;
        good(dsopt_optimizer_state_count(optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            good(dsopt_optimizer_state(optimizer, i, &info));
            std::vector<char> host(size_t(info.tensor.numel) *
                                   (info.tensor.dtype == DSOPT_I32 ? 4 : element(info.tensor.dtype)));
            good(dsopt_optimizer_export(optimizer, i, host.data(), host.size()));
            all.push_back(std::move(host));
        }
        for (auto *list : {&params, &grads, &outs})
            for (const Bytes &bytes : *list) all.push_back(bytes.get());
        DSOPT_NEW(dsopt_report, report);
        good(dsopt_optimizer_report(optimizer, &report));
        const double numbers[] = {double(report.skipped),   double(report.skipped_in_row),
                                  double(report.nonfinite), double(report.first_bad),
                                  double(report.kind),      report.loss_scale,
                                  report.grad_norm,         report.dense_norm,
                                  report.weight_norm,       report.update_norm,
                                  report.divisor,           report.scale_used};
        for (const double number : numbers) {
            const double plain = std::isnan(number) ? 12345.0 : number;
            all.emplace_back(reinterpret_cast<const char *>(&plain), reinterpret_cast<const char *>(&plain + 1));
        }
        return all;
    }
    static void good(dsopt_status status) { ASSERT_EQ(status, DSOPT_OK) << dsopt_last_error(); }

    dsopt_context *context = nullptr;
    dsopt_scaler *scaler = nullptr;
    dsopt_optimizer *optimizer = nullptr;
    std::vector<Bytes> params, grads, outs;
    std::vector<dsopt_tensor> gradients, outputs;

private:
    bool device_;
    Setting setting_;
};

/// Which list differs first, and where; the lists themselves would fill pages.
testing::AssertionResult same(const std::vector<std::vector<char>> &a, const std::vector<std::vector<char>> &b) {
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " arrays";
    for (size_t i = 0; i < a.size(); ++i)
        if (a[i] != b[i]) {
            size_t k = 0;
            while (k < a[i].size() && k < b[i].size() && a[i][k] == b[i][k]) ++k;
            double x = 0, y = 0;
            if (a[i].size() == 8 && b[i].size() == 8) std::memcpy(&x, a[i].data(), 8), std::memcpy(&y, b[i].data(), 8);
            return testing::AssertionFailure()
                   << "array " << i << " of " << a.size() << " at byte " << k << " of " << a[i].size() << " (" << x
                   << " and " << y << " if it is a number of the report)";
        }
    return testing::AssertionSuccess();
}

class Cuda : public testing::Test {
protected:
    void SetUp() override { fakert::reset(); }
    void TearDown() override {
        EXPECT_EQ(fakert::live_objects(), 0) << "device memory, streams or events were not given back";
        fakert::reset();
    }
};

void expect_same_bits(const Setting &setting, const char *what) {
    SCOPED_TRACE(what);
    Side host(false, setting), device(true, setting);
    for (int t = 0; t < 5; ++t) {
        for (Side *side : {&host, &device}) {
            side->fill_gradients(t, t == 2 ? 5 : -1);
            if (t == 3) side->gradients[3].data = nullptr;
            if (t == 4) side->gradients[3].data = side->grads[3].data();
            OK(dsopt_optimizer_set(side->optimizer, DSOPT_ALL_GROUPS, DSOPT_LR, 1e-3 * (t + 1)));
            OK(side->step());
        }
        ASSERT_TRUE(same(host.everything(), device.everything())) << "step " << t;
    }
}

TEST_F(Cuda, GivesTheBitsOfTheCpuForEveryAlgorithmAndDtype) {
    for (const int32_t algorithm : {DSOPT_ADAM, DSOPT_ADAMW, DSOPT_LAMB, DSOPT_ADAM_LEGACY})
        for (const int32_t param : {DSOPT_F32, DSOPT_F16, DSOPT_BF16})
            for (const int32_t grad : {DSOPT_F32, DSOPT_F16, DSOPT_BF16})
                for (const bool clip : {false, true}) {
                    Setting s;
                    s.algorithm = algorithm;
                    s.param = param;
                    s.grad = grad;
                    s.scaler = clip && param != DSOPT_F32;
                    s.desc.max_norm = clip ? 0.5 : 0;
                    s.desc.nonfinite = clip ? DSOPT_NONFINITE_AUTO : DSOPT_NONFINITE_SKIP;
                    s.desc.flags = clip ? 0 : DSOPT_OPTIMIZER_REPORT_NORMS;
                    if (algorithm == DSOPT_LAMB || algorithm == DSOPT_ADAM_LEGACY)
                        s.group_flags = clip ? DSOPT_GROUP_EPS_INSIDE_SQRT : 0;
                    expect_same_bits(
                        s,
                        (std::to_string(algorithm) + " " + std::to_string(param) + " " + std::to_string(grad)).c_str());
                }
}

TEST_F(Cuda, GivesTheBitsOfTheCpuForMixedListsUnalignedArraysAndEveryOption) {
    Setting s;
    s.mixed = s.shifted = true;
    s.desc.max_value = 0.9;
    s.desc.max_norm = 3;
    expect_same_bits(s, "mixed, unaligned, clipped by value");
    s.out = DSOPT_BF16;
    s.step_flags = DSOPT_STEP_ZERO_GRADS;
    expect_same_bits(s, "outputs, zeroed gradients");
    s.step_flags = DSOPT_STEP_OUT_ONLY;
    s.algorithm = DSOPT_LAMB;
    expect_same_bits(s, "LAMB, outputs only");
    Setting random;
    random.param = DSOPT_BF16;
    random.desc.flags = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    random.desc.seed = 5;
    expect_same_bits(random, "stochastic rounding");
    Setting delta;
    delta.out = DSOPT_F32;
    delta.step_flags = DSOPT_STEP_DELTA;
    expect_same_bits(delta, "delta");
}

TEST_F(Cuda, GivesTheBitsOfTheCpuInCompatMode) {
    for (const int32_t masters : {DSOPT_MASTERS_FLAT, DSOPT_MASTERS_PER_TENSOR})
        for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_NO_MASTER)}) {
            if (flags != 0 && masters == DSOPT_MASTERS_FLAT) continue;
            Setting s;
            s.param = s.grad = DSOPT_F16;
            s.mixed = flags != 0;
            s.scaler = flags == 0;
            s.desc.compat = DSOPT_COMPAT_DEEPSPEED;
            s.desc.masters = masters;
            s.desc.flags = flags;
            s.desc.max_norm = flags == 0 ? 1 : 0;
            expect_same_bits(s, "compat");
        }
}

/// Thousands of blocks of device memory: protecting each one around each call would take minutes.
void allow_many_blocks() {
    fakert::Config config = fakert::config_from_environment();
    config.protect = false;
    fakert::reset(config);
}

std::vector<std::string> launches(Side &side) {
    fakert::mark();
    EXPECT_EQ(side.step(), DSOPT_OK) << dsopt_last_error();
    return fakert::launched_kernels();
}

TEST_F(Cuda, StepsWithoutWaitingAllocatingOrUploadingWhileListsStayBound) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(3000, 5);
    s.desc.max_norm = 1;
    Side side(true, s);
    side.fill_gradients(0);
    OK(side.step());
    for (int t = 0; t < 3; ++t) {
        EXPECT_EQ(launches(side), (std::vector<std::string>{"inspect", "update4"}));
        const fakert::Counters c = fakert::counters();
        EXPECT_EQ(c.host_waits + c.device_allocations + c.copies_to_device + c.copies_to_host + c.host_allocations, 0);
    }
    OK(dsopt_optimizer_set(side.optimizer, DSOPT_ALL_GROUPS, DSOPT_LR, 0.5));
    EXPECT_EQ(launches(side), (std::vector<std::string>{"patch", "inspect", "update4"}));
    EXPECT_EQ(fakert::counters().copies_to_device, 0);
}

TEST_F(Cuda, UsesOneLaunchForAdamAndThreeForLambWithClippingWhateverTheNumberOfTensors) {
    allow_many_blocks();
    for (const size_t count : {size_t(1), size_t(100), size_t(5000)}) {
        Setting s;
        s.sizes.assign(count, 3);
        {
            Side adam(true, s);
            OK(adam.step());
            EXPECT_EQ(launches(adam), (std::vector<std::string>{"update4"}));
        }
        s.algorithm = DSOPT_LAMB;
        s.desc.max_norm = 1;
        Side lamb(true, s);
        lamb.fill_gradients(1);
        OK(lamb.step());
        EXPECT_EQ(launches(lamb), (std::vector<std::string>{"inspect", "update4", "lamb_weights4"}));
    }
}

TEST_F(Cuda, SendsFewChangedPointersInArgumentsAndManyInOneUpload) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(2000, 4);
    Side side(true, s);
    side.fill_gradients(0);
    OK(side.step());
    std::swap(side.gradients[0].data, side.gradients[1].data);
    EXPECT_EQ(launches(side), (std::vector<std::string>{"patch", "update4"}));
    EXPECT_EQ(fakert::counters().copies_to_device, 0);
    for (size_t i = 0; i + 1 < side.gradients.size(); i += 2)
        std::swap(side.gradients[i].data, side.gradients[i + 1].data);
    EXPECT_EQ(launches(side), (std::vector<std::string>{"update4"}));
    EXPECT_EQ(fakert::counters().copies_to_device, 1);
    EXPECT_EQ(fakert::counters().host_waits, 0);
}

TEST_F(Cuda, ReplaysACapturedStepLikePlainStepsWithChangingLrAndAnOverflow) {
    for (const int32_t algorithm : {DSOPT_ADAMW, DSOPT_LAMB}) {
        Setting s;
        s.algorithm = algorithm;
        s.param = s.grad = DSOPT_F16;
        s.scaler = true;
        s.desc.max_norm = 1;
        Side plain(true, s), graph(true, s);
        cudaStream_t stream;
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        float *lr;
        ASSERT_EQ(cudaMalloc(reinterpret_cast<void **>(&lr), 2 * sizeof *lr), cudaSuccess);
        const auto set_lr = [&](int t) {
            const float values[] = {1e-3f * float(t % 7 + 1), 2e-3f};
            ASSERT_EQ(cudaMemcpy(lr, values, sizeof values, cudaMemcpyHostToDevice), cudaSuccess);
        };
        const auto run = [&](Side &side) {
            dsopt_step step = side.arguments();
            step.stream = stream;
            step.lr = lr;
            ASSERT_EQ(dsopt_optimizer_step(side.optimizer, &step), DSOPT_OK) << dsopt_last_error();
        };
        cudaGraph_t recorded = nullptr;
        cudaGraphExec_t replay = nullptr;
        for (int t = 0; t < 101; ++t) {
            for (Side *side : {&plain, &graph}) side->fill_gradients(t, t == 50 ? 7 : -1);
            set_lr(t);
            run(plain);
            if (t == 0) {
                run(graph); // makes tables
                ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
                run(graph);
                ASSERT_EQ(cudaStreamEndCapture(stream, &recorded), cudaSuccess);
                ASSERT_EQ(cudaGraphInstantiate(&replay, recorded, 0), cudaSuccess);
            } else {
                ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
            }
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        }
        EXPECT_TRUE(same(plain.everything(), graph.everything()));
        DSOPT_NEW(dsopt_report, report);
        OK(dsopt_optimizer_report(graph.optimizer, &report));
        EXPECT_GE(report.skipped, 1);
        EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
        EXPECT_EQ(cudaGraphDestroy(recorded), cudaSuccess);
        EXPECT_EQ(cudaFree(lr), cudaSuccess);
        EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
}

TEST_F(Cuda, KeepsAGraphAsItWasCapturedWhenListsChangeAfterwards) {
    Setting s;
    Side side(true, s), reference(false, s);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    const auto arguments = [&] {
        dsopt_step step = side.arguments();
        step.stream = stream;
        return step;
    };
    for (Side *each : {&side, &reference}) each->fill_gradients(1);
    dsopt_step step = arguments();
    OK(dsopt_optimizer_step(side.optimizer, &step));
    OK(reference.step());
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    OK(dsopt_optimizer_step(side.optimizer, &step));
    cudaGraph_t recorded = nullptr;
    cudaGraphExec_t replay = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &recorded), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, recorded, 0), cudaSuccess);
    // A plain step with another learning rate and without one gradient; the graph must not see either.
    for (Side *each : {&side, &reference}) {
        each->gradients[4].data = nullptr;
        OK(dsopt_optimizer_set(each->optimizer, DSOPT_ALL_GROUPS, DSOPT_LR, 0.25));
    }
    step = arguments();
    OK(dsopt_optimizer_step(side.optimizer, &step));
    OK(reference.step());
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    reference.gradients[4].data = reference.grads[4].data();
    OK(dsopt_optimizer_set(reference.optimizer, 0, DSOPT_LR, 1e-3));
    OK(dsopt_optimizer_set(reference.optimizer, 1, DSOPT_LR, 2e-3));
    OK(reference.step());
    EXPECT_TRUE(same(side.everything(), reference.everything()));
    // Capturing again needs a plain step with the lists as they are now.
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    OK(dsopt_optimizer_step(side.optimizer, &step));
    cudaGraph_t second = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &second), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(second), cudaSuccess);
    EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(recorded), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(Cuda, RefusesACaptureBeforeTheFirstStepAndManyChangedPointersInOne) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(3000, 4);
    Side side(true, s);
    side.fill_gradients(0);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    dsopt_step step = side.arguments();
    OK(dsopt_optimizer_step(side.optimizer, &step));
    step.stream = stream;
    for (size_t i = 0; i + 1 < side.gradients.size(); i += 2)
        std::swap(side.gradients[i].data, side.gradients[i + 1].data);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(dsopt_optimizer_step(side.optimizer, &step), DSOPT_ERR_STATE);
    cudaGraph_t graph = nullptr;
    (void)cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(Cuda, SavesAndLoadsDeviceMemoryThroughBoundedBuffers) {
    Setting s;
    s.param = s.grad = DSOPT_BF16;
    s.scaler = true;
    s.sizes = {3, 1500000, 4096, 0, 2000001}; // pieces of 4 MiB and tails
    const std::string path = testing::TempDir() + "/dsopt-cuda-" + std::to_string(getpid()) + ".safetensors";
    Side device(true, s), host(false, s), again(true, s);
    for (Side *side : {&device, &host}) {
        side->fill_gradients(0);
        OK(side->step());
    }
    fakert::mark();
    OK(dsopt_optimizer_save(device.optimizer, path.c_str(), nullptr));
    EXPECT_LE(fakert::counters().host_allocations, 2);
    DSOPT_NEW(dsopt_io, io);
    OK(dsopt_optimizer_load(again.optimizer, path.c_str(), &io));
    // What one backend wrote the other one reads, and both go on alike.
    OK(dsopt_optimizer_load(host.optimizer, path.c_str(), &io));
    for (Side *side : {&device, &host}) {
        side->fill_gradients(1);
        OK(side->step());
    }
    EXPECT_TRUE(same(device.everything(), host.everything()));
    (void)std::remove(path.c_str());
}

TEST_F(Cuda, WorksOnListsLikeTheCpu) {
    Setting s;
    s.mixed = s.shifted = true;
    Side host(false, s), device(true, s);
    dsopt_norm_result results[2][2];
    for (Side *side : {&host, &device}) {
        const bool on_device = side == &device;
        side->fill_gradients(3, 4);
        dsopt_norm_result *result = results[on_device];
        if (on_device) { ASSERT_EQ(cudaMalloc(reinterpret_cast<void **>(&result), 2 * sizeof *result), cudaSuccess); }
        const auto count = int64_t(side->gradients.size());
        OK(dsopt_tensors_norm(side->context, side->gradients.data(), count, DSOPT_NORM_L2, 0.5, nullptr, result,
                              nullptr));
        OK(dsopt_tensors_norm(side->context, side->gradients.data(), count, DSOPT_NORM_MAX, 0, nullptr, result + 1,
                              nullptr));
        if (on_device) {
            ASSERT_EQ(cudaMemcpy(results[1], result, sizeof results[1], cudaMemcpyDeviceToHost), cudaSuccess);
            ASSERT_EQ(cudaFree(result), cudaSuccess);
        }
        std::vector<dsopt_tensor> weights;
        for (size_t i = 0; i < side->params.size(); ++i) {
            weights.push_back(side->gradients[i]);
            weights.back().data = side->params[i].data();
            const int32_t dtypes[] = {DSOPT_F32, DSOPT_F16, DSOPT_BF16};
            weights.back().dtype = dtypes[i % 3];
        }
        OK(dsopt_tensors_axpby(side->context, nullptr, side->gradients.data(), 0.5f, weights.data(), count, nullptr));
        OK(dsopt_tensors_clamp(side->context, weights.data(), count, 0.75, nullptr));
        OK(dsopt_zero_grad(side->context, side->gradients.data(), 3, DSOPT_ZERO_FILL, nullptr));
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t i = 0; i < host.params.size(); ++i) {
        EXPECT_TRUE(host.params[i].get() == device.params[i].get()) << i;
        EXPECT_TRUE(host.grads[i].get() == device.grads[i].get()) << i;
    }
    for (int k = 0; k < 2; ++k) {
        EXPECT_EQ(results[0][k].nonfinite, 1);
        EXPECT_EQ(results[0][k].nonfinite, results[1][k].nonfinite);
        EXPECT_EQ(results[0][k].first_bad, results[1][k].first_bad);
        EXPECT_TRUE(results[0][k].norm == results[1][k].norm ||
                    (std::isnan(results[0][k].norm) && std::isnan(results[1][k].norm)));
    }
}

TEST_F(Cuda, NamesATensorThatIsNotOnTheContextsDeviceWhenAsked) {
    Setting s;
    Side side(true, s);
    DSOPT_NEW(dsopt_context_desc, where);
    where.backend = DSOPT_CUDA;
    where.device = 1;
    where.flags = DSOPT_CONTEXT_CHECK_POINTERS;
    dsopt_context *context = nullptr;
    OK(dsopt_context_create(&where, &context));
    dsopt_optimizer *optimizer = nullptr;
    OK(dsopt_optimizer_create(context, nullptr, &optimizer));
    dsopt_group group;
    OK(dsopt_group_init(&group, sizeof group, DSOPT_ADAMW));
    dsopt_param param{};
    param.tensor = {side.params[1].data(), 7, DSOPT_F32, 0};
    param.name = "elsewhere";
    OK(dsopt_optimizer_add_group(optimizer, &group, &param, 1));
    DSOPT_NEW(dsopt_step, step);
    step.grads = &side.gradients[1];
    step.count = 1;
    EXPECT_EQ(dsopt_optimizer_step(optimizer, &step), DSOPT_ERR_DEVICE);
    EXPECT_NE(std::string(dsopt_last_error()).find("elsewhere"), std::string::npos) << dsopt_last_error();
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0) << "the caller's device was not given back";
    dsopt_optimizer_destroy(optimizer);
    dsopt_context_destroy(context);
}

TEST_F(Cuda, SurvivesEveryFailingRuntimeCallAndGivesEverythingBack) {
    const auto scenario = [] { // stops at the first failure
        DSOPT_NEW(dsopt_context_desc, where);
        where.backend = DSOPT_CUDA;
        dsopt_context *context = nullptr;
        dsopt_optimizer *optimizer = nullptr;
        dsopt_status status = dsopt_context_create(&where, &context);
        float *memory = nullptr;
        if (status == DSOPT_OK && cudaMalloc(reinterpret_cast<void **>(&memory), 200 * sizeof(float)) != cudaSuccess)
            status = DSOPT_ERR_NOMEM;
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.max_norm = 1;
        if (status == DSOPT_OK) status = dsopt_optimizer_create(context, &desc, &optimizer);
        dsopt_group group;
        dsopt_param param{};
        param.tensor = {memory, 100, DSOPT_F32, 0};
        dsopt_tensor grad{memory + 100, 100, DSOPT_F32, 0};
        if (status == DSOPT_OK) status = dsopt_group_init(&group, sizeof group, DSOPT_LAMB);
        if (status == DSOPT_OK) status = dsopt_optimizer_add_group(optimizer, &group, &param, 1);
        DSOPT_NEW(dsopt_step, step);
        step.grads = &grad;
        step.count = 1;
        for (int t = 0; t < 2 && status == DSOPT_OK; ++t) status = dsopt_optimizer_step(optimizer, &step);
        float moments[100];
        if (status == DSOPT_OK) status = dsopt_optimizer_export(optimizer, 0, moments, sizeof moments);
        if (status == DSOPT_OK) status = dsopt_zero_grad(context, &grad, 1, DSOPT_ZERO_FILL, nullptr);
        dsopt_optimizer_destroy(optimizer);
        dsopt_context_destroy(context);
        (void)cudaFree(memory);
        return status;
    };
    fakert::Config config = fakert::config_from_environment();
    fakert::reset(config);
    ASSERT_EQ(scenario(), DSOPT_OK) << dsopt_last_error();
    const long calls = fakert::calls();
    ASSERT_GT(calls, 20);
    for (long n = 0; n < calls; ++n) {
        config.fail_call = n;
        fakert::reset(config);
        (void)scenario(); // a failing free at the very end is nobody's status; nothing may crash or hang
    }
    fakert::reset();
    EXPECT_EQ(scenario(), DSOPT_OK);
}

} // namespace
