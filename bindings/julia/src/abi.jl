# SPDX-License-Identifier: Apache-2.0
# dsopt.h as Julia sees it. Written by scripts/generate/julia_structs.py from dsopt.json: change that.
module ABI

using Libdl

const VERSION = "0.2.0"
const DSOPT_VERSION_MAJOR = Int32(0)
const DSOPT_VERSION_MINOR = Int32(2)
const DSOPT_VERSION_PATCH = Int32(0)
const DSOPT_ABI_VERSION = Int32(1)
const DSOPT_OK = Int32(0)
const DSOPT_ERR_ARGUMENT = Int32(10)
const DSOPT_ERR_SHAPE = Int32(11)
const DSOPT_ERR_DTYPE = Int32(12)
const DSOPT_ERR_ALIGNMENT = Int32(13)
const DSOPT_ERR_OVERLAP = Int32(14)
const DSOPT_ERR_DEVICE = Int32(15)
const DSOPT_ERR_WORKSPACE = Int32(16)
const DSOPT_ERR_VERSION = Int32(17)
const DSOPT_ERR_UNSUPPORTED = Int32(18)
const DSOPT_ERR_STATE = Int32(19)
const DSOPT_ERR_BUSY = Int32(20)
const DSOPT_ERR_FORKED = Int32(21)
const DSOPT_ERR_SKIPS = Int32(22)
const DSOPT_ERR_HOOK = Int32(23)
const DSOPT_ERR_NOMEM = Int32(30)
const DSOPT_ERR_MISSING = Int32(31)
const DSOPT_ERR_IO = Int32(32)
const DSOPT_ERR_INTERNAL = Int32(33)
const DSOPT_ERR_BACKEND = Int32(34)
const DSOPT_ERR_COMM = Int32(50)
const DSOPT_ERR_TIMEOUT = Int32(51)
const DSOPT_ERR_ABORTED = Int32(52)
const DSOPT_ERR_FORMAT = Int32(70)
const DSOPT_ERR_CHECKSUM = Int32(71)
const DSOPT_ERR_MISMATCH = Int32(72)
const DSOPT_DTYPE_F32 = Int32(1)
const DSOPT_DTYPE_F16 = Int32(2)
const DSOPT_DTYPE_BF16 = Int32(3)
const DSOPT_DTYPE_I32 = Int32(4)
const DSOPT_DTYPE_F64 = Int32(5)
const DSOPT_BACKEND_CPU = Int32(0)
const DSOPT_BACKEND_CUDA = Int32(1)
const DSOPT_LOG_ERROR = Int32(1)
const DSOPT_LOG_WARN = Int32(2)
const DSOPT_LOG_INFO = Int32(3)
const DSOPT_LOG_TRACE = Int32(4)
const DSOPT_CONTEXT_CHECK_POINTERS = Int32(1)
const DSOPT_ALGORITHM_ADAM = Int32(2)
const DSOPT_ALGORITHM_ADAMW = Int32(3)
const DSOPT_ALGORITHM_LAMB = Int32(4)
const DSOPT_ALGORITHM_ADAM_LEGACY = Int32(7)
const DSOPT_ALGORITHM_SGD = Int32(8)
const DSOPT_ALGORITHM_ADAGRAD = Int32(9)
const DSOPT_ALGORITHM_LION = Int32(10)
const DSOPT_ALGORITHM_ONEBIT_ADAM = Int32(16)
const DSOPT_ALGORITHM_ZERO_ONE_ADAM = Int32(17)
const DSOPT_ALGORITHM_ONEBIT_LAMB = Int32(18)
const DSOPT_GROUP_NO_BIAS_CORRECTION = Int32(1)
const DSOPT_GROUP_EPS_INSIDE_SQRT = Int32(2)
const DSOPT_GROUP_EPS_UNCORRECTED = Int32(4)
const DSOPT_GROUP_NON_FREEZE = Int32(16)
const DSOPT_GROUP_NESTEROV = Int32(32)
const DSOPT_PARAM_MODEL_PARALLEL = Int32(1)
const DSOPT_PARAM_REPLICATED = Int32(2)
const DSOPT_PARAM_MASKED = Int32(4)
const DSOPT_COMPAT_NONE = Int32(0)
const DSOPT_COMPAT_DEEPSPEED = Int32(1)
const DSOPT_NONFINITE_AUTO = Int32(0)
const DSOPT_NONFINITE_SKIP = Int32(1)
const DSOPT_NONFINITE_APPLY = Int32(2)
const DSOPT_OPTIMIZER_NO_MASTER = Int32(1)
const DSOPT_OPTIMIZER_REPORT_NORMS = Int32(2)
const DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING = Int32(4)
const DSOPT_OPTIMIZER_ACCUMULATE = Int32(8)
const DSOPT_OPTIMIZER_TIMING = Int32(16)
const DSOPT_OPTIMIZER_AVERAGES = Int32(32)
const DSOPT_OPTIMIZER_CHECK_RANKS = Int32(64)
const DSOPT_OPTIMIZER_MOMENTUM_BITS = Int32(128)
const DSOPT_MASTERS_PER_TENSOR = Int32(0)
const DSOPT_MASTERS_FLAT = Int32(1)
const DSOPT_ALL_GROUPS = Int32(-1)
const DSOPT_KEY_LR = Int32(1)
const DSOPT_KEY_BETA1 = Int32(2)
const DSOPT_KEY_BETA2 = Int32(3)
const DSOPT_KEY_EPS = Int32(4)
const DSOPT_KEY_WEIGHT_DECAY = Int32(5)
const DSOPT_KEY_GROUP_MAX_NORM = Int32(6)
const DSOPT_KEY_MIN_TRUST = Int32(7)
const DSOPT_KEY_MAX_TRUST = Int32(8)
const DSOPT_KEY_BIAS_CORRECTION = Int32(9)
const DSOPT_KEY_EPS_INSIDE_SQRT = Int32(10)
const DSOPT_KEY_ALGORITHM = Int32(11)
const DSOPT_KEY_FREEZE_STEP = Int32(12)
const DSOPT_KEY_EPS_UNCORRECTED = Int32(13)
const DSOPT_KEY_MOMENTUM = Int32(14)
const DSOPT_KEY_DAMPENING = Int32(15)
const DSOPT_KEY_NESTEROV = Int32(16)
const DSOPT_KEY_LR_DECAY = Int32(17)
const DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE = Int32(18)
const DSOPT_KEY_MAX_NORM = Int32(32)
const DSOPT_KEY_CALLS = Int32(33)
const DSOPT_KEY_MAX_VALUE = Int32(34)
const DSOPT_KEY_SKIP_BUDGET = Int32(35)
const DSOPT_STATE_FROM_PARAM = Int32(1)
const DSOPT_STATE_RANK_LOCAL = Int32(2)
const DSOPT_BIND_PARAMS = Int32(1)
const DSOPT_BIND_STATE = Int32(2)
const DSOPT_RESET_MASTERS = Int32(1)
const DSOPT_RESET_MOMENTS = Int32(2)
const DSOPT_RESET_COUNTERS = Int32(4)
const DSOPT_RESET_GRADS = Int32(8)
const DSOPT_RESET_ERRORS = Int32(16)
const DSOPT_STEP_ZERO_GRADS = Int32(1)
const DSOPT_STEP_OUT_ONLY = Int32(2)
const DSOPT_STEP_DELTA = Int32(4)
const DSOPT_STEP_ACCUMULATED = Int32(8)
const DSOPT_STEP_NO_NAN = Int32(16)
const DSOPT_REPORT_SKIPPED = Int32(0)
const DSOPT_REPORT_GRAD_NORM = Int32(1)
const DSOPT_REPORT_WEIGHT_NORM = Int32(2)
const DSOPT_REPORT_UPDATE_NORM = Int32(3)
const DSOPT_REPORT_NONFINITE = Int32(4)
const DSOPT_REPORT_FIRST_BAD = Int32(5)
const DSOPT_REPORT_DIVISOR = Int32(6)
const DSOPT_REPORT_SCALE_USED = Int32(7)
const DSOPT_REPORT_SCALE_NEXT = Int32(8)
const DSOPT_REPORT_EXPERT_NORM = Int32(9)
const DSOPT_REPORT_SKIPPED_IN_ROW = Int32(10)
const DSOPT_REPORT_REASONS = Int32(11)
const DSOPT_REPORT_FLOATS = Int32(16)
const DSOPT_SKIP_GRADIENTS = Int32(1)
const DSOPT_SKIP_NORM = Int32(2)
const DSOPT_SKIP_SCALE = Int32(4)
const DSOPT_SKIP_HYPER = Int32(8)
const DSOPT_SKIP_CALLER = Int32(16)
const DSOPT_SKIP_PEER = Int32(32)
const DSOPT_HYPER_LR = Int32(0)
const DSOPT_HYPER_BETA1 = Int32(1)
const DSOPT_HYPER_BETA2 = Int32(2)
const DSOPT_HYPER_EPS = Int32(3)
const DSOPT_HYPER_WEIGHT_DECAY = Int32(4)
const DSOPT_HYPER_GROUP_MAX_NORM = Int32(5)
const DSOPT_HYPER_MAX_NORM = Int32(6)
const DSOPT_HYPER_MOMENTUM = Int32(7)
const DSOPT_HYPER_FLOATS = Int32(16)
const DSOPT_REDUCTION_FULL = Int32(1)
const DSOPT_REDUCTION_COMPRESSED = Int32(2)
const DSOPT_REDUCTION_LOCAL = Int32(3)
const DSOPT_MS_OVERFLOW_CHECK = Int32(0)
const DSOPT_MS_COMPUTE_NORM = Int32(1)
const DSOPT_MS_UNSCALE_AND_CLIP = Int32(2)
const DSOPT_MS_BASIC_STEP = Int32(3)
const DSOPT_MS_COMPRESS = Int32(4)
const DSOPT_MS_EXCHANGE = Int32(5)
const DSOPT_MS_DECOMPRESS = Int32(6)
const DSOPT_MS_PHASES = Int32(8)
const DSOPT_FOUND_NOTHING = Int32(0)
const DSOPT_FOUND_INF = Int32(1)
const DSOPT_FOUND_NAN = Int32(2)
const DSOPT_IO_NO_STATE = Int32(1)
const DSOPT_IO_NO_MASTERS = Int32(2)
const DSOPT_IO_NO_HYPER = Int32(4)
const DSOPT_IO_PARAMS = Int32(8)
const DSOPT_IO_NO_SCALER = Int32(16)
const DSOPT_IO_RESET_ERRORS = Int32(32)
const DSOPT_PROFILE_DEFAULT = Int32(0)
const DSOPT_PROFILE_FUSED = Int32(1)
const DSOPT_PROFILE_UNFUSED = Int32(2)
const DSOPT_PROFILE_DYNAMIC = Int32(3)
const DSOPT_SCALER_STATIC = Int32(1)
const DSOPT_SCALER_REFILL = Int32(2)
const DSOPT_SCALER_FAIL_AT_MIN = Int32(4)
const DSOPT_SCALER_KEEP_AT_MIN = Int32(8)
const DSOPT_SCALER_SHARED = Int32(16)
const DSOPT_SCALER_GROWTH_AT_WINDOW = Int32(32)
const DSOPT_SCALE_VALUE = Int32(0)
const DSOPT_SCALE_OVERRIDE = Int32(1)
const DSOPT_SCALE_CLEAR_OVERRIDE = Int32(2)
const DSOPT_COMM_KIND_SELF = Int32(0)
const DSOPT_COMM_KIND_LOCAL = Int32(1)
const DSOPT_COMM_KIND_NCCL = Int32(2)
const DSOPT_COMM_KIND_HCCL = Int32(3)
const DSOPT_COMM_KIND_TABLE = Int32(4)
const DSOPT_COMM_FLAG_ENQUEUE = Int32(1)
const DSOPT_COMM_FLAG_SYNCHRONIZE = Int32(2)
const DSOPT_OP_SUM = Int32(0)
const DSOPT_OP_MAX = Int32(1)
const DSOPT_OP_MEAN = Int32(2)
const DSOPT_MEMORY_HOST = Int32(0)
const DSOPT_MEMORY_BACKEND = Int32(1)
const DSOPT_COLLECTIVE_ALL_REDUCE = Int32(0)
const DSOPT_COLLECTIVE_ALL_TO_ALL = Int32(1)
const DSOPT_COLLECTIVE_ALL_GATHER = Int32(2)
const DSOPT_COLLECTIVE_SLOTS = Int32(8)
const DSOPT_ZERO_FILL = Int32(0)
const DSOPT_ZERO_NONE = Int32(1)
const DSOPT_NORM_L2 = Int32(0)
const DSOPT_NORM_MAX = Int32(1)

