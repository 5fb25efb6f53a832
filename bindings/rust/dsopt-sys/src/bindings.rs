// SPDX-License-Identifier: Apache-2.0
// Written by scripts/generate/rust_sys.py from include/dsopt.json: change that.
use std::os::raw::{c_char, c_int, c_void};

pub const DSOPT_VERSION_MAJOR: i32 = 0;
pub const DSOPT_VERSION_MINOR: i32 = 2;
pub const DSOPT_VERSION_PATCH: i32 = 0;
pub const DSOPT_ABI_VERSION: i32 = 1;

// enum dsopt_status_code
pub const DSOPT_OK: i32 = 0;
pub const DSOPT_ERR_ARGUMENT: i32 = 10;
pub const DSOPT_ERR_SHAPE: i32 = 11;
pub const DSOPT_ERR_DTYPE: i32 = 12;
pub const DSOPT_ERR_ALIGNMENT: i32 = 13;
pub const DSOPT_ERR_OVERLAP: i32 = 14;
pub const DSOPT_ERR_DEVICE: i32 = 15;
pub const DSOPT_ERR_WORKSPACE: i32 = 16;
pub const DSOPT_ERR_VERSION: i32 = 17;
pub const DSOPT_ERR_UNSUPPORTED: i32 = 18;
pub const DSOPT_ERR_STATE: i32 = 19;
pub const DSOPT_ERR_BUSY: i32 = 20;
pub const DSOPT_ERR_FORKED: i32 = 21;
pub const DSOPT_ERR_SKIPS: i32 = 22;
pub const DSOPT_ERR_HOOK: i32 = 23;
pub const DSOPT_ERR_NOMEM: i32 = 30;
pub const DSOPT_ERR_MISSING: i32 = 31;
pub const DSOPT_ERR_IO: i32 = 32;
pub const DSOPT_ERR_INTERNAL: i32 = 33;
pub const DSOPT_ERR_BACKEND: i32 = 34;
pub const DSOPT_ERR_COMM: i32 = 50;
pub const DSOPT_ERR_TIMEOUT: i32 = 51;
pub const DSOPT_ERR_ABORTED: i32 = 52;
pub const DSOPT_ERR_FORMAT: i32 = 70;
pub const DSOPT_ERR_CHECKSUM: i32 = 71;
pub const DSOPT_ERR_MISMATCH: i32 = 72;

// enum dsopt_dtype
pub const DSOPT_DTYPE_F32: i32 = 1;
pub const DSOPT_DTYPE_F16: i32 = 2;
pub const DSOPT_DTYPE_BF16: i32 = 3;
pub const DSOPT_DTYPE_I32: i32 = 4;
pub const DSOPT_DTYPE_F64: i32 = 5;

// enum dsopt_backend
pub const DSOPT_BACKEND_CPU: i32 = 0;
pub const DSOPT_BACKEND_CUDA: i32 = 1;

// enum dsopt_log_level
pub const DSOPT_LOG_ERROR: i32 = 1;
pub const DSOPT_LOG_WARN: i32 = 2;
pub const DSOPT_LOG_INFO: i32 = 3;
pub const DSOPT_LOG_TRACE: i32 = 4;

// enum dsopt_context_flags
pub const DSOPT_CONTEXT_CHECK_POINTERS: i32 = 1;

// enum dsopt_algorithm
pub const DSOPT_ALGORITHM_ADAM: i32 = 2;
pub const DSOPT_ALGORITHM_ADAMW: i32 = 3;
pub const DSOPT_ALGORITHM_LAMB: i32 = 4;
pub const DSOPT_ALGORITHM_ADAM_LEGACY: i32 = 7;
pub const DSOPT_ALGORITHM_SGD: i32 = 8;
pub const DSOPT_ALGORITHM_ADAGRAD: i32 = 9;
pub const DSOPT_ALGORITHM_LION: i32 = 10;
pub const DSOPT_ALGORITHM_ONEBIT_ADAM: i32 = 16;
pub const DSOPT_ALGORITHM_ZERO_ONE_ADAM: i32 = 17;
pub const DSOPT_ALGORITHM_ONEBIT_LAMB: i32 = 18;

// enum dsopt_group_flags
pub const DSOPT_GROUP_NO_BIAS_CORRECTION: i32 = 1;
pub const DSOPT_GROUP_EPS_INSIDE_SQRT: i32 = 2;
pub const DSOPT_GROUP_EPS_UNCORRECTED: i32 = 4;
pub const DSOPT_GROUP_NON_FREEZE: i32 = 16;
pub const DSOPT_GROUP_NESTEROV: i32 = 32;

// enum dsopt_param_flags
pub const DSOPT_PARAM_MODEL_PARALLEL: i32 = 1;
pub const DSOPT_PARAM_REPLICATED: i32 = 2;
pub const DSOPT_PARAM_MASKED: i32 = 4;

// enum dsopt_compat
pub const DSOPT_COMPAT_NONE: i32 = 0;
pub const DSOPT_COMPAT_DEEPSPEED: i32 = 1;

