# SPDX-License-Identifier: Apache-2.0
# The cases of README.md in Julia. Prints `julia DIGEST`. Needs two threads.
using Dsopt

mutable struct Numbers
    x::UInt32
end

function fill_next!(numbers, arrays...)
    for array in arrays, i in eachindex(array)
        numbers.x = numbers.x * 0x0019660d + 0x3c6ef35f
        array[i] = Float32(numbers.x >> 8) * 2.0f0^-24 - 0.5f0
    end
    return arrays
end

function digest(arrays)
    hash = 0xcbf29ce484222325
    for array in arrays, byte in reinterpret(UInt8, array)
        hash = xor(hash, UInt64(byte)) * 0x00000100000001b3
    end
    return string(hash; base = 16, pad = 16)
end

function adamw()
    sizes = (1, 7, 4099)
    make() = map(size -> zeros(Float32, size), NamedTuple{(:a, :b, :c)}(sizes))
    model, gradient = make(), make()
    fill_next!(Numbers(12345), model...)
    rule = AdamW(eta = 0.015625, beta = (0.9, 0.999), epsilon = 1e-8, lambda = 0.125)
    state = Dsopt.setup(rule, model; max_norm = 1)
    numbers = Numbers(1000)
    for _ in 1:10
        fill_next!(numbers, gradient...)
        Dsopt.update!(state, model, gradient)
    end
    entries = Dsopt.export_state(state)
    return [model..., (entries["$name.$kind"] for kind in ("exp_avg", "exp_avg_sq") for name in "abc")...]
end

function onebit(id, rank)
    context = Context(threads = 1)
    model = (u = zeros(Float32, 5), v = zeros(Float32, 130))
    gradient = deepcopy(model)
    fill_next!(Numbers(54321), model...)
    rule = OnebitAdam(eta = 0.015625, beta = (0.9, 0.999), epsilon = 1e-8, freeze_step = 3)
    state = Dsopt.setup(rule, model; data = Comm(context, id, rank, 2))
    numbers = Numbers(2000 + rank)
    for _ in 1:6
        fill_next!(numbers, gradient...)
        Dsopt.update!(state, model, gradient)
    end
    return [model...]
end

function on_two_ranks()
    id, results = Dsopt.local_id(), Vector{Any}(undef, 2)
    Threads.@threads :static for rank in 0:1
        results[rank+1] = try
            onebit(id, rank)
        catch problem
            problem
        end
    end
    foreach(result -> result isa Exception && throw(result), results)
    results[1] == results[2] || error("the two ranks end with different weights")
    return results[1]
end

println("julia ", digest([adamw(); on_two_ranks()]))