Base.@kwdef struct dsopt_tensor
    data::Ptr{Cvoid} = C_NULL
    numel::Int64 = 0
    dtype::Int32 = 0
    reserved::Int32 = 0
end

Base.@kwdef struct dsopt_context_desc
    size::UInt64 = 80
    backend::Int32 = 0
    device::Int32 = 0
    threads::Int32 = 0
    log_level::Int32 = 0
    allocate::Ptr{Cvoid} = C_NULL
    release::Ptr{Cvoid} = C_NULL
    parallel_for::Ptr{Cvoid} = C_NULL
    log::Ptr{Cvoid} = C_NULL
    user::Ptr{Cvoid} = C_NULL
    chunk::Int64 = 0
    flags::Int32 = 0
    reserved::Int32 = 0
end

Base.@kwdef struct dsopt_group
    size::UInt64 = 176
    algorithm::Int32 = 0
    flags::Int32 = 0
    lr::Float64 = 0
    beta1::Float64 = 0
    beta2::Float64 = 0
    eps::Float64 = 0
    weight_decay::Float64 = 0
    max_norm::Float64 = 0
    min_trust::Float64 = 0
    max_trust::Float64 = 0
    freeze_step::Int64 = 0
    var_interval_steps::Int64 = 0
    local_interval_steps::Int64 = 0
    max_local_interval::Int64 = 0
    trust_beta::Float64 = 0
    trust_threshold::Float64 = 0
    trust_min_change::Float64 = 0
    trust_max_change::Float64 = 0
    momentum::Float64 = 0
    dampening::Float64 = 0
    lr_decay::Float64 = 0
    initial_accumulator_value::Float64 = 0
