// SPDX-License-Identifier: Apache-2.0
// Written by scripts/generate/rust_sys.py from include/dsopt.json: change that.
//! Size and offset of every field, and every constant, as in dsopt.json. Tests of the header
//! compare that with C.
use dsopt_sys::*;
use std::mem::{size_of, size_of_val, MaybeUninit};
use std::ptr::addr_of;

/// Offset and size of a field. `offset_of!` came later than Rust 1.63.
macro_rules! field {
    ($kind:ty, $field:ident) => {{
        let whole = MaybeUninit::<$kind>::zeroed();
        let base = whole.as_ptr();
        // SAFETY: `base` points to a whole struct, for which zeros are a value: numbers and pointers that may be NULL.
        let (part, size) = unsafe { (addr_of!((*base).$field) as usize, size_of_val(&(*base).$field)) };
        (part - base as usize, size)
    }};
}

#[test]
fn abi_version_is_that_of_the_library() {
    // SAFETY: the function has no preconditions.
    assert_eq!(unsafe { dsopt_abi_version() }, DSOPT_ABI_VERSION);
}

#[test]
fn layout_of_tensor() {
    assert_eq!(size_of::<dsopt_tensor>(), 24);
    assert_eq!(field!(dsopt_tensor, data), (0, 8));
    assert_eq!(field!(dsopt_tensor, numel), (8, 8));
    assert_eq!(field!(dsopt_tensor, dtype), (16, 4));
    assert_eq!(field!(dsopt_tensor, reserved), (20, 4));
}

#[test]
fn layout_of_context_desc() {
    assert_eq!(size_of::<dsopt_context_desc>(), 80);
    assert_eq!(field!(dsopt_context_desc, size), (0, 8));
    assert_eq!(field!(dsopt_context_desc, backend), (8, 4));
    assert_eq!(field!(dsopt_context_desc, device), (12, 4));
    assert_eq!(field!(dsopt_context_desc, threads), (16, 4));
    assert_eq!(field!(dsopt_context_desc, log_level), (20, 4));
    assert_eq!(field!(dsopt_context_desc, allocate), (24, 8));
    assert_eq!(field!(dsopt_context_desc, release), (32, 8));
    assert_eq!(field!(dsopt_context_desc, parallel_for), (40, 8));
    assert_eq!(field!(dsopt_context_desc, log), (48, 8));
    assert_eq!(field!(dsopt_context_desc, user), (56, 8));
    assert_eq!(field!(dsopt_context_desc, chunk), (64, 8));
    assert_eq!(field!(dsopt_context_desc, flags), (72, 4));
    assert_eq!(field!(dsopt_context_desc, reserved), (76, 4));
}

#[test]
fn layout_of_group() {
    assert_eq!(size_of::<dsopt_group>(), 176);
    assert_eq!(field!(dsopt_group, size), (0, 8));
    assert_eq!(field!(dsopt_group, algorithm), (8, 4));
    assert_eq!(field!(dsopt_group, flags), (12, 4));
    assert_eq!(field!(dsopt_group, lr), (16, 8));
    assert_eq!(field!(dsopt_group, beta1), (24, 8));
    assert_eq!(field!(dsopt_group, beta2), (32, 8));
    assert_eq!(field!(dsopt_group, eps), (40, 8));
    assert_eq!(field!(dsopt_group, weight_decay), (48, 8));
    assert_eq!(field!(dsopt_group, max_norm), (56, 8));
    assert_eq!(field!(dsopt_group, min_trust), (64, 8));
    assert_eq!(field!(dsopt_group, max_trust), (72, 8));
    assert_eq!(field!(dsopt_group, freeze_step), (80, 8));
    assert_eq!(field!(dsopt_group, var_interval_steps), (88, 8));
    assert_eq!(field!(dsopt_group, local_interval_steps), (96, 8));
    assert_eq!(field!(dsopt_group, max_local_interval), (104, 8));
    assert_eq!(field!(dsopt_group, trust_beta), (112, 8));
    assert_eq!(field!(dsopt_group, trust_threshold), (120, 8));
    assert_eq!(field!(dsopt_group, trust_min_change), (128, 8));
    assert_eq!(field!(dsopt_group, trust_max_change), (136, 8));
    assert_eq!(field!(dsopt_group, momentum), (144, 8));
    assert_eq!(field!(dsopt_group, dampening), (152, 8));
    assert_eq!(field!(dsopt_group, lr_decay), (160, 8));
    assert_eq!(field!(dsopt_group, initial_accumulator_value), (168, 8));
}

