# SPDX-License-Identifier: Apache-2.0
# Objects of the library. The garbage collector may destroy them in any order, which the library allows: an object lives
# as long as every object that was made from it.

"""
A pointer to an object of the library, and the number of calls that use it. `close` during a call on another thread, and
finalizers at the end of the process, must not destroy the object during that call: the call that ends last destroys it.
"""
mutable struct Handle
    pointer::Ptr{Cvoid}
    destroy::Function
    lock::Threads.SpinLock
    users::Int
    closed::Bool

    function Handle(pointer, destroy)
        handle = new(pointer, destroy, Threads.SpinLock(), 0, false)
        return finalizer(finish, handle)
    end
end

"""
Destroy the object if no call uses it. Also used as the finalizer, which must not wait: no other task can hold the lock
then.
"""
function finish(handle::Handle)
    handle.closed = true
    if handle.users == 0 && handle.pointer != C_NULL
        pointer, handle.pointer = handle.pointer, C_NULL
        handle.destroy(pointer)
    end
    return nothing
end

function Base.close(handle::Handle)
    lock(handle.lock)
    try
        finish(handle)
    finally
        unlock(handle.lock)
    end
    return nothing
end

function begin_use(handle::Handle, what)
    lock(handle.lock)
    closed = handle.closed
    closed || (handle.users += 1)
    unlock(handle.lock)
    closed && throw(ArgumentError("the $what is closed"))
    return handle.pointer
end

function end_use(handle::Handle)
    lock(handle.lock)
    handle.users -= 1
    handle.closed && finish(handle)
    unlock(handle.lock)
    return nothing
end

"""
    use(call, object)

Run `call(pointer)`; the object cannot be destroyed meanwhile.
"""
function use(call::F, object) where {F}
    handle = object.handle
    pointer = begin_use(handle, kind_of(object))
    try
        return call(pointer)
    finally
        end_use(handle)
    end
end

"""The same for an optional object: `nothing` is passed as NULL."""
use(call::F, ::Nothing) where {F} = call(C_NULL)

"""Make an object: `make(out)` writes a pointer to `out` and returns a status."""
function new_handle(make, destroy)
    out = Ref{Ptr{Cvoid}}(C_NULL)
    check(make(out))
    return Handle(out[], destroy)
end
