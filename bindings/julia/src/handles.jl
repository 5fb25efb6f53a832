# SPDX-License-Identifier: Apache-2.0
# Objects of the library. The garbage collector may drop them in any order, which the library allows: an object lives as
# long as anything that was made from it.

"""
A pointer to an object of the library, and how many calls are using it. `close` during a call on another thread, and
finalizers at the end of the process, must not take the object away from below that call: then the call that ends last
destroys it.
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
Destroy the object if no call uses it. Also the finalizer, which must not wait: then nobody else can have the lock.
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

`call(pointer)` while the object cannot be destroyed.
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

"""The same for an object that may be `nothing`, which the library knows as NULL."""
use(call::F, ::Nothing) where {F} = call(C_NULL)

"""Make an object: `make(out)` has a pointer written to `out`, and returns a status."""
function new_handle(make, destroy)
    out = Ref{Ptr{Cvoid}}(C_NULL)
    check(make(out))
    return Handle(out[], destroy)
end