#[test]
fn layout_of_param() {
    assert_eq!(size_of::<dsopt_param>(), 64);
    assert_eq!(field!(dsopt_param, tensor), (0, 24));
    assert_eq!(field!(dsopt_param, name), (24, 8));
    assert_eq!(field!(dsopt_param, dims), (32, 8));
    assert_eq!(field!(dsopt_param, ndim), (40, 4));
    assert_eq!(field!(dsopt_param, flags), (44, 4));
    assert_eq!(field!(dsopt_param, offset), (48, 8));
    assert_eq!(field!(dsopt_param, expert), (56, 4));
    assert_eq!(field!(dsopt_param, group), (60, 4));
}

#[test]
fn layout_of_optimizer_desc() {
    assert_eq!(size_of::<dsopt_optimizer_desc>(), 96);
    assert_eq!(field!(dsopt_optimizer_desc, size), (0, 8));
    assert_eq!(field!(dsopt_optimizer_desc, compat), (8, 4));
    assert_eq!(field!(dsopt_optimizer_desc, flags), (12, 4));
    assert_eq!(field!(dsopt_optimizer_desc, nonfinite), (16, 4));
    assert_eq!(field!(dsopt_optimizer_desc, masters), (20, 4));
    assert_eq!(field!(dsopt_optimizer_desc, max_norm), (24, 8));
    assert_eq!(field!(dsopt_optimizer_desc, max_value), (32, 8));
    assert_eq!(field!(dsopt_optimizer_desc, scaler), (40, 8));
    assert_eq!(field!(dsopt_optimizer_desc, data), (48, 8));
    assert_eq!(field!(dsopt_optimizer_desc, model), (56, 8));
    assert_eq!(field!(dsopt_optimizer_desc, experts), (64, 8));
    assert_eq!(field!(dsopt_optimizer_desc, expert_count), (72, 4));
    assert_eq!(field!(dsopt_optimizer_desc, skip_budget), (76, 4));
    assert_eq!(field!(dsopt_optimizer_desc, seed), (80, 8));
    assert_eq!(field!(dsopt_optimizer_desc, node), (88, 8));
}

#[test]
fn layout_of_state_info() {
    assert_eq!(size_of::<dsopt_state_info>(), 72);
    assert_eq!(field!(dsopt_state_info, size), (0, 8));
    assert_eq!(field!(dsopt_state_info, name), (8, 8));
    assert_eq!(field!(dsopt_state_info, param), (16, 8));
    assert_eq!(field!(dsopt_state_info, tensor), (24, 24));
    assert_eq!(field!(dsopt_state_info, dims), (48, 8));
    assert_eq!(field!(dsopt_state_info, ndim), (56, 4));
    assert_eq!(field!(dsopt_state_info, flags), (60, 4));
    assert_eq!(field!(dsopt_state_info, generation), (64, 8));
}

#[test]
fn layout_of_step() {
    assert_eq!(size_of::<dsopt_step>(), 152);
    assert_eq!(field!(dsopt_step, size), (0, 8));
    assert_eq!(field!(dsopt_step, grads), (8, 8));
    assert_eq!(field!(dsopt_step, count), (16, 8));
    assert_eq!(field!(dsopt_step, params), (24, 8));
    assert_eq!(field!(dsopt_step, out), (32, 8));
    assert_eq!(field!(dsopt_step, state), (40, 8));
    assert_eq!(field!(dsopt_step, state_count), (48, 8));
    assert_eq!(field!(dsopt_step, lr), (56, 8));
    assert_eq!(field!(dsopt_step, grad_scale), (64, 8));
    assert_eq!(field!(dsopt_step, skip), (72, 8));
    assert_eq!(field!(dsopt_step, grad_norms), (80, 8));
    assert_eq!(field!(dsopt_step, report), (88, 8));
    assert_eq!(field!(dsopt_step, workspace), (96, 8));
    assert_eq!(field!(dsopt_step, workspace_bytes), (104, 8));
    assert_eq!(field!(dsopt_step, stream), (112, 8));
    assert_eq!(field!(dsopt_step, parallel_for), (120, 8));
    assert_eq!(field!(dsopt_step, parallel_user), (128, 8));
    assert_eq!(field!(dsopt_step, flags), (136, 4));
    assert_eq!(field!(dsopt_step, reserved), (140, 4));
    assert_eq!(field!(dsopt_step, hyper), (144, 8));
}