end

Base.@kwdef struct dsopt_param
    tensor::dsopt_tensor = dsopt_tensor()
    name::Ptr{UInt8} = C_NULL
    dims::Ptr{Int64} = C_NULL
    ndim::Int32 = 0
    flags::Int32 = 0
    offset::Int64 = 0
    expert::Int32 = 0
    group::Int32 = 0
end

Base.@kwdef struct dsopt_optimizer_desc
    size::UInt64 = 96
    compat::Int32 = 0
    flags::Int32 = 0
    nonfinite::Int32 = 0
    masters::Int32 = 0
    max_norm::Float64 = 0
    max_value::Float64 = 0
    scaler::Ptr{Cvoid} = C_NULL
    data::Ptr{Cvoid} = C_NULL
    model::Ptr{Cvoid} = C_NULL
    experts::Ptr{Ptr{Cvoid}} = C_NULL
    expert_count::Int32 = 0
    skip_budget::Int32 = 0
    seed::UInt64 = 0
    node::Ptr{Cvoid} = C_NULL
end

Base.@kwdef struct dsopt_state_info
    size::UInt64 = 72
    name::Ptr{UInt8} = C_NULL
    param::Int64 = 0
    tensor::dsopt_tensor = dsopt_tensor()
    dims::Ptr{Int64} = C_NULL
    ndim::Int32 = 0
    flags::Int32 = 0
    generation::Int64 = 0
