# SPDX-License-Identifier: Apache-2.0
"""
    DsoptError(status, name, text)

A call of the library failed. `status` is its number, `name` its name such as `"DSOPT_ERR_SHAPE"`, and `text` the
reason, which names the parameter or option.
"""
struct DsoptError <: Exception
    status::Int32
    name::String
    text::String
end

Base.showerror(io::IO, error::DsoptError) = print(io, "DsoptError: ", error.text, " (", error.name, ")")

# The library keeps the text per thread, so it is read before another task could run on this thread.
@noinline function failure(status)
    return DsoptError(status, unsafe_string(ABI.dsopt_status_name(status)), unsafe_string(ABI.dsopt_last_error()))
end

check(status::Int32) = status == ABI.DSOPT_OK ? nothing : throw(failure(status))