#[test]
fn layout_of_schedule_info() {
    assert_eq!(size_of::<dsopt_schedule_info>(), 40);
    assert_eq!(field!(dsopt_schedule_info, size), (0, 8));
    assert_eq!(field!(dsopt_schedule_info, step), (8, 4));
    assert_eq!(field!(dsopt_schedule_info, frozen), (12, 4));
    assert_eq!(field!(dsopt_schedule_info, var_interval), (16, 4));
    assert_eq!(field!(dsopt_schedule_info, var_counter), (20, 4));
    assert_eq!(field!(dsopt_schedule_info, local_interval), (24, 4));
    assert_eq!(field!(dsopt_schedule_info, local_counter), (28, 4));
    assert_eq!(field!(dsopt_schedule_info, momentum_in_bits), (32, 4));
    assert_eq!(field!(dsopt_schedule_info, reduction), (36, 4));
}

#[test]
fn layout_of_report() {
    assert_eq!(size_of::<dsopt_report>(), 216);
    assert_eq!(field!(dsopt_report, size), (0, 8));
    assert_eq!(field!(dsopt_report, calls), (8, 8));
    assert_eq!(field!(dsopt_report, skipped), (16, 8));
    assert_eq!(field!(dsopt_report, skipped_in_row), (24, 8));
    assert_eq!(field!(dsopt_report, nonfinite), (32, 8));
    assert_eq!(field!(dsopt_report, first_bad), (40, 8));
    assert_eq!(field!(dsopt_report, first_bad_name), (48, 8));
    assert_eq!(field!(dsopt_report, last_skipped), (56, 4));
    assert_eq!(field!(dsopt_report, kind), (60, 4));
    assert_eq!(field!(dsopt_report, loss_scale), (64, 8));
    assert_eq!(field!(dsopt_report, scale_used), (72, 8));
    assert_eq!(field!(dsopt_report, grad_norm), (80, 8));
    assert_eq!(field!(dsopt_report, weight_norm), (88, 8));
    assert_eq!(field!(dsopt_report, update_norm), (96, 8));
    assert_eq!(field!(dsopt_report, dense_norm), (104, 8));
    assert_eq!(field!(dsopt_report, expert_norm), (112, 8));
    assert_eq!(field!(dsopt_report, divisor), (120, 8));
    assert_eq!(field!(dsopt_report, ms), (128, 64));
    assert_eq!(field!(dsopt_report, state_bytes), (192, 8));
    assert_eq!(field!(dsopt_report, workspace_bytes), (200, 8));
    assert_eq!(field!(dsopt_report, resharded_from), (208, 4));
    assert_eq!(field!(dsopt_report, reasons), (212, 4));
}

#[test]
fn layout_of_io() {
    assert_eq!(size_of::<dsopt_io>(), 80);
    assert_eq!(field!(dsopt_io, size), (0, 8));
    assert_eq!(field!(dsopt_io, flags), (8, 4));
    assert_eq!(field!(dsopt_io, reserved), (12, 4));
    assert_eq!(field!(dsopt_io, user), (16, 8));
    assert_eq!(field!(dsopt_io, write), (24, 8));
    assert_eq!(field!(dsopt_io, read), (32, 8));
    assert_eq!(field!(dsopt_io, total), (40, 8));
    assert_eq!(field!(dsopt_io, files), (48, 4));
    assert_eq!(field!(dsopt_io, reserved2), (52, 4));
    assert_eq!(field!(dsopt_io, paths), (56, 8));
    assert_eq!(field!(dsopt_io, users), (64, 8));
    assert_eq!(field!(dsopt_io, totals), (72, 8));
}