end

Base.@kwdef struct dsopt_step
    size::UInt64 = 152
    grads::Ptr{dsopt_tensor} = C_NULL
    count::Int64 = 0
    params::Ptr{dsopt_tensor} = C_NULL
    out::Ptr{dsopt_tensor} = C_NULL
    state::Ptr{dsopt_tensor} = C_NULL
    state_count::Int64 = 0
    lr::Ptr{Float32} = C_NULL
    grad_scale::Ptr{Float32} = C_NULL
    skip::Ptr{Int32} = C_NULL
    grad_norms::Ptr{Float32} = C_NULL
    report::Ptr{Float32} = C_NULL
    workspace::Ptr{Cvoid} = C_NULL
    workspace_bytes::UInt64 = 0
    stream::Ptr{Cvoid} = C_NULL
    parallel_for::Ptr{Cvoid} = C_NULL
    parallel_user::Ptr{Cvoid} = C_NULL
    flags::Int32 = 0
    reserved::Int32 = 0
    hyper::Ptr{Float32} = C_NULL
end

Base.@kwdef struct dsopt_schedule_info
    size::UInt64 = 40
    step::Int32 = 0
    frozen::Int32 = 0
    var_interval::Int32 = 0
    var_counter::Int32 = 0
    local_interval::Int32 = 0
    local_counter::Int32 = 0
    momentum_in_bits::Int32 = 0
    reduction::Int32 = 0
end

Base.@kwdef struct dsopt_report
    size::UInt64 = 216
    calls::Int64 = 0
    skipped::Int64 = 0
    skipped_in_row::Int64 = 0
    nonfinite::Int64 = 0
    first_bad::Int64 = 0
    first_bad_name::Ptr{UInt8} = C_NULL
    last_skipped::Int32 = 0
    kind::Int32 = 0
    loss_scale::Float64 = 0
    scale_used::Float64 = 0
    grad_norm::Float64 = 0
    weight_norm::Float64 = 0
    update_norm::Float64 = 0
    dense_norm::Float64 = 0
    expert_norm::Float64 = 0
    divisor::Float64 = 0
    ms::NTuple{8,Float64} = (0, 0, 0, 0, 0, 0, 0, 0)
    state_bytes::Int64 = 0
    workspace_bytes::Int64 = 0
    resharded_from::Int32 = 0
    reasons::Int32 = 0
end

Base.@kwdef struct dsopt_io
    size::UInt64 = 80
    flags::Int32 = 0
    reserved::Int32 = 0
    user::Ptr{Cvoid} = C_NULL
    write::Ptr{Cvoid} = C_NULL
    read::Ptr{Cvoid} = C_NULL
    total::UInt64 = 0
    files::Int32 = 0
    reserved2::Int32 = 0
    paths::Ptr{Ptr{UInt8}} = C_NULL
    users::Ptr{Ptr{Cvoid}} = C_NULL
    totals::Ptr{UInt64} = C_NULL
end

