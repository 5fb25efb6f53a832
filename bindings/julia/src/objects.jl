# SPDX-License-Identifier: Apache-2.0
"""
    Context(; threads = 0, parallel_for = nothing, log = nothing, log_level = 0)

Device, threads and hooks of steps. `threads = 0` is one per core. Any number of states and threads may use a context.

  * `parallel_for(n, piece)` replaces the library's threads: it must call `piece(i)` once for every `i` in `0:n-1`, and
    must not switch tasks. Its exceptions are thrown by the call that used it.
  * `log(level, text)` receives the library's messages after the call that caused them; `level` is one of `:error`,
    `:warn`, `:info`, `:trace`, and `log_level` (1 to 4) the highest.
"""
struct Context
    handle::Handle
    hooks::Union{Hooks,Nothing}
end

# The library has a pointer to the hooks as long as an object that was made from the context lives. It does not report
# the end of that, so hooks live until the process ends.
const ROOTS = Base.RefValue{Hooks}[]
const ROOTS_LOCK = ReentrantLock()

function Context(; threads::Integer = 0, parallel_for = nothing, log = nothing, log_level::Integer = 0)
    has_hooks = parallel_for !== nothing || log !== nothing
    root = Ref(Hooks(parallel_for, log))
    has_hooks && lock(() -> push!(ROOTS, root), ROOTS_LOCK)
    desc = ABI.dsopt_context_desc(
        threads = threads, log_level = log_level, user = has_hooks ? pointer_from_objref(root) : C_NULL,
        parallel_for = parallel_for === nothing ? C_NULL : CALLBACKS[1], log = log === nothing ? C_NULL : CALLBACKS[2])
    hooks = has_hooks ? root[] : nothing
    handle = with_hooks(hooks) do
        new_handle(out -> ABI.dsopt_context_create(Ref(desc), out), ABI.dsopt_context_destroy)
    end
    return Context(handle, hooks)
end

"""
    Scaler(context = Context(); init, factor, window, min, max, hysteresis, static = false)

A loss scale for Float16 gradients. Multiply the loss by [`scale`](@ref)`(scaler)`; a step divides by it, is skipped if
it finds Inf or NaN, and updates the scale. Keywords that are not passed have DeepSpeed's defaults.
"""
struct Scaler
    handle::Handle
    context::Context
end

function Scaler(context::Context = Context(); static::Bool = false, init = 0, factor = 0, window = 0, min = 0, max = 0,
                hysteresis = 0)
    desc = ABI.dsopt_scaler_desc(flags = static ? ABI.DSOPT_SCALER_STATIC : Int32(0), init = init, factor = factor,
                                 window = window, min = min, max = max, hysteresis = hysteresis)
    handle = with_hooks(context.hooks) do
        use(context) do ctx
            new_handle(out -> ABI.dsopt_scaler_create(ctx, Ref(desc), out), ABI.dsopt_scaler_destroy)
        end
    end
    return Scaler(handle, context)
end

"""Scale for the next backward pass."""
function scale(scaler::Scaler)
    info = Ref(ABI.dsopt_scaler_info())
    with_hooks(scaler.context.hooks) do
        use(pointer -> check(ABI.dsopt_scaler_query(pointer, info)), scaler)
    end
    return info[].scale
end

"""
    Comm(context, id, rank, ranks; timeout = 600)

One of several data-parallel ranks that are threads of this process, rank 0 being the first. All ranks use the bytes of
one [`local_id`](@ref), and create their comms at the same time, each on its own thread: start Julia with that many
threads. `timeout` is in seconds.
"""
struct Comm
    handle::Handle
    context::Context
end

function Comm(context::Context, id::Vector{UInt8}, rank::Integer, ranks::Integer; timeout::Real = 600)
    # The garbage collector may run while a rank waits, and a hook is Julia code that must not run at the same time.
    context.hooks === nothing || throw(ArgumentError("a context with hooks cannot have a comm of several ranks"))
    GC.@preserve id begin
        desc = Ref(ABI.dsopt_comm_desc(kind = ABI.DSOPT_COMM_KIND_LOCAL, rank = rank, ranks = ranks, id = pointer(id),
                                       id_bytes = length(id), timeout_ms = ceil(Int32, 1000 * timeout)))
        handle = use(context) do ctx
            new_handle(out -> blocking_create(ctx, desc, out), ABI.dsopt_comm_destroy)
        end
    end
    return Comm(handle, context)
end