#[test]
fn layout_of_scaler_desc() {
    assert_eq!(size_of::<dsopt_scaler_desc>(), 56);
    assert_eq!(field!(dsopt_scaler_desc, size), (0, 8));
    assert_eq!(field!(dsopt_scaler_desc, profile), (8, 4));
    assert_eq!(field!(dsopt_scaler_desc, flags), (12, 4));
    assert_eq!(field!(dsopt_scaler_desc, init), (16, 8));
    assert_eq!(field!(dsopt_scaler_desc, factor), (24, 8));
    assert_eq!(field!(dsopt_scaler_desc, min), (32, 8));
    assert_eq!(field!(dsopt_scaler_desc, max), (40, 8));
    assert_eq!(field!(dsopt_scaler_desc, window), (48, 4));
    assert_eq!(field!(dsopt_scaler_desc, hysteresis), (52, 4));
}

#[test]
fn layout_of_scaler_info() {
    assert_eq!(size_of::<dsopt_scaler_info>(), 56);
    assert_eq!(field!(dsopt_scaler_info, size), (0, 8));
    assert_eq!(field!(dsopt_scaler_info, scale), (8, 8));
    assert_eq!(field!(dsopt_scaler_info, dynamic), (16, 8));
    assert_eq!(field!(dsopt_scaler_info, updates), (24, 8));
    assert_eq!(field!(dsopt_scaler_info, last_overflow), (32, 8));
    assert_eq!(field!(dsopt_scaler_info, hysteresis), (40, 4));
    assert_eq!(field!(dsopt_scaler_info, overridden), (44, 4));
    assert_eq!(field!(dsopt_scaler_info, failures), (48, 4));
    assert_eq!(field!(dsopt_scaler_info, skipped_in_row), (52, 4));
}

#[test]
fn layout_of_comm_table() {
    assert_eq!(size_of::<dsopt_comm_table>(), 80);
    assert_eq!(field!(dsopt_comm_table, size), (0, 8));
    assert_eq!(field!(dsopt_comm_table, self_), (8, 8));
    assert_eq!(field!(dsopt_comm_table, rank), (16, 4));
    assert_eq!(field!(dsopt_comm_table, ranks), (20, 4));
    assert_eq!(field!(dsopt_comm_table, all_reduce), (24, 8));
    assert_eq!(field!(dsopt_comm_table, all_to_all), (32, 8));
    assert_eq!(field!(dsopt_comm_table, all_gather), (40, 8));
    assert_eq!(field!(dsopt_comm_table, error), (48, 8));
    assert_eq!(field!(dsopt_comm_table, abort), (56, 8));
    assert_eq!(field!(dsopt_comm_table, destroy), (64, 8));
    assert_eq!(field!(dsopt_comm_table, memory), (72, 4));
    assert_eq!(field!(dsopt_comm_table, reserved), (76, 4));
}

#[test]
fn layout_of_comm_desc() {
    assert_eq!(size_of::<dsopt_comm_desc>(), 64);
    assert_eq!(field!(dsopt_comm_desc, size), (0, 8));
    assert_eq!(field!(dsopt_comm_desc, kind), (8, 4));
    assert_eq!(field!(dsopt_comm_desc, rank), (12, 4));
    assert_eq!(field!(dsopt_comm_desc, ranks), (16, 4));
    assert_eq!(field!(dsopt_comm_desc, timeout_ms), (20, 4));
    assert_eq!(field!(dsopt_comm_desc, id), (24, 8));
    assert_eq!(field!(dsopt_comm_desc, id_bytes), (32, 8));
    assert_eq!(field!(dsopt_comm_desc, table), (40, 8));
    assert_eq!(field!(dsopt_comm_desc, native), (48, 8));
    assert_eq!(field!(dsopt_comm_desc, flags), (56, 4));
    assert_eq!(field!(dsopt_comm_desc, reserved), (60, 4));
}