Base.@kwdef struct dsopt_scaler_desc
    size::UInt64 = 56
    profile::Int32 = 0
    flags::Int32 = 0
    init::Float64 = 0
    factor::Float64 = 0
    min::Float64 = 0
    max::Float64 = 0
    window::Int32 = 0
    hysteresis::Int32 = 0
end

Base.@kwdef struct dsopt_scaler_info
    size::UInt64 = 56
    scale::Float64 = 0
    dynamic::Float64 = 0
    updates::Int64 = 0
    last_overflow::Int64 = 0
    hysteresis::Int32 = 0
    overridden::Int32 = 0
    failures::Int32 = 0
    skipped_in_row::Int32 = 0
end

Base.@kwdef struct dsopt_comm_table
    size::UInt64 = 80
    self::Ptr{Cvoid} = C_NULL
    rank::Int32 = 0
    ranks::Int32 = 0
    all_reduce::Ptr{Cvoid} = C_NULL
    all_to_all::Ptr{Cvoid} = C_NULL
    all_gather::Ptr{Cvoid} = C_NULL
    error::Ptr{Cvoid} = C_NULL
    abort::Ptr{Cvoid} = C_NULL
    destroy::Ptr{Cvoid} = C_NULL
    memory::Int32 = 0
    reserved::Int32 = 0
end

Base.@kwdef struct dsopt_comm_desc
    size::UInt64 = 64
    kind::Int32 = 0
    rank::Int32 = 0
    ranks::Int32 = 0
    timeout_ms::Int32 = 0
    id::Ptr{Cvoid} = C_NULL
    id_bytes::UInt64 = 0
    table::Ptr{dsopt_comm_table} = C_NULL
    native::Ptr{Cvoid} = C_NULL
    flags::Int32 = 0
    reserved::Int32 = 0
end

Base.@kwdef struct dsopt_comm_info
    size::UInt64 = 240
    rank::Int32 = 0
    ranks::Int32 = 0
    status::Int32 = 0
    reserved::Int32 = 0
    calls::Int64 = 0
    bytes_sent::Int64 = 0
    bytes_received::Int64 = 0
    calls_of::NTuple{8,Int64} = (0, 0, 0, 0, 0, 0, 0, 0)
    sent_of::NTuple{8,Int64} = (0, 0, 0, 0, 0, 0, 0, 0)
    received_of::NTuple{8,Int64} = (0, 0, 0, 0, 0, 0, 0, 0)
end

Base.@kwdef struct dsopt_norm_result
    norm::Float64 = 0
    coefficient::Float32 = 0
    reserved::Int32 = 0
    nonfinite::Int64 = 0
    first_bad::Int64 = 0
end

Base.@kwdef struct dsopt_compressed
    size::UInt64 = 80
    tensors::Ptr{dsopt_tensor} = C_NULL
    count::Int64 = 0
    worker_error::Ptr{Float32} = C_NULL
    server_error::Ptr{Float32} = C_NULL
    workspace::Ptr{Cvoid} = C_NULL
    workspace_bytes::UInt64 = 0
    stream::Ptr{Cvoid} = C_NULL
    compat::Int32 = 0
    reserved::Int32 = 0
    node::Ptr{Cvoid} = C_NULL
end

# The functions of the library. Their addresses are looked up when the package is loaded: the library may lie anywhere.
# Pointers to structs take a Ref or an Array. A call keeps both alive, but not what their pointers lead to.
const ADDRESSES = fill(C_NULL, 57)
const NAMES = (
    :dsopt_version, :dsopt_abi_version, :dsopt_build_info, :dsopt_status_name, :dsopt_last_error, :dsopt_context_create,
    :dsopt_context_destroy, :dsopt_group_init, :dsopt_optimizer_create, :dsopt_optimizer_destroy,
    :dsopt_optimizer_retain, :dsopt_optimizer_add_group, :dsopt_optimizer_add_params, :dsopt_optimizer_set,
    :dsopt_optimizer_get, :dsopt_optimizer_count, :dsopt_optimizer_state_count, :dsopt_optimizer_state,
    :dsopt_optimizer_export, :dsopt_optimizer_import, :dsopt_optimizer_bind, :dsopt_optimizer_reset,
    :dsopt_optimizer_step, :dsopt_optimizer_apply, :dsopt_optimizer_workspace, :dsopt_optimizer_init_state,
    :dsopt_optimizer_accumulate, :dsopt_optimizer_next_reduction, :dsopt_optimizer_next_reduction_on_device,
    :dsopt_schedule_decode, :dsopt_optimizer_report, :dsopt_optimizer_save, :dsopt_optimizer_load, :dsopt_scaler_create,
    :dsopt_scaler_destroy, :dsopt_scaler_detach, :dsopt_scaler_device_scale, :dsopt_scaler_set, :dsopt_scaler_update,
    :dsopt_scaler_query, :dsopt_scaler_scale_loss, :dsopt_scaler_init_state, :dsopt_scaler_update_arrays,
    :dsopt_scaler_decode, :dsopt_comm_unique_id, :dsopt_comm_create, :dsopt_comm_query, :dsopt_comm_all_reduce,
    :dsopt_comm_abort, :dsopt_comm_destroy, :dsopt_zero_grad, :dsopt_tensors_norm, :dsopt_tensors_axpby,
    :dsopt_tensors_clamp, :dsopt_compressed_sizes, :dsopt_compressed_allreduce, :dsopt_compressed_errors,
)

