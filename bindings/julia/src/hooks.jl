# SPDX-License-Identifier: Apache-2.0
# Functions of the caller inside calls of the library. The library calls `parallel_for` and `log` only from threads that
# are inside a call with that context, so they run on a thread of Julia, in the task that made the call. No exception
# may pass through C: it is stored, and thrown after the call has returned. Messages are stored for the same reason, and
# because printing may switch tasks, which must not happen inside frames of the library.

mutable struct Pending
    failure::Any # the first exception
    messages::Vector{Tuple{Symbol,String}}
end

struct Hooks
    parallel_for::Any # (n, piece) -> ...; or nothing
    log::Any # (level, text) -> ...; or nothing
end

const LEVELS = (:error, :warn, :info, :trace)
const CALLBACKS = fill(C_NULL, 2)
const PENDING = :dsopt_pending

function on_parallel_for(user::Ptr{Cvoid}, n::Int64, body::Ptr{Cvoid}, argument::Ptr{Cvoid})::Cvoid
    try
        hooks = unsafe_pointer_to_objref(user)::Base.RefValue{Hooks}
        piece = i -> ccall(body, Cvoid, (Ptr{Cvoid}, Int64), argument, i)
        hooks[].parallel_for(n, piece)
    catch problem
        keep_failure(problem)
    end
    return nothing
end

function on_log(user::Ptr{Cvoid}, level::Int32, text::Ptr{UInt8})::Cvoid
    try
        pending = get(task_local_storage(), PENDING, nothing)
        pending === nothing || push!(pending.messages, (LEVELS[level], unsafe_string(text)))
    catch problem
        keep_failure(problem)
    end
    return nothing
end

function keep_failure(problem)
    pending = get(task_local_storage(), PENDING, nothing)
    if pending !== nothing && pending.failure === nothing
        pending.failure = problem
    end
    return nothing
end

function make_callbacks()
    CALLBACKS[1] = @cfunction(on_parallel_for, Cvoid, (Ptr{Cvoid}, Int64, Ptr{Cvoid}, Ptr{Cvoid}))
    CALLBACKS[2] = @cfunction(on_log, Cvoid, (Ptr{Cvoid}, Int32, Ptr{UInt8}))
    return nothing
end

"""
Run `call()` and handle exceptions and messages of hooks afterwards. A hook's exception takes precedence over the
library's error, which only reports that there was one.
"""
function with_hooks(call::F, hooks::Union{Hooks,Nothing}) where {F}
    hooks === nothing && return call()
    pending = Pending(nothing, Tuple{Symbol,String}[])
    storage = task_local_storage()
    outer = get(storage, PENDING, nothing)
    storage[PENDING] = pending
    result = nothing
    failed = nothing
    try
        result = call()
    catch problem
        failed = problem
    finally
        outer === nothing ? delete!(storage, PENDING) : (storage[PENDING] = outer)
    end
    for (level, text) in pending.messages
        hooks.log(level, text)
    end
    pending.failure === nothing || throw(pending.failure)
    failed === nothing || throw(failed)
    return result
end