#[test]
fn layout_of_comm_info() {
    assert_eq!(size_of::<dsopt_comm_info>(), 240);
    assert_eq!(field!(dsopt_comm_info, size), (0, 8));
    assert_eq!(field!(dsopt_comm_info, rank), (8, 4));
    assert_eq!(field!(dsopt_comm_info, ranks), (12, 4));
    assert_eq!(field!(dsopt_comm_info, status), (16, 4));
    assert_eq!(field!(dsopt_comm_info, reserved), (20, 4));
    assert_eq!(field!(dsopt_comm_info, calls), (24, 8));
    assert_eq!(field!(dsopt_comm_info, bytes_sent), (32, 8));
    assert_eq!(field!(dsopt_comm_info, bytes_received), (40, 8));
    assert_eq!(field!(dsopt_comm_info, calls_of), (48, 64));
    assert_eq!(field!(dsopt_comm_info, sent_of), (112, 64));
    assert_eq!(field!(dsopt_comm_info, received_of), (176, 64));
}

#[test]
fn layout_of_norm_result() {
    assert_eq!(size_of::<dsopt_norm_result>(), 32);
    assert_eq!(field!(dsopt_norm_result, norm), (0, 8));
    assert_eq!(field!(dsopt_norm_result, coefficient), (8, 4));
    assert_eq!(field!(dsopt_norm_result, reserved), (12, 4));
    assert_eq!(field!(dsopt_norm_result, nonfinite), (16, 8));
    assert_eq!(field!(dsopt_norm_result, first_bad), (24, 8));
}

#[test]
fn layout_of_compressed() {
    assert_eq!(size_of::<dsopt_compressed>(), 80);
    assert_eq!(field!(dsopt_compressed, size), (0, 8));
    assert_eq!(field!(dsopt_compressed, tensors), (8, 8));
    assert_eq!(field!(dsopt_compressed, count), (16, 8));
    assert_eq!(field!(dsopt_compressed, worker_error), (24, 8));
    assert_eq!(field!(dsopt_compressed, server_error), (32, 8));
    assert_eq!(field!(dsopt_compressed, workspace), (40, 8));
    assert_eq!(field!(dsopt_compressed, workspace_bytes), (48, 8));
    assert_eq!(field!(dsopt_compressed, stream), (56, 8));
    assert_eq!(field!(dsopt_compressed, compat), (64, 4));
    assert_eq!(field!(dsopt_compressed, reserved), (68, 4));
    assert_eq!(field!(dsopt_compressed, node), (72, 8));
}

