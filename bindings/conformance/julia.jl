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

# Of cases 1 and 3.
make_arrays() = map(size -> zeros(Float32, size), (a = 1, b = 7, c = 4099))

function adamw()
    model, gradient = make_arrays(), make_arrays()
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

# To nearest, ties to even.
function to_bfloat16(array)
    bits = reinterpret(UInt32, array)
    return collect(reinterpret(Dsopt.BFloat16, UInt16.((bits .+ 0x7fff .+ (bits .>> 16 .& 0x1)) .>> 16)))
end

function low_precision()
    start, gradient = make_arrays(), make_arrays()
    fill_next!(Numbers(12345), start...)
    model = map(to_bfloat16, start)
    rule(exp_avg, exp_avg_sq) = AdamW(eta = 0.015625, beta = (0.9, 0.999), epsilon = 1e-8, lambda = 0.125,
                                      exp_avg_format = exp_avg, exp_avg_sq_format = exp_avg_sq)
    groups = [((name, array) -> name == "c") => rule(:q8, :q8)]
    state = Dsopt.setup(rule(:e4m3, :bf16_random), model; groups = groups, master = :remainder, seed = 7)
    numbers = Numbers(1000)
    for _ in 1:10
        fill_next!(numbers, gradient...)
        Dsopt.update!(state, model, gradient)
    end
    entries = Dsopt.export_state(state)
    kinds = ("remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    names = ["$name.$kind" for kind in kinds for name in "abc" if haskey(entries, "$name.$kind")]
    return [model..., (entries[name] for name in names)...]
end

println("julia ", digest([adamw(); on_two_ranks(); low_precision()]))