// enum dsopt_nonfinite
pub const DSOPT_NONFINITE_AUTO: i32 = 0;
pub const DSOPT_NONFINITE_SKIP: i32 = 1;
pub const DSOPT_NONFINITE_APPLY: i32 = 2;

// enum dsopt_optimizer_flags
pub const DSOPT_OPTIMIZER_NO_MASTER: i32 = 1;
pub const DSOPT_OPTIMIZER_REPORT_NORMS: i32 = 2;
pub const DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING: i32 = 4;
pub const DSOPT_OPTIMIZER_ACCUMULATE: i32 = 8;
pub const DSOPT_OPTIMIZER_TIMING: i32 = 16;
pub const DSOPT_OPTIMIZER_AVERAGES: i32 = 32;
pub const DSOPT_OPTIMIZER_CHECK_RANKS: i32 = 64;
pub const DSOPT_OPTIMIZER_MOMENTUM_BITS: i32 = 128;

// enum dsopt_masters
pub const DSOPT_MASTERS_PER_TENSOR: i32 = 0;
pub const DSOPT_MASTERS_FLAT: i32 = 1;

// enum dsopt_group_index
pub const DSOPT_ALL_GROUPS: i32 = -1;

// enum dsopt_key
pub const DSOPT_KEY_LR: i32 = 1;
pub const DSOPT_KEY_BETA1: i32 = 2;
pub const DSOPT_KEY_BETA2: i32 = 3;
pub const DSOPT_KEY_EPS: i32 = 4;
pub const DSOPT_KEY_WEIGHT_DECAY: i32 = 5;
pub const DSOPT_KEY_GROUP_MAX_NORM: i32 = 6;
pub const DSOPT_KEY_MIN_TRUST: i32 = 7;
pub const DSOPT_KEY_MAX_TRUST: i32 = 8;
pub const DSOPT_KEY_BIAS_CORRECTION: i32 = 9;
pub const DSOPT_KEY_EPS_INSIDE_SQRT: i32 = 10;
pub const DSOPT_KEY_ALGORITHM: i32 = 11;
pub const DSOPT_KEY_FREEZE_STEP: i32 = 12;
pub const DSOPT_KEY_EPS_UNCORRECTED: i32 = 13;
pub const DSOPT_KEY_MOMENTUM: i32 = 14;
pub const DSOPT_KEY_DAMPENING: i32 = 15;
pub const DSOPT_KEY_NESTEROV: i32 = 16;
pub const DSOPT_KEY_LR_DECAY: i32 = 17;
pub const DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE: i32 = 18;
pub const DSOPT_KEY_MAX_NORM: i32 = 32;
pub const DSOPT_KEY_CALLS: i32 = 33;
pub const DSOPT_KEY_MAX_VALUE: i32 = 34;
pub const DSOPT_KEY_SKIP_BUDGET: i32 = 35;

// enum dsopt_state_flags
pub const DSOPT_STATE_FROM_PARAM: i32 = 1;
pub const DSOPT_STATE_RANK_LOCAL: i32 = 2;

// enum dsopt_bind
pub const DSOPT_BIND_PARAMS: i32 = 1;
pub const DSOPT_BIND_STATE: i32 = 2;

// enum dsopt_reset
pub const DSOPT_RESET_MASTERS: i32 = 1;
pub const DSOPT_RESET_MOMENTS: i32 = 2;
pub const DSOPT_RESET_COUNTERS: i32 = 4;
pub const DSOPT_RESET_GRADS: i32 = 8;
pub const DSOPT_RESET_ERRORS: i32 = 16;

// enum dsopt_step_flags
pub const DSOPT_STEP_ZERO_GRADS: i32 = 1;
pub const DSOPT_STEP_OUT_ONLY: i32 = 2;
pub const DSOPT_STEP_DELTA: i32 = 4;
pub const DSOPT_STEP_ACCUMULATED: i32 = 8;
pub const DSOPT_STEP_NO_NAN: i32 = 16;

// enum dsopt_report_place
pub const DSOPT_REPORT_SKIPPED: i32 = 0;
pub const DSOPT_REPORT_GRAD_NORM: i32 = 1;
pub const DSOPT_REPORT_WEIGHT_NORM: i32 = 2;
pub const DSOPT_REPORT_UPDATE_NORM: i32 = 3;
pub const DSOPT_REPORT_NONFINITE: i32 = 4;
pub const DSOPT_REPORT_FIRST_BAD: i32 = 5;
pub const DSOPT_REPORT_DIVISOR: i32 = 6;
pub const DSOPT_REPORT_SCALE_USED: i32 = 7;
pub const DSOPT_REPORT_SCALE_NEXT: i32 = 8;
pub const DSOPT_REPORT_EXPERT_NORM: i32 = 9;
pub const DSOPT_REPORT_SKIPPED_IN_ROW: i32 = 10;
pub const DSOPT_REPORT_REASONS: i32 = 11;
pub const DSOPT_REPORT_FLOATS: i32 = 16;