"""Bootstrap bytes of a group of comms, the same for all ranks."""
function local_id()
    bytes = Ref{UInt64}(0)
    check(ABI.dsopt_comm_unique_id(ABI.DSOPT_COMM_KIND_LOCAL, C_NULL, bytes))
    id = zeros(UInt8, bytes[])
    check(ABI.dsopt_comm_unique_id(ABI.DSOPT_COMM_KIND_LOCAL, id, bytes))
    return id
end

"""Make every call that waits for other ranks return, on all ranks. Any thread may call it."""
abort(comm::Comm) = use(ABI.dsopt_comm_abort, comm)

kind_of(::Context) = "context"
kind_of(::Scaler) = "scaler"
kind_of(::Comm) = "comm"
for type in (:Context, :Scaler, :Comm)
    @eval Base.close(object::$type) = close(object.handle)
    @eval Base.show(io::IO, object::$type) = print(io, $type, object.handle.closed ? "(closed)" : shown(object))
end
shown(::Union{Scaler,Comm}) = "(...)"
function shown(context::Context)
    try
        return "(threads = $(threads(context)))"
    catch # another thread has closed it, or this is a child of fork()
        return "(...)"
    end
end

"""Number of work items per step, and of threads that run them, calling thread included."""
function threads(context::Context)
    info = Ref(ABI.dsopt_context_info())
    use(pointer -> check(ABI.dsopt_context_query(pointer, info)), context)
    return Int(info[].threads)
end

# Calls that wait for other ranks. If another thread collects garbage meanwhile, it would wait for this thread, and this
# thread for a rank on the other one: a deadlock. So this thread enters a GC-safe region, in which it does not access
# objects of Julia. Everything between the two calls is plain numbers: nothing there may allocate or be compiled.
const CREATE, STEP, SAVE, LOAD =
    (findfirst(isequal(Symbol(:dsopt_, name)), ABI.NAMES) for name in
     (:comm_create, :optimizer_step, :optimizer_save, :optimizer_load))

function blocking(address::Ptr{Cvoid}, ctx::Ptr{Cvoid}, desc::Ptr{ABI.dsopt_comm_desc}, out::Ptr{Ptr{Cvoid}})
    collecting = ccall(:jl_gc_safe_enter, Int8, ())
    status = ccall(address, Int32, (Ptr{Cvoid}, Ptr{ABI.dsopt_comm_desc}, Ptr{Ptr{Cvoid}}), ctx, desc, out)
    ccall(:jl_gc_safe_leave, Cvoid, (Int8,), collecting)
    return status
end

function blocking(address::Ptr{Cvoid}, optimizer::Ptr{Cvoid}, step::Ptr{ABI.dsopt_step})
    collecting = ccall(:jl_gc_safe_enter, Int8, ())
    status = ccall(address, Int32, (Ptr{Cvoid}, Ptr{ABI.dsopt_step}), optimizer, step)
    ccall(:jl_gc_safe_leave, Cvoid, (Int8,), collecting)
    return status
end

function blocking(address::Ptr{Cvoid}, optimizer::Ptr{Cvoid}, path::Cstring, io::Ptr{ABI.dsopt_io})
    collecting = ccall(:jl_gc_safe_enter, Int8, ())
    status = ccall(address, Int32, (Ptr{Cvoid}, Cstring, Ptr{ABI.dsopt_io}), optimizer, path, io)
    ccall(:jl_gc_safe_leave, Cvoid, (Int8,), collecting)
    return status
end

function blocking_create(ctx, desc, out)
    return GC.@preserve desc out blocking(
        ABI.ADDRESSES[CREATE], ctx, Base.unsafe_convert(Ptr{ABI.dsopt_comm_desc}, desc),
        Base.unsafe_convert(Ptr{Ptr{Cvoid}}, out))
end

function blocking_step(optimizer, step)
    return GC.@preserve step blocking(ABI.ADDRESSES[STEP], optimizer, Base.unsafe_convert(Ptr{ABI.dsopt_step}, step))
end

# Save and load of sharded state.
function blocking_transfer(index, optimizer, path, io)
    return GC.@preserve path io blocking(
        ABI.ADDRESSES[index], optimizer, Base.unsafe_convert(Cstring, path), Base.unsafe_convert(Ptr{ABI.dsopt_io}, io))
end
blocking_save(optimizer, path, io) = blocking_transfer(SAVE, optimizer, path, io)
blocking_load(optimizer, path, io) = blocking_transfer(LOAD, optimizer, path, io)
