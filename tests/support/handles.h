// SPDX-License-Identifier: Apache-2.0
// Owners of the objects of dsopt.h, and their descriptions. A call that fails throws with the engine's text. Depends on
// no test framework, because dsopt-replay and the programs of MPI have none.
#pragma once
#include "device.h"
#include "dsopt.h"
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace test {

/// Throws if a call failed. For calls that only prepare a test, and where assertions do not work; GoogleTest reports
/// the exception.
inline void must(dsopt_status status, const char *what = nullptr) {
    if (status != DSOPT_OK)
        throw std::runtime_error((what != nullptr ? std::string(what) + ": " : std::string()) +
                                 dsopt_status_name(status) + ": " + dsopt_last_error());
}

struct Release {
    void operator()(dsopt_context *context) const { dsopt_context_destroy(context); }
    void operator()(dsopt_optimizer *optimizer) const { dsopt_optimizer_destroy(optimizer); }
    void operator()(dsopt_scaler *scaler) const { dsopt_scaler_destroy(scaler); }
    void operator()(dsopt_comm *comm) const { dsopt_comm_destroy(comm); }
};
template <class T> using Handle = std::unique_ptr<T, Release>;
using Context = Handle<dsopt_context>;
using Optimizer = Handle<dsopt_optimizer>;
using Scaler = Handle<dsopt_scaler>;
using Comm = Handle<dsopt_comm>;

// ------------------------------------------------------------------------------------------------------------ contexts
/// The device under test; with DSOPT_CONTEXT_CHECK_POINTERS if it is CUDA.
dsopt_context_desc context_desc(int32_t threads = 1);
dsopt_context_desc context_desc(int32_t threads, int32_t backend, int32_t device = 0);
Context make_context(const dsopt_context_desc &desc = context_desc());
/// Values of DSOPT_ISA. If the processor lacks an instruction set, the engine uses the next lower one that it has.
inline constexpr const char *kAllIsas[] = {"generic", "avx2", "avx512", "avx512_bf16"};
/// Instruction sets whose bits are compared. Under the thread sanitizer two are enough, because threads are the same.
#if defined(__SANITIZE_THREAD__)
inline constexpr const char *kIsas[] = {"generic", "avx512"};
#else
inline constexpr const auto &kIsas = kAllIsas;
#endif
/// Sets DSOPT_ISA during its lifetime; the variable is read when a context is created.
struct Isa {
    explicit Isa(const char *name) { setenv("DSOPT_ISA", name, 1); }
    ~Isa() { unsetenv("DSOPT_ISA"); }
};
/// Creates a context with an instruction set, named as in DSOPT_ISA.
Context make_context(int32_t threads, const char *isa = nullptr);

// ---------------------------------------------------------------------------------------------------------- optimizers
dsopt_optimizer_desc optimizer_desc(double max_norm = 0, uint32_t flags = 0);
dsopt_optimizer_desc desc_with(const Comm &comm, int32_t compat = DSOPT_COMPAT_NONE, uint32_t flags = 0);
Optimizer make_optimizer(const Context &context, const dsopt_optimizer_desc &desc = optimizer_desc());
/// Returns a group with the engine's defaults except for these values.
dsopt_group make_group(int32_t algorithm, double weight_decay = 0.01, uint32_t flags = 0);
/// Returns a group with steps and decay that are large enough to be visible after a few calls.
dsopt_group group_of(int32_t algorithm, double lr = 1e-2, double weight_decay = 0.1);
dsopt_param param_of(const dsopt_tensor &tensor, const char *name = nullptr);
/// Returns the name for names of tests: "AdamW", "OneBitLamb".
std::string name_of(int32_t algorithm);

inline constexpr int32_t kAlgorithms[] = {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB,
                                          DSOPT_ALGORITHM_ADAM_LEGACY};
/// Includes the algorithms that have no compat mode.
inline constexpr int32_t kStandardRules[] = {
    DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW,   DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAM_LEGACY,
    DSOPT_ALGORITHM_SGD,  DSOPT_ALGORITHM_ADAGRAD, DSOPT_ALGORITHM_LION};
inline constexpr int32_t kElementWise[] = {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW,   DSOPT_ALGORITHM_ADAM_LEGACY,
                                           DSOPT_ALGORITHM_SGD,  DSOPT_ALGORITHM_ADAGRAD, DSOPT_ALGORITHM_LION};
inline constexpr int32_t kFamily[] = {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                      DSOPT_ALGORITHM_ONEBIT_LAMB};
inline constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};

// ------------------------------------------------------------------------------------------------------------- scalers
Scaler make_scaler(const Context &context, const dsopt_scaler_desc &desc);
/// Creates a dynamic scaler with the numbers that most tests need, or a static one with DSOPT_SCALER_STATIC.
Scaler make_scaler(const Context &context, double init, int window = 1000, uint32_t flags = 0);
dsopt_scaler_info info_of(const Scaler &scaler);

// --------------------------------------------------------------------------------------------------------------- comms
using CommId = std::array<char, 16>; // of a local comm
CommId new_id();
dsopt_comm_desc comm_desc(int32_t kind, const void *id, size_t id_bytes, int rank, int ranks, int timeout_ms = 60000);
dsopt_comm_desc local_desc(const CommId &id, int rank, int ranks, int timeout_ms = 60000);
Comm make_comm(const Context &context, const dsopt_comm_desc &desc);
Comm table_comm(const Context &context, const dsopt_comm_table &table, uint32_t flags = 0);
Comm local_comm(const Context &context, const CommId &id, int rank, int ranks, int timeout_ms = 60000);
Comm self_comm(const Context &context);
dsopt_comm_info info_of(const Comm &comm);

/// Runs body(rank) on one thread per rank. When all have ended, throws the concatenated texts of what the ranks threw.
void run_ranks(int ranks, const std::function<void(int rank)> &body);
/// Runs body(rank, context, comm) on one thread per rank, with a local comm.
void with_ranks(int ranks, const std::function<void(int rank, const Context &, const Comm &)> &body);

} // namespace test