// enum dsopt_skip
pub const DSOPT_SKIP_GRADIENTS: i32 = 1;
pub const DSOPT_SKIP_NORM: i32 = 2;
pub const DSOPT_SKIP_SCALE: i32 = 4;
pub const DSOPT_SKIP_HYPER: i32 = 8;
pub const DSOPT_SKIP_CALLER: i32 = 16;
pub const DSOPT_SKIP_PEER: i32 = 32;

// enum dsopt_hyper_place
pub const DSOPT_HYPER_LR: i32 = 0;
pub const DSOPT_HYPER_BETA1: i32 = 1;
pub const DSOPT_HYPER_BETA2: i32 = 2;
pub const DSOPT_HYPER_EPS: i32 = 3;
pub const DSOPT_HYPER_WEIGHT_DECAY: i32 = 4;
pub const DSOPT_HYPER_GROUP_MAX_NORM: i32 = 5;
pub const DSOPT_HYPER_MAX_NORM: i32 = 6;
pub const DSOPT_HYPER_MOMENTUM: i32 = 7;
pub const DSOPT_HYPER_FLOATS: i32 = 16;

// enum dsopt_reduction
pub const DSOPT_REDUCTION_FULL: i32 = 1;
pub const DSOPT_REDUCTION_COMPRESSED: i32 = 2;
pub const DSOPT_REDUCTION_LOCAL: i32 = 3;

// enum dsopt_phase
pub const DSOPT_MS_OVERFLOW_CHECK: i32 = 0;
pub const DSOPT_MS_COMPUTE_NORM: i32 = 1;
pub const DSOPT_MS_UNSCALE_AND_CLIP: i32 = 2;
pub const DSOPT_MS_BASIC_STEP: i32 = 3;
pub const DSOPT_MS_COMPRESS: i32 = 4;
pub const DSOPT_MS_EXCHANGE: i32 = 5;
pub const DSOPT_MS_DECOMPRESS: i32 = 6;
pub const DSOPT_MS_PHASES: i32 = 8;

// enum dsopt_nonfinite_kind
pub const DSOPT_FOUND_NOTHING: i32 = 0;
pub const DSOPT_FOUND_INF: i32 = 1;
pub const DSOPT_FOUND_NAN: i32 = 2;

// enum dsopt_io_flags
pub const DSOPT_IO_NO_STATE: i32 = 1;
pub const DSOPT_IO_NO_MASTERS: i32 = 2;
pub const DSOPT_IO_NO_HYPER: i32 = 4;
pub const DSOPT_IO_PARAMS: i32 = 8;
pub const DSOPT_IO_NO_SCALER: i32 = 16;
pub const DSOPT_IO_RESET_ERRORS: i32 = 32;

// enum dsopt_profile
pub const DSOPT_PROFILE_DEFAULT: i32 = 0;
pub const DSOPT_PROFILE_FUSED: i32 = 1;
pub const DSOPT_PROFILE_UNFUSED: i32 = 2;
pub const DSOPT_PROFILE_DYNAMIC: i32 = 3;

// enum dsopt_scaler_flags
pub const DSOPT_SCALER_STATIC: i32 = 1;
pub const DSOPT_SCALER_REFILL: i32 = 2;
pub const DSOPT_SCALER_FAIL_AT_MIN: i32 = 4;
pub const DSOPT_SCALER_KEEP_AT_MIN: i32 = 8;
pub const DSOPT_SCALER_SHARED: i32 = 16;
pub const DSOPT_SCALER_GROWTH_AT_WINDOW: i32 = 32;

// enum dsopt_scale
pub const DSOPT_SCALE_VALUE: i32 = 0;
pub const DSOPT_SCALE_OVERRIDE: i32 = 1;
pub const DSOPT_SCALE_CLEAR_OVERRIDE: i32 = 2;

// enum dsopt_comm_kind
pub const DSOPT_COMM_KIND_SELF: i32 = 0;
pub const DSOPT_COMM_KIND_LOCAL: i32 = 1;
pub const DSOPT_COMM_KIND_NCCL: i32 = 2;
pub const DSOPT_COMM_KIND_HCCL: i32 = 3;
pub const DSOPT_COMM_KIND_TABLE: i32 = 4;

// enum dsopt_comm_flags
pub const DSOPT_COMM_FLAG_ENQUEUE: i32 = 1;
pub const DSOPT_COMM_FLAG_SYNCHRONIZE: i32 = 2;

// enum dsopt_op
pub const DSOPT_OP_SUM: i32 = 0;
pub const DSOPT_OP_MAX: i32 = 1;
pub const DSOPT_OP_MEAN: i32 = 2;

// enum dsopt_memory
pub const DSOPT_MEMORY_HOST: i32 = 0;
pub const DSOPT_MEMORY_BACKEND: i32 = 1;

// enum dsopt_collective
pub const DSOPT_COLLECTIVE_ALL_REDUCE: i32 = 0;
pub const DSOPT_COLLECTIVE_ALL_TO_ALL: i32 = 1;
pub const DSOPT_COLLECTIVE_ALL_GATHER: i32 = 2;
pub const DSOPT_COLLECTIVE_SLOTS: i32 = 8;