#[test]
fn constants() {
    assert_eq!(DSOPT_VERSION_MAJOR, 0);
    assert_eq!(DSOPT_VERSION_MINOR, 2);
    assert_eq!(DSOPT_VERSION_PATCH, 0);
    assert_eq!(DSOPT_ABI_VERSION, 1);
    assert_eq!(DSOPT_OK, 0);
    assert_eq!(DSOPT_ERR_ARGUMENT, 10);
    assert_eq!(DSOPT_ERR_SHAPE, 11);
    assert_eq!(DSOPT_ERR_DTYPE, 12);
    assert_eq!(DSOPT_ERR_ALIGNMENT, 13);
    assert_eq!(DSOPT_ERR_OVERLAP, 14);
    assert_eq!(DSOPT_ERR_DEVICE, 15);
    assert_eq!(DSOPT_ERR_WORKSPACE, 16);
    assert_eq!(DSOPT_ERR_VERSION, 17);
    assert_eq!(DSOPT_ERR_UNSUPPORTED, 18);
    assert_eq!(DSOPT_ERR_STATE, 19);
    assert_eq!(DSOPT_ERR_BUSY, 20);
    assert_eq!(DSOPT_ERR_FORKED, 21);
    assert_eq!(DSOPT_ERR_SKIPS, 22);
    assert_eq!(DSOPT_ERR_HOOK, 23);
    assert_eq!(DSOPT_ERR_NOMEM, 30);
    assert_eq!(DSOPT_ERR_MISSING, 31);
    assert_eq!(DSOPT_ERR_IO, 32);
    assert_eq!(DSOPT_ERR_INTERNAL, 33);
    assert_eq!(DSOPT_ERR_BACKEND, 34);
    assert_eq!(DSOPT_ERR_COMM, 50);
    assert_eq!(DSOPT_ERR_TIMEOUT, 51);
    assert_eq!(DSOPT_ERR_ABORTED, 52);
    assert_eq!(DSOPT_ERR_FORMAT, 70);
    assert_eq!(DSOPT_ERR_CHECKSUM, 71);
    assert_eq!(DSOPT_ERR_MISMATCH, 72);
    assert_eq!(DSOPT_DTYPE_F32, 1);
    assert_eq!(DSOPT_DTYPE_F16, 2);
    assert_eq!(DSOPT_DTYPE_BF16, 3);
    assert_eq!(DSOPT_DTYPE_I32, 4);
    assert_eq!(DSOPT_DTYPE_F64, 5);
    assert_eq!(DSOPT_BACKEND_CPU, 0);
    assert_eq!(DSOPT_BACKEND_CUDA, 1);
    assert_eq!(DSOPT_LOG_ERROR, 1);
    assert_eq!(DSOPT_LOG_WARN, 2);
    assert_eq!(DSOPT_LOG_INFO, 3);
    assert_eq!(DSOPT_LOG_TRACE, 4);
    assert_eq!(DSOPT_CONTEXT_CHECK_POINTERS, 1);
    assert_eq!(DSOPT_ALGORITHM_ADAM, 2);
    assert_eq!(DSOPT_ALGORITHM_ADAMW, 3);
    assert_eq!(DSOPT_ALGORITHM_LAMB, 4);
    assert_eq!(DSOPT_ALGORITHM_ADAM_LEGACY, 7);
    assert_eq!(DSOPT_ALGORITHM_SGD, 8);
    assert_eq!(DSOPT_ALGORITHM_ADAGRAD, 9);
    assert_eq!(DSOPT_ALGORITHM_LION, 10);
    assert_eq!(DSOPT_ALGORITHM_ONEBIT_ADAM, 16);
    assert_eq!(DSOPT_ALGORITHM_ZERO_ONE_ADAM, 17);
    assert_eq!(DSOPT_ALGORITHM_ONEBIT_LAMB, 18);
    assert_eq!(DSOPT_GROUP_NO_BIAS_CORRECTION, 1);
    assert_eq!(DSOPT_GROUP_EPS_INSIDE_SQRT, 2);
    assert_eq!(DSOPT_GROUP_EPS_UNCORRECTED, 4);
    assert_eq!(DSOPT_GROUP_NON_FREEZE, 16);
    assert_eq!(DSOPT_GROUP_NESTEROV, 32);
    assert_eq!(DSOPT_PARAM_MODEL_PARALLEL, 1);
    assert_eq!(DSOPT_PARAM_REPLICATED, 2);
    assert_eq!(DSOPT_PARAM_MASKED, 4);
    assert_eq!(DSOPT_COMPAT_NONE, 0);
    assert_eq!(DSOPT_COMPAT_DEEPSPEED, 1);
    assert_eq!(DSOPT_NONFINITE_AUTO, 0);
    assert_eq!(DSOPT_NONFINITE_SKIP, 1);
    assert_eq!(DSOPT_NONFINITE_APPLY, 2);
    assert_eq!(DSOPT_OPTIMIZER_NO_MASTER, 1);
    assert_eq!(DSOPT_OPTIMIZER_REPORT_NORMS, 2);
    assert_eq!(DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING, 4);
    assert_eq!(DSOPT_OPTIMIZER_ACCUMULATE, 8);
    assert_eq!(DSOPT_OPTIMIZER_TIMING, 16);
    assert_eq!(DSOPT_OPTIMIZER_AVERAGES, 32);
    assert_eq!(DSOPT_OPTIMIZER_CHECK_RANKS, 64);
    assert_eq!(DSOPT_OPTIMIZER_MOMENTUM_BITS, 128);
    assert_eq!(DSOPT_MASTERS_PER_TENSOR, 0);
    assert_eq!(DSOPT_MASTERS_FLAT, 1);
    assert_eq!(DSOPT_ALL_GROUPS, -1);
    assert_eq!(DSOPT_KEY_LR, 1);
    assert_eq!(DSOPT_KEY_BETA1, 2);
    assert_eq!(DSOPT_KEY_BETA2, 3);
    assert_eq!(DSOPT_KEY_EPS, 4);
    assert_eq!(DSOPT_KEY_WEIGHT_DECAY, 5);
    assert_eq!(DSOPT_KEY_GROUP_MAX_NORM, 6);
    assert_eq!(DSOPT_KEY_MIN_TRUST, 7);
    assert_eq!(DSOPT_KEY_MAX_TRUST, 8);
    assert_eq!(DSOPT_KEY_BIAS_CORRECTION, 9);
    assert_eq!(DSOPT_KEY_EPS_INSIDE_SQRT, 10);
    assert_eq!(DSOPT_KEY_ALGORITHM, 11);
    assert_eq!(DSOPT_KEY_FREEZE_STEP, 12);
    assert_eq!(DSOPT_KEY_EPS_UNCORRECTED, 13);
    assert_eq!(DSOPT_KEY_MOMENTUM, 14);
    assert_eq!(DSOPT_KEY_DAMPENING, 15);
    assert_eq!(DSOPT_KEY_NESTEROV, 16);
    assert_eq!(DSOPT_KEY_LR_DECAY, 17);
    assert_eq!(DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE, 18);
    assert_eq!(DSOPT_KEY_MAX_NORM, 32);
    assert_eq!(DSOPT_KEY_CALLS, 33);
    assert_eq!(DSOPT_KEY_MAX_VALUE, 34);
    assert_eq!(DSOPT_KEY_SKIP_BUDGET, 35);
    assert_eq!(DSOPT_STATE_FROM_PARAM, 1);
    assert_eq!(DSOPT_STATE_RANK_LOCAL, 2);
    assert_eq!(DSOPT_BIND_PARAMS, 1);
    assert_eq!(DSOPT_BIND_STATE, 2);
    assert_eq!(DSOPT_RESET_MASTERS, 1);
    assert_eq!(DSOPT_RESET_MOMENTS, 2);
    assert_eq!(DSOPT_RESET_COUNTERS, 4);
    assert_eq!(DSOPT_RESET_GRADS, 8);
    assert_eq!(DSOPT_RESET_ERRORS, 16);
    assert_eq!(DSOPT_STEP_ZERO_GRADS, 1);
    assert_eq!(DSOPT_STEP_OUT_ONLY, 2);
    assert_eq!(DSOPT_STEP_DELTA, 4);
    assert_eq!(DSOPT_STEP_ACCUMULATED, 8);
    assert_eq!(DSOPT_STEP_NO_NAN, 16);
    assert_eq!(DSOPT_REPORT_SKIPPED, 0);
    assert_eq!(DSOPT_REPORT_GRAD_NORM, 1);
    assert_eq!(DSOPT_REPORT_WEIGHT_NORM, 2);
    assert_eq!(DSOPT_REPORT_UPDATE_NORM, 3);
    assert_eq!(DSOPT_REPORT_NONFINITE, 4);
    assert_eq!(DSOPT_REPORT_FIRST_BAD, 5);
    assert_eq!(DSOPT_REPORT_DIVISOR, 6);
    assert_eq!(DSOPT_REPORT_SCALE_USED, 7);
    assert_eq!(DSOPT_REPORT_SCALE_NEXT, 8);
    assert_eq!(DSOPT_REPORT_EXPERT_NORM, 9);
    assert_eq!(DSOPT_REPORT_SKIPPED_IN_ROW, 10);
    assert_eq!(DSOPT_REPORT_REASONS, 11);
    assert_eq!(DSOPT_REPORT_FLOATS, 16);
    assert_eq!(DSOPT_SKIP_GRADIENTS, 1);
    assert_eq!(DSOPT_SKIP_NORM, 2);
    assert_eq!(DSOPT_SKIP_SCALE, 4);
    assert_eq!(DSOPT_SKIP_HYPER, 8);
    assert_eq!(DSOPT_SKIP_CALLER, 16);
    assert_eq!(DSOPT_SKIP_PEER, 32);
    assert_eq!(DSOPT_HYPER_LR, 0);
    assert_eq!(DSOPT_HYPER_BETA1, 1);
    assert_eq!(DSOPT_HYPER_BETA2, 2);
    assert_eq!(DSOPT_HYPER_EPS, 3);
    assert_eq!(DSOPT_HYPER_WEIGHT_DECAY, 4);
    assert_eq!(DSOPT_HYPER_GROUP_MAX_NORM, 5);
    assert_eq!(DSOPT_HYPER_MAX_NORM, 6);
    assert_eq!(DSOPT_HYPER_MOMENTUM, 7);
    assert_eq!(DSOPT_HYPER_FLOATS, 16);
    assert_eq!(DSOPT_REDUCTION_FULL, 1);
    assert_eq!(DSOPT_REDUCTION_COMPRESSED, 2);
    assert_eq!(DSOPT_REDUCTION_LOCAL, 3);
    assert_eq!(DSOPT_MS_OVERFLOW_CHECK, 0);
    assert_eq!(DSOPT_MS_COMPUTE_NORM, 1);
    assert_eq!(DSOPT_MS_UNSCALE_AND_CLIP, 2);
    assert_eq!(DSOPT_MS_BASIC_STEP, 3);
    assert_eq!(DSOPT_MS_COMPRESS, 4);
    assert_eq!(DSOPT_MS_EXCHANGE, 5);
    assert_eq!(DSOPT_MS_DECOMPRESS, 6);
    assert_eq!(DSOPT_MS_PHASES, 8);
    assert_eq!(DSOPT_FOUND_NOTHING, 0);
    assert_eq!(DSOPT_FOUND_INF, 1);
    assert_eq!(DSOPT_FOUND_NAN, 2);
    assert_eq!(DSOPT_IO_NO_STATE, 1);
    assert_eq!(DSOPT_IO_NO_MASTERS, 2);
    assert_eq!(DSOPT_IO_NO_HYPER, 4);
    assert_eq!(DSOPT_IO_PARAMS, 8);
    assert_eq!(DSOPT_IO_NO_SCALER, 16);
    assert_eq!(DSOPT_IO_RESET_ERRORS, 32);
    assert_eq!(DSOPT_PROFILE_DEFAULT, 0);
    assert_eq!(DSOPT_PROFILE_FUSED, 1);
    assert_eq!(DSOPT_PROFILE_UNFUSED, 2);
    assert_eq!(DSOPT_PROFILE_DYNAMIC, 3);
    assert_eq!(DSOPT_SCALER_STATIC, 1);
    assert_eq!(DSOPT_SCALER_REFILL, 2);
    assert_eq!(DSOPT_SCALER_FAIL_AT_MIN, 4);
    assert_eq!(DSOPT_SCALER_KEEP_AT_MIN, 8);
    assert_eq!(DSOPT_SCALER_SHARED, 16);
    assert_eq!(DSOPT_SCALER_GROWTH_AT_WINDOW, 32);
    assert_eq!(DSOPT_SCALE_VALUE, 0);
    assert_eq!(DSOPT_SCALE_OVERRIDE, 1);
    assert_eq!(DSOPT_SCALE_CLEAR_OVERRIDE, 2);
    assert_eq!(DSOPT_COMM_KIND_SELF, 0);
    assert_eq!(DSOPT_COMM_KIND_LOCAL, 1);
    assert_eq!(DSOPT_COMM_KIND_NCCL, 2);
    assert_eq!(DSOPT_COMM_KIND_HCCL, 3);
    assert_eq!(DSOPT_COMM_KIND_TABLE, 4);
    assert_eq!(DSOPT_COMM_FLAG_ENQUEUE, 1);
    assert_eq!(DSOPT_COMM_FLAG_SYNCHRONIZE, 2);
    assert_eq!(DSOPT_OP_SUM, 0);
    assert_eq!(DSOPT_OP_MAX, 1);
    assert_eq!(DSOPT_OP_MEAN, 2);
    assert_eq!(DSOPT_MEMORY_HOST, 0);
    assert_eq!(DSOPT_MEMORY_BACKEND, 1);
    assert_eq!(DSOPT_COLLECTIVE_ALL_REDUCE, 0);
    assert_eq!(DSOPT_COLLECTIVE_ALL_TO_ALL, 1);
    assert_eq!(DSOPT_COLLECTIVE_ALL_GATHER, 2);
    assert_eq!(DSOPT_COLLECTIVE_SLOTS, 8);
    assert_eq!(DSOPT_ZERO_FILL, 0);
    assert_eq!(DSOPT_ZERO_NONE, 1);
    assert_eq!(DSOPT_NORM_L2, 0);
    assert_eq!(DSOPT_NORM_MAX, 1);
}
