# SPDX-License-Identifier: Apache-2.0

"""The numbers of bindings/conformance: a generator whose values are exact in Float32."""
mutable struct Numbers
    x::UInt32
end

function next!(numbers::Numbers)
    numbers.x = numbers.x * 0x0019660d + 0x3c6ef35f
    return Float32(numbers.x >> 8) * 2.0f0^-24 - 0.5f0
end

fill!!(numbers::Numbers, array) = (for i in eachindex(array)
    array[i] = next!(numbers)
end; array)

values(seed, size...) = fill!!(Numbers(seed), zeros(Float32, size...))

"""The exception of a call, or nothing."""
function thrown(call)
    try
        call()
        return nothing
    catch problem
        return problem
    end
end

says(problem) = sprint(showerror, problem)