function lookup(library)
    for (place, name) in enumerate(NAMES)
        ADDRESSES[place] = Libdl.dlsym(library, name)
    end
end

function dsopt_version()
    return ccall(ADDRESSES[1], Int32, ())
end

function dsopt_abi_version()
    return ccall(ADDRESSES[2], Int32, ())
end

function dsopt_build_info()
    return ccall(ADDRESSES[3], Cstring, ())
end

function dsopt_status_name(status)
    return ccall(ADDRESSES[4], Cstring, (Int32,), status)
end

function dsopt_last_error()
    return ccall(ADDRESSES[5], Cstring, ())
end

function dsopt_context_create(desc, ctx)
    return ccall(ADDRESSES[6], Int32, (Ptr{dsopt_context_desc}, Ptr{Ptr{Cvoid}}), desc, ctx)
end

function dsopt_context_destroy(ctx)
    return ccall(ADDRESSES[7], Cvoid, (Ptr{Cvoid},), ctx)
end

function dsopt_group_init(group, size, algorithm)
    return ccall(ADDRESSES[8], Int32, (Ptr{dsopt_group}, UInt64, Int32), group, size, algorithm)
end

function dsopt_optimizer_create(ctx, desc, opt)
    return ccall(ADDRESSES[9], Int32, (Ptr{Cvoid}, Ptr{dsopt_optimizer_desc}, Ptr{Ptr{Cvoid}}), ctx, desc, opt)
end

function dsopt_optimizer_destroy(opt)
    return ccall(ADDRESSES[10], Cvoid, (Ptr{Cvoid},), opt)
end

function dsopt_optimizer_retain(opt, other)
    return ccall(ADDRESSES[11], Int32, (Ptr{Cvoid}, Ptr{Ptr{Cvoid}}), opt, other)
end

function dsopt_optimizer_add_group(opt, group, params, count)
    return ccall(ADDRESSES[12], Int32, (Ptr{Cvoid}, Ptr{dsopt_group}, Ptr{dsopt_param}, Int64), opt, group, params,
                 count)
end

function dsopt_optimizer_add_params(opt, params, count)
    return ccall(ADDRESSES[13], Int32, (Ptr{Cvoid}, Ptr{dsopt_param}, Int64), opt, params, count)
end

function dsopt_optimizer_set(opt, group, key, value)
    return ccall(ADDRESSES[14], Int32, (Ptr{Cvoid}, Int32, Int32, Float64), opt, group, key, value)
end

function dsopt_optimizer_get(opt, group, key, value)
    return ccall(ADDRESSES[15], Int32, (Ptr{Cvoid}, Int32, Int32, Ptr{Float64}), opt, group, key, value)
end

function dsopt_optimizer_count(opt, groups, params)
    return ccall(ADDRESSES[16], Int32, (Ptr{Cvoid}, Ptr{Int64}, Ptr{Int64}), opt, groups, params)
end

function dsopt_optimizer_state_count(opt, count)
    return ccall(ADDRESSES[17], Int32, (Ptr{Cvoid}, Ptr{Int64}), opt, count)
end

function dsopt_optimizer_state(opt, index, info)
    return ccall(ADDRESSES[18], Int32, (Ptr{Cvoid}, Int64, Ptr{dsopt_state_info}), opt, index, info)
end

function dsopt_optimizer_export(opt, index, host, bytes)
    return ccall(ADDRESSES[19], Int32, (Ptr{Cvoid}, Int64, Ptr{Cvoid}, UInt64), opt, index, host, bytes)
end

function dsopt_optimizer_import(opt, index, host, bytes)
    return ccall(ADDRESSES[20], Int32, (Ptr{Cvoid}, Int64, Ptr{Cvoid}, UInt64), opt, index, host, bytes)
end

function dsopt_optimizer_bind(opt, what, list, count)
    return ccall(ADDRESSES[21], Int32, (Ptr{Cvoid}, Int32, Ptr{dsopt_tensor}, Int64), opt, what, list, count)
end

function dsopt_optimizer_reset(opt, what, stream)
    return ccall(ADDRESSES[22], Int32, (Ptr{Cvoid}, Int32, Ptr{Cvoid}), opt, what, stream)