// enum dsopt_zero
pub const DSOPT_ZERO_FILL: i32 = 0;
pub const DSOPT_ZERO_NONE: i32 = 1;

// enum dsopt_norm
pub const DSOPT_NORM_L2: i32 = 0;
pub const DSOPT_NORM_MAX: i32 = 1;

pub type dsopt_status = i32;
pub type dsopt_parallel_for = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        n: i64,
        body: Option<unsafe extern "C" fn(arg: *mut c_void, i: i64)>,
        arg: *mut c_void,
    ),
>;

/// A handle: only pointers to it exist.
#[repr(C)]
pub struct dsopt_context {
    _data: [u8; 0],
    _marker: Opaque,
}

/// A handle: only pointers to it exist.
#[repr(C)]
pub struct dsopt_optimizer {
    _data: [u8; 0],
    _marker: Opaque,
}

/// A handle: only pointers to it exist.
#[repr(C)]
pub struct dsopt_scaler {
    _data: [u8; 0],
    _marker: Opaque,
}

/// A handle: only pointers to it exist.
#[repr(C)]
pub struct dsopt_comm {
    _data: [u8; 0],
    _marker: Opaque,
}

type Opaque = std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_tensor {
    pub data: *mut c_void,
    pub numel: i64,
    pub dtype: i32,
    pub reserved: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_tensor>() == 24);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_context_desc {
    pub size: usize,
    pub backend: i32,
    pub device: i32,
    pub threads: i32,
    pub log_level: i32,
    pub allocate: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            bytes: usize,
            alignment: usize,
            stream: *mut c_void,
        ) -> *mut c_void,
    >,
    pub release: Option<
        unsafe extern "C" fn(user: *mut c_void, memory: *mut c_void, bytes: usize, stream: *mut c_void),
    >,
    pub parallel_for: dsopt_parallel_for,
    pub log: Option<unsafe extern "C" fn(user: *mut c_void, level: i32, text: *const c_char)>,
    pub user: *mut c_void,
    pub chunk: i64,
    pub flags: i32,
    pub reserved: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_context_desc>() == 80);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_group {
    pub size: usize,
    pub algorithm: i32,
    pub flags: i32,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub max_norm: f64,
    pub min_trust: f64,
    pub max_trust: f64,
    pub freeze_step: i64,
    pub var_interval_steps: i64,
    pub local_interval_steps: i64,
    pub max_local_interval: i64,
    pub trust_beta: f64,
    pub trust_threshold: f64,
    pub trust_min_change: f64,
    pub trust_max_change: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub lr_decay: f64,
    pub initial_accumulator_value: f64,
}
const _: () = assert!(std::mem::size_of::<dsopt_group>() == 176);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_param {
    pub tensor: dsopt_tensor,
    pub name: *const c_char,
    pub dims: *const i64,
    pub ndim: i32,
    pub flags: i32,
    pub offset: i64,
    pub expert: i32,
    pub group: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_param>() == 64);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_optimizer_desc {
    pub size: usize,
    pub compat: i32,
    pub flags: i32,
    pub nonfinite: i32,
    pub masters: i32,
    pub max_norm: f64,
    pub max_value: f64,
    pub scaler: *mut dsopt_scaler,
    pub data: *mut dsopt_comm,
    pub model: *mut dsopt_comm,
    pub experts: *const *mut dsopt_comm,
    pub expert_count: i32,
    pub skip_budget: i32,
    pub seed: u64,
    pub node: *mut dsopt_comm,
}
const _: () = assert!(std::mem::size_of::<dsopt_optimizer_desc>() == 96);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_state_info {
    pub size: usize,
    pub name: *const c_char,
    pub param: i64,
    pub tensor: dsopt_tensor,
    pub dims: *const i64,
    pub ndim: i32,
    pub flags: i32,
    pub generation: i64,
}
const _: () = assert!(std::mem::size_of::<dsopt_state_info>() == 72);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_step {
    pub size: usize,
    pub grads: *const dsopt_tensor,
    pub count: i64,
    pub params: *const dsopt_tensor,
    pub out: *const dsopt_tensor,
    pub state: *const dsopt_tensor,
    pub state_count: i64,
    pub lr: *const f32,
    pub grad_scale: *const f32,
    pub skip: *const i32,
    pub grad_norms: *const f32,
    pub report: *mut f32,
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
    pub stream: *mut c_void,
    pub parallel_for: dsopt_parallel_for,
    pub parallel_user: *mut c_void,
    pub flags: i32,
    pub reserved: i32,
    pub hyper: *const f32,
}
const _: () = assert!(std::mem::size_of::<dsopt_step>() == 152);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_schedule_info {
    pub size: usize,
    pub step: i32,
    pub frozen: i32,
    pub var_interval: i32,
    pub var_counter: i32,
    pub local_interval: i32,
    pub local_counter: i32,
    pub momentum_in_bits: i32,
    pub reduction: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_schedule_info>() == 40);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_report {
    pub size: usize,
    pub calls: i64,
    pub skipped: i64,
    pub skipped_in_row: i64,
    pub nonfinite: i64,
    pub first_bad: i64,
    pub first_bad_name: *const c_char,
    pub last_skipped: i32,
    pub kind: i32,
    pub loss_scale: f64,
    pub scale_used: f64,
    pub grad_norm: f64,
    pub weight_norm: f64,
    pub update_norm: f64,
    pub dense_norm: f64,
    pub expert_norm: f64,
    pub divisor: f64,
    pub ms: [f64; 8],
    pub state_bytes: i64,
    pub workspace_bytes: i64,
    pub resharded_from: i32,
    pub reasons: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_report>() == 216);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_io {
    pub size: usize,
    pub flags: i32,
    pub reserved: i32,
    pub user: *mut c_void,
    pub write: Option<
        unsafe extern "C" fn(user: *mut c_void, data: *const c_void, bytes: usize) -> c_int,
    >,
    pub read: Option<
        unsafe extern "C" fn(user: *mut c_void, offset: u64, data: *mut c_void, bytes: usize) -> c_int,
    >,
    pub total: u64,
    pub files: i32,
    pub reserved2: i32,
    pub paths: *const *const c_char,
    pub users: *const *mut c_void,
    pub totals: *const u64,
}
const _: () = assert!(std::mem::size_of::<dsopt_io>() == 80);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_scaler_desc {
    pub size: usize,
    pub profile: i32,
    pub flags: i32,
    pub init: f64,
    pub factor: f64,
    pub min: f64,
    pub max: f64,
    pub window: i32,
    pub hysteresis: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_scaler_desc>() == 56);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_scaler_info {
    pub size: usize,
    pub scale: f64,
    pub dynamic: f64,
    pub updates: i64,
    pub last_overflow: i64,
    pub hysteresis: i32,
    pub overridden: i32,
    pub failures: i32,
    pub skipped_in_row: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_scaler_info>() == 56);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_comm_table {
    pub size: usize,
    pub self_: *mut c_void,
    pub rank: i32,
    pub ranks: i32,
    pub all_reduce: Option<
        unsafe extern "C" fn(
            self_: *mut c_void,
            send: *const c_void,
            recv: *mut c_void,
            count: i64,
            dtype: i32,
            op: i32,
            stream: *mut c_void,
        ) -> c_int,
    >,
    pub all_to_all: Option<
        unsafe extern "C" fn(
            self_: *mut c_void,
            send: *const c_void,
            recv: *mut c_void,
            bytes_per_rank: i64,
            stream: *mut c_void,
        ) -> c_int,
    >,
    pub all_gather: Option<
        unsafe extern "C" fn(
            self_: *mut c_void,
            send: *const c_void,
            recv: *mut c_void,
            bytes_per_rank: i64,
            stream: *mut c_void,
        ) -> c_int,
    >,
    pub error: Option<
        unsafe extern "C" fn(self_: *mut c_void, text: *mut c_char, capacity: usize) -> c_int,
    >,
    pub abort: Option<unsafe extern "C" fn(self_: *mut c_void)>,
    pub destroy: Option<unsafe extern "C" fn(self_: *mut c_void)>,
    pub memory: i32,
    pub reserved: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_comm_table>() == 80);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_comm_desc {
    pub size: usize,
    pub kind: i32,
    pub rank: i32,
    pub ranks: i32,
    pub timeout_ms: i32,
    pub id: *const c_void,
    pub id_bytes: usize,
    pub table: *const dsopt_comm_table,
    pub native: *mut c_void,
    pub flags: i32,
    pub reserved: i32,
}
const _: () = assert!(std::mem::size_of::<dsopt_comm_desc>() == 64);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_comm_info {
    pub size: usize,
    pub rank: i32,
    pub ranks: i32,
    pub status: dsopt_status,
    pub reserved: i32,
    pub calls: i64,
    pub bytes_sent: i64,
    pub bytes_received: i64,
    pub calls_of: [i64; 8],
    pub sent_of: [i64; 8],
    pub received_of: [i64; 8],
}
const _: () = assert!(std::mem::size_of::<dsopt_comm_info>() == 240);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_norm_result {
    pub norm: f64,
    pub coefficient: f32,
    pub reserved: i32,
    pub nonfinite: i64,
    pub first_bad: i64,
}
const _: () = assert!(std::mem::size_of::<dsopt_norm_result>() == 32);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dsopt_compressed {
    pub size: usize,
    pub tensors: *const dsopt_tensor,
    pub count: i64,
    pub worker_error: *mut f32,
    pub server_error: *mut f32,
    pub workspace: *mut c_void,
    pub workspace_bytes: usize,
    pub stream: *mut c_void,
    pub compat: i32,
    pub reserved: i32,
    pub node: *mut dsopt_comm,
}
const _: () = assert!(std::mem::size_of::<dsopt_compressed>() == 80);