end

function dsopt_optimizer_step(opt, step)
    return ccall(ADDRESSES[23], Int32, (Ptr{Cvoid}, Ptr{dsopt_step}), opt, step)
end

function dsopt_optimizer_apply(opt, step)
    return ccall(ADDRESSES[24], Int32, (Ptr{Cvoid}, Ptr{dsopt_step}), opt, step)
end

function dsopt_optimizer_workspace(opt, bytes)
    return ccall(ADDRESSES[25], Int32, (Ptr{Cvoid}, Ptr{UInt64}), opt, bytes)
end

function dsopt_optimizer_init_state(opt, params, count, state, state_count, stream)
    return ccall(ADDRESSES[26], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Ptr{dsopt_tensor}, Int64, Ptr{Cvoid}),
                 opt, params, count, state, state_count, stream)
end

function dsopt_optimizer_accumulate(opt, grads, count, stream)
    return ccall(ADDRESSES[27], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Ptr{Cvoid}), opt, grads, count, stream)
end

function dsopt_optimizer_next_reduction(opt, call, reduction)
    return ccall(ADDRESSES[28], Int32, (Ptr{Cvoid}, Int64, Ptr{Int32}), opt, call, reduction)
end

function dsopt_optimizer_next_reduction_on_device(opt, schedule, reduction, stream)
    return ccall(ADDRESSES[29], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Ptr{Int32}, Ptr{Cvoid}), opt, schedule,
                 reduction, stream)
end

function dsopt_schedule_decode(opt, words, info)
    return ccall(ADDRESSES[30], Int32, (Ptr{Cvoid}, Ptr{Int32}, Ptr{dsopt_schedule_info}), opt, words, info)
end

function dsopt_optimizer_report(opt, report)
    return ccall(ADDRESSES[31], Int32, (Ptr{Cvoid}, Ptr{dsopt_report}), opt, report)
end

function dsopt_optimizer_save(opt, path, io)
    return ccall(ADDRESSES[32], Int32, (Ptr{Cvoid}, Cstring, Ptr{dsopt_io}), opt, path, io)
end

function dsopt_optimizer_load(opt, path, io)
    return ccall(ADDRESSES[33], Int32, (Ptr{Cvoid}, Cstring, Ptr{dsopt_io}), opt, path, io)
end

function dsopt_scaler_create(ctx, desc, scaler)
    return ccall(ADDRESSES[34], Int32, (Ptr{Cvoid}, Ptr{dsopt_scaler_desc}, Ptr{Ptr{Cvoid}}), ctx, desc, scaler)
end

function dsopt_scaler_destroy(scaler)
    return ccall(ADDRESSES[35], Cvoid, (Ptr{Cvoid},), scaler)
end

function dsopt_scaler_detach(scaler)
    return ccall(ADDRESSES[36], Int32, (Ptr{Cvoid},), scaler)
end

function dsopt_scaler_device_scale(scaler)
    return ccall(ADDRESSES[37], Ptr{Float32}, (Ptr{Cvoid},), scaler)
end

function dsopt_scaler_set(scaler, what, value, stream)
    return ccall(ADDRESSES[38], Int32, (Ptr{Cvoid}, Int32, Float64, Ptr{Cvoid}), scaler, what, value, stream)
end

function dsopt_scaler_update(scaler, overflow, stream)
    return ccall(ADDRESSES[39], Int32, (Ptr{Cvoid}, Ptr{Int32}, Ptr{Cvoid}), scaler, overflow, stream)
end

function dsopt_scaler_query(scaler, info)
    return ccall(ADDRESSES[40], Int32, (Ptr{Cvoid}, Ptr{dsopt_scaler_info}), scaler, info)
end

function dsopt_scaler_scale_loss(scaler, loss, stream)
    return ccall(ADDRESSES[41], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Ptr{Cvoid}), scaler, loss, stream)
end

function dsopt_scaler_init_state(scaler, state, count, stream)
    return ccall(ADDRESSES[42], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Ptr{Cvoid}), scaler, state, count, stream)
end

function dsopt_scaler_update_arrays(scaler, state, count, overflow, stream)
    return ccall(ADDRESSES[43], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Ptr{Int32}, Ptr{Cvoid}), scaler, state,
                 count, overflow, stream)
end

function dsopt_scaler_decode(words, info)
    return ccall(ADDRESSES[44], Int32, (Ptr{Int32}, Ptr{dsopt_scaler_info}), words, info)
end

function dsopt_comm_unique_id(kind, id, bytes)
    return ccall(ADDRESSES[45], Int32, (Int32, Ptr{Cvoid}, Ptr{UInt64}), kind, id, bytes)
end

function dsopt_comm_create(ctx, desc, comm)
    return ccall(ADDRESSES[46], Int32, (Ptr{Cvoid}, Ptr{dsopt_comm_desc}, Ptr{Ptr{Cvoid}}), ctx, desc, comm)
end

function dsopt_comm_query(comm, info)
    return ccall(ADDRESSES[47], Int32, (Ptr{Cvoid}, Ptr{dsopt_comm_info}), comm, info)
end

function dsopt_comm_all_reduce(comm, list, count, op, stream)
    return ccall(ADDRESSES[48], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Int32, Ptr{Cvoid}), comm, list, count, op,
                 stream)
end

function dsopt_comm_abort(comm)
    return ccall(ADDRESSES[49], Cvoid, (Ptr{Cvoid},), comm)
end

function dsopt_comm_destroy(comm)
    return ccall(ADDRESSES[50], Cvoid, (Ptr{Cvoid},), comm)
end

function dsopt_zero_grad(ctx, grads, count, how, stream)
    return ccall(ADDRESSES[51], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Int32, Ptr{Cvoid}), ctx, grads, count,
                 how, stream)
end

function dsopt_tensors_norm(ctx, list, count, norm, max_norm, comm, result, stream)
    return ccall(ADDRESSES[52], Int32,
                 (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Int32, Float64, Ptr{Cvoid}, Ptr{dsopt_norm_result}, Ptr{Cvoid}),
                 ctx, list, count, norm, max_norm, comm, result, stream)
end

function dsopt_tensors_axpby(ctx, a, x, b, y, count, stream)
    return ccall(ADDRESSES[53], Int32,
                 (Ptr{Cvoid}, Ptr{Float32}, Ptr{dsopt_tensor}, Float32, Ptr{dsopt_tensor}, Int64, Ptr{Cvoid}), ctx, a,
                 x, b, y, count, stream)
end

function dsopt_tensors_clamp(ctx, list, count, limit, stream)
    return ccall(ADDRESSES[54], Int32, (Ptr{Cvoid}, Ptr{dsopt_tensor}, Int64, Float64, Ptr{Cvoid}), ctx, list, count,
                 limit, stream)
end

function dsopt_compressed_sizes(comm, args, worker, server, workspace)
    return ccall(ADDRESSES[55], Int32, (Ptr{Cvoid}, Ptr{dsopt_compressed}, Ptr{Int64}, Ptr{Int64}, Ptr{UInt64}), comm,
                 args, worker, server, workspace)
end

function dsopt_compressed_allreduce(comm, args)
    return ccall(ADDRESSES[56], Int32, (Ptr{Cvoid}, Ptr{dsopt_compressed}), comm, args)
end

function dsopt_compressed_errors(comm, args, worker, server)
    return ccall(ADDRESSES[57], Int32, (Ptr{Cvoid}, Ptr{dsopt_compressed}, Ptr{Float32}, Ptr{Float32}), comm, args,
                 worker, server)
end

# Name, size, and the offset of each field: the package's tests hold Julia to them.
const LAYOUT = (
    (dsopt_tensor, 24, (0, 8, 16, 20)),
    (dsopt_context_desc, 80, (0, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 76)),
    (dsopt_group, 176, (0, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168)),
    (dsopt_param, 64, (0, 24, 32, 40, 44, 48, 56, 60)),
    (dsopt_optimizer_desc, 96, (0, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 76, 80, 88)),
    (dsopt_state_info, 72, (0, 8, 16, 24, 48, 56, 60, 64)),
    (dsopt_step, 152, (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 140, 144)),
    (dsopt_schedule_info, 40, (0, 8, 12, 16, 20, 24, 28, 32, 36)),
    (dsopt_report, 216, (0, 8, 16, 24, 32, 40, 48, 56, 60, 64, 72, 80, 88, 96, 104, 112, 120, 128, 192, 200, 208, 212)),
    (dsopt_io, 80, (0, 8, 12, 16, 24, 32, 40, 48, 52, 56, 64, 72)),
    (dsopt_scaler_desc, 56, (0, 8, 12, 16, 24, 32, 40, 48, 52)),
    (dsopt_scaler_info, 56, (0, 8, 16, 24, 32, 40, 44, 48, 52)),
    (dsopt_comm_table, 80, (0, 8, 16, 20, 24, 32, 40, 48, 56, 64, 72, 76)),
    (dsopt_comm_desc, 64, (0, 8, 12, 16, 20, 24, 32, 40, 48, 56, 60)),
    (dsopt_comm_info, 240, (0, 8, 12, 16, 20, 24, 32, 40, 48, 112, 176)),
    (dsopt_norm_result, 32, (0, 8, 12, 16, 24)),
    (dsopt_compressed, 80, (0, 8, 16, 24, 32, 40, 48, 56, 64, 68, 72)),
)

end