#[cfg(not(feature = "dlopen"))]
extern "C" {
    pub fn dsopt_version() -> i32;
    pub fn dsopt_abi_version() -> i32;
    pub fn dsopt_build_info() -> *const c_char;
    pub fn dsopt_status_name(status: dsopt_status) -> *const c_char;
    pub fn dsopt_last_error() -> *const c_char;
    pub fn dsopt_context_create(
        desc: *const dsopt_context_desc,
        ctx: *mut *mut dsopt_context,
    ) -> dsopt_status;
    pub fn dsopt_context_destroy(ctx: *mut dsopt_context);
    pub fn dsopt_group_init(group: *mut dsopt_group, size: usize, algorithm: i32) -> dsopt_status;
    pub fn dsopt_optimizer_create(
        ctx: *mut dsopt_context,
        desc: *const dsopt_optimizer_desc,
        opt: *mut *mut dsopt_optimizer,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_destroy(opt: *mut dsopt_optimizer);
    pub fn dsopt_optimizer_retain(
        opt: *mut dsopt_optimizer,
        other: *mut *mut dsopt_optimizer,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_add_group(
        opt: *mut dsopt_optimizer,
        group: *const dsopt_group,
        params: *const dsopt_param,
        count: i64,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_add_params(
        opt: *mut dsopt_optimizer,
        params: *const dsopt_param,
        count: i64,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_set(
        opt: *mut dsopt_optimizer,
        group: i32,
        key: i32,
        value: f64,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_get(
        opt: *const dsopt_optimizer,
        group: i32,
        key: i32,
        value: *mut f64,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_count(
        opt: *const dsopt_optimizer,
        groups: *mut i64,
        params: *mut i64,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_state_count(opt: *const dsopt_optimizer, count: *mut i64) -> dsopt_status;
    pub fn dsopt_optimizer_state(
        opt: *const dsopt_optimizer,
        index: i64,
        info: *mut dsopt_state_info,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_export(
        opt: *mut dsopt_optimizer,
        index: i64,
        host: *mut c_void,
        bytes: usize,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_import(
        opt: *mut dsopt_optimizer,
        index: i64,
        host: *const c_void,
        bytes: usize,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_bind(
        opt: *mut dsopt_optimizer,
        what: i32,
        list: *const dsopt_tensor,
        count: i64,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_reset(
        opt: *mut dsopt_optimizer,
        what: i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_step(opt: *mut dsopt_optimizer, step: *const dsopt_step) -> dsopt_status;
    pub fn dsopt_optimizer_apply(opt: *const dsopt_optimizer, step: *const dsopt_step) -> dsopt_status;
    pub fn dsopt_optimizer_workspace(opt: *const dsopt_optimizer, bytes: *mut usize) -> dsopt_status;
    pub fn dsopt_optimizer_init_state(
        opt: *const dsopt_optimizer,
        params: *const dsopt_tensor,
        count: i64,
        state: *const dsopt_tensor,
        state_count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_accumulate(
        opt: *mut dsopt_optimizer,
        grads: *const dsopt_tensor,
        count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_next_reduction(
        opt: *mut dsopt_optimizer,
        call: i64,
        reduction: *mut i32,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_next_reduction_on_device(
        opt: *const dsopt_optimizer,
        schedule: *const dsopt_tensor,
        reduction: *mut i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_schedule_decode(
        opt: *const dsopt_optimizer,
        words: *const i32,
        info: *mut dsopt_schedule_info,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_report(opt: *mut dsopt_optimizer, report: *mut dsopt_report) -> dsopt_status;
    pub fn dsopt_optimizer_save(
        opt: *mut dsopt_optimizer,
        path: *const c_char,
        io: *const dsopt_io,
    ) -> dsopt_status;
    pub fn dsopt_optimizer_load(
        opt: *mut dsopt_optimizer,
        path: *const c_char,
        io: *const dsopt_io,
    ) -> dsopt_status;
    pub fn dsopt_scaler_create(
        ctx: *mut dsopt_context,
        desc: *const dsopt_scaler_desc,
        scaler: *mut *mut dsopt_scaler,
    ) -> dsopt_status;
    pub fn dsopt_scaler_destroy(scaler: *mut dsopt_scaler);
    pub fn dsopt_scaler_detach(scaler: *mut dsopt_scaler) -> dsopt_status;
    pub fn dsopt_scaler_device_scale(scaler: *const dsopt_scaler) -> *const f32;
    pub fn dsopt_scaler_set(
        scaler: *mut dsopt_scaler,
        what: i32,
        value: f64,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_scaler_update(
        scaler: *mut dsopt_scaler,
        overflow: *const i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_scaler_query(scaler: *mut dsopt_scaler, info: *mut dsopt_scaler_info) -> dsopt_status;
    pub fn dsopt_scaler_scale_loss(
        scaler: *const dsopt_scaler,
        loss: *const dsopt_tensor,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_scaler_init_state(
        scaler: *const dsopt_scaler,
        state: *const dsopt_tensor,
        count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_scaler_update_arrays(
        scaler: *const dsopt_scaler,
        state: *const dsopt_tensor,
        count: i64,
        overflow: *const i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_scaler_decode(words: *const i32, info: *mut dsopt_scaler_info) -> dsopt_status;
    pub fn dsopt_comm_unique_id(kind: i32, id: *mut c_void, bytes: *mut usize) -> dsopt_status;
    pub fn dsopt_comm_create(
        ctx: *mut dsopt_context,
        desc: *const dsopt_comm_desc,
        comm: *mut *mut dsopt_comm,
    ) -> dsopt_status;
    pub fn dsopt_comm_query(comm: *const dsopt_comm, info: *mut dsopt_comm_info) -> dsopt_status;
    pub fn dsopt_comm_all_reduce(
        comm: *mut dsopt_comm,
        list: *const dsopt_tensor,
        count: i64,
        op: i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_comm_abort(comm: *mut dsopt_comm);
    pub fn dsopt_comm_destroy(comm: *mut dsopt_comm);
    pub fn dsopt_zero_grad(
        ctx: *mut dsopt_context,
        grads: *mut dsopt_tensor,
        count: i64,
        how: i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_tensors_norm(
        ctx: *mut dsopt_context,
        list: *const dsopt_tensor,
        count: i64,
        norm: i32,
        max_norm: f64,
        comm: *mut dsopt_comm,
        result: *mut dsopt_norm_result,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_tensors_axpby(
        ctx: *mut dsopt_context,
        a: *const f32,
        x: *const dsopt_tensor,
        b: f32,
        y: *const dsopt_tensor,
        count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_tensors_clamp(
        ctx: *mut dsopt_context,
        list: *const dsopt_tensor,
        count: i64,
        limit: f64,
        stream: *mut c_void,
    ) -> dsopt_status;
    pub fn dsopt_compressed_sizes(
        comm: *const dsopt_comm,
        args: *const dsopt_compressed,
        worker: *mut i64,
        server: *mut i64,
        workspace: *mut usize,
    ) -> dsopt_status;
    pub fn dsopt_compressed_allreduce(
        comm: *mut dsopt_comm,
        args: *const dsopt_compressed,
    ) -> dsopt_status;
    pub fn dsopt_compressed_errors(
        comm: *const dsopt_comm,
        args: *const dsopt_compressed,
        worker: *mut f32,
        server: *mut f32,
    ) -> dsopt_status;
}

#[cfg(feature = "dlopen")]
crate::dl::functions! {
    fn dsopt_version() -> i32;
    fn dsopt_abi_version() -> i32;
    fn dsopt_build_info() -> *const c_char;
    fn dsopt_status_name(status: dsopt_status) -> *const c_char;
    fn dsopt_last_error() -> *const c_char;
    fn dsopt_context_create(
        desc: *const dsopt_context_desc,
        ctx: *mut *mut dsopt_context,
    ) -> dsopt_status;
    fn dsopt_context_destroy(ctx: *mut dsopt_context);
    fn dsopt_group_init(group: *mut dsopt_group, size: usize, algorithm: i32) -> dsopt_status;
    fn dsopt_optimizer_create(
        ctx: *mut dsopt_context,
        desc: *const dsopt_optimizer_desc,
        opt: *mut *mut dsopt_optimizer,
    ) -> dsopt_status;
    fn dsopt_optimizer_destroy(opt: *mut dsopt_optimizer);
    fn dsopt_optimizer_retain(
        opt: *mut dsopt_optimizer,
        other: *mut *mut dsopt_optimizer,
    ) -> dsopt_status;
    fn dsopt_optimizer_add_group(
        opt: *mut dsopt_optimizer,
        group: *const dsopt_group,
        params: *const dsopt_param,
        count: i64,
    ) -> dsopt_status;
    fn dsopt_optimizer_add_params(
        opt: *mut dsopt_optimizer,
        params: *const dsopt_param,
        count: i64,
    ) -> dsopt_status;
    fn dsopt_optimizer_set(opt: *mut dsopt_optimizer, group: i32, key: i32, value: f64) -> dsopt_status;
    fn dsopt_optimizer_get(
        opt: *const dsopt_optimizer,
        group: i32,
        key: i32,
        value: *mut f64,
    ) -> dsopt_status;
    fn dsopt_optimizer_count(
        opt: *const dsopt_optimizer,
        groups: *mut i64,
        params: *mut i64,
    ) -> dsopt_status;
    fn dsopt_optimizer_state_count(opt: *const dsopt_optimizer, count: *mut i64) -> dsopt_status;
    fn dsopt_optimizer_state(
        opt: *const dsopt_optimizer,
        index: i64,
        info: *mut dsopt_state_info,
    ) -> dsopt_status;
    fn dsopt_optimizer_export(
        opt: *mut dsopt_optimizer,
        index: i64,
        host: *mut c_void,
        bytes: usize,
    ) -> dsopt_status;
    fn dsopt_optimizer_import(
        opt: *mut dsopt_optimizer,
        index: i64,
        host: *const c_void,
        bytes: usize,
    ) -> dsopt_status;
    fn dsopt_optimizer_bind(
        opt: *mut dsopt_optimizer,
        what: i32,
        list: *const dsopt_tensor,
        count: i64,
    ) -> dsopt_status;
    fn dsopt_optimizer_reset(opt: *mut dsopt_optimizer, what: i32, stream: *mut c_void) -> dsopt_status;
    fn dsopt_optimizer_step(opt: *mut dsopt_optimizer, step: *const dsopt_step) -> dsopt_status;
    fn dsopt_optimizer_apply(opt: *const dsopt_optimizer, step: *const dsopt_step) -> dsopt_status;
    fn dsopt_optimizer_workspace(opt: *const dsopt_optimizer, bytes: *mut usize) -> dsopt_status;
    fn dsopt_optimizer_init_state(
        opt: *const dsopt_optimizer,
        params: *const dsopt_tensor,
        count: i64,
        state: *const dsopt_tensor,
        state_count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_optimizer_accumulate(
        opt: *mut dsopt_optimizer,
        grads: *const dsopt_tensor,
        count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_optimizer_next_reduction(
        opt: *mut dsopt_optimizer,
        call: i64,
        reduction: *mut i32,
    ) -> dsopt_status;
    fn dsopt_optimizer_next_reduction_on_device(
        opt: *const dsopt_optimizer,
        schedule: *const dsopt_tensor,
        reduction: *mut i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_schedule_decode(
        opt: *const dsopt_optimizer,
        words: *const i32,
        info: *mut dsopt_schedule_info,
    ) -> dsopt_status;
    fn dsopt_optimizer_report(opt: *mut dsopt_optimizer, report: *mut dsopt_report) -> dsopt_status;
    fn dsopt_optimizer_save(
        opt: *mut dsopt_optimizer,
        path: *const c_char,
        io: *const dsopt_io,
    ) -> dsopt_status;
    fn dsopt_optimizer_load(
        opt: *mut dsopt_optimizer,
        path: *const c_char,
        io: *const dsopt_io,
    ) -> dsopt_status;
    fn dsopt_scaler_create(
        ctx: *mut dsopt_context,
        desc: *const dsopt_scaler_desc,
        scaler: *mut *mut dsopt_scaler,
    ) -> dsopt_status;
    fn dsopt_scaler_destroy(scaler: *mut dsopt_scaler);
    fn dsopt_scaler_detach(scaler: *mut dsopt_scaler) -> dsopt_status;
    fn dsopt_scaler_device_scale(scaler: *const dsopt_scaler) -> *const f32;
    fn dsopt_scaler_set(
        scaler: *mut dsopt_scaler,
        what: i32,
        value: f64,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_scaler_update(
        scaler: *mut dsopt_scaler,
        overflow: *const i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_scaler_query(scaler: *mut dsopt_scaler, info: *mut dsopt_scaler_info) -> dsopt_status;
    fn dsopt_scaler_scale_loss(
        scaler: *const dsopt_scaler,
        loss: *const dsopt_tensor,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_scaler_init_state(
        scaler: *const dsopt_scaler,
        state: *const dsopt_tensor,
        count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_scaler_update_arrays(
        scaler: *const dsopt_scaler,
        state: *const dsopt_tensor,
        count: i64,
        overflow: *const i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_scaler_decode(words: *const i32, info: *mut dsopt_scaler_info) -> dsopt_status;
    fn dsopt_comm_unique_id(kind: i32, id: *mut c_void, bytes: *mut usize) -> dsopt_status;
    fn dsopt_comm_create(
        ctx: *mut dsopt_context,
        desc: *const dsopt_comm_desc,
        comm: *mut *mut dsopt_comm,
    ) -> dsopt_status;
    fn dsopt_comm_query(comm: *const dsopt_comm, info: *mut dsopt_comm_info) -> dsopt_status;
    fn dsopt_comm_all_reduce(
        comm: *mut dsopt_comm,
        list: *const dsopt_tensor,
        count: i64,
        op: i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_comm_abort(comm: *mut dsopt_comm);
    fn dsopt_comm_destroy(comm: *mut dsopt_comm);
    fn dsopt_zero_grad(
        ctx: *mut dsopt_context,
        grads: *mut dsopt_tensor,
        count: i64,
        how: i32,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_tensors_norm(
        ctx: *mut dsopt_context,
        list: *const dsopt_tensor,
        count: i64,
        norm: i32,
        max_norm: f64,
        comm: *mut dsopt_comm,
        result: *mut dsopt_norm_result,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_tensors_axpby(
        ctx: *mut dsopt_context,
        a: *const f32,
        x: *const dsopt_tensor,
        b: f32,
        y: *const dsopt_tensor,
        count: i64,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_tensors_clamp(
        ctx: *mut dsopt_context,
        list: *const dsopt_tensor,
        count: i64,
        limit: f64,
        stream: *mut c_void,
    ) -> dsopt_status;
    fn dsopt_compressed_sizes(
        comm: *const dsopt_comm,
        args: *const dsopt_compressed,
        worker: *mut i64,
        server: *mut i64,
        workspace: *mut usize,
    ) -> dsopt_status;
    fn dsopt_compressed_allreduce(comm: *mut dsopt_comm, args: *const dsopt_compressed) -> dsopt_status;
    fn dsopt_compressed_errors(
        comm: *const dsopt_comm,
        args: *const dsopt_compressed,
        worker: *mut f32,
        server: *mut f32,
    ) -> dsopt_status;
}
