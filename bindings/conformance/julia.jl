# SPDX-License-Identifier: Apache-2.0
# The cases of README.md in Julia. Needs two threads.
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

# Lists of arrays are `Any[...]`: otherwise Julia converts all arrays to one type of elements.
function digest(arrays)
    hash = 0xcbf29ce484222325
    for array in arrays, byte in reinterpret(UInt8, array)
        hash = xor(hash, UInt64(byte)) * 0x00000100000001b3
    end
    return string(hash; base = 16, pad = 16)
end

const RULE = (eta = 0.015625, beta = (0.9, 0.999), epsilon = 1e-8, lambda = 0.125)

make_arrays() = map(size -> zeros(Float32, size), (a = 1, b = 7, c = 4099))

"""Steps with the next gradients, which are Float32 whatever the model has."""
function train!(state, model, numbers, steps)
    gradient = map(array -> zeros(Float32, size(array)), model)
    for _ in 1:steps
        fill_next!(numbers, gradient...)
        Dsopt.update!(state, model, gradient)
    end
end

"""State in the order of the kinds; not every array has each."""
function states(state, names, kinds)
    entries = Dsopt.export_state(state)
    return [entries["$name.$kind"] for kind in kinds for name in names if haskey(entries, "$name.$kind")]
end

function adamw()
    model = make_arrays()
    fill_next!(Numbers(12345), model...)
    state = Dsopt.setup(AdamW(; RULE...), model; max_norm = 1)
    train!(state, model, Numbers(1000), 10)
    return Any[model..., states(state, "abc", ("exp_avg", "exp_avg_sq"))...]
end

"""Run `rank_program(comm, rank)`, which returns a model and more, on two threads. The models must be the same."""
function on_two_ranks(rank_program)
    id, results = Dsopt.local_id(), Vector{Any}(undef, 2)
    Threads.@threads :static for rank in 0:1
        results[rank+1] = try
            rank_program(Comm(Context(threads = 1), id, rank, 2; timeout = 60), rank)
        catch problem
            problem
        end
    end
    foreach(result -> result isa Exception && throw(result), results)
    results[1][1] == results[2][1] || error("the two ranks end with different weights")
    return results
end

# The programs of ranks are functions of their own: variables of a closure could be shared by the threads.
function onebit_rank(comm, rank)
    model = (u = zeros(Float32, 5), v = zeros(Float32, 130))
    fill_next!(Numbers(54321), model...)
    rule = OnebitAdam(eta = 0.015625, beta = (0.9, 0.999), epsilon = 1e-8, freeze_step = 3)
    train!(Dsopt.setup(rule, model; data = comm), model, Numbers(2000 + rank), 6)
    return (model, nothing)
end

onebit() = Any[on_two_ranks(onebit_rank)[1][1]...]

# To nearest, ties to even.
function to_bfloat16(array)
    bits = reinterpret(UInt32, array)
    return collect(reinterpret(Dsopt.BFloat16, UInt16.((bits .+ 0x7fff .+ (bits .>> 16 .& 0x1)) .>> 16)))
end

function low_precision()
    start = make_arrays()
    fill_next!(Numbers(12345), start...)
    model = map(to_bfloat16, start)
    rule(exp_avg, exp_avg_sq) = AdamW(; RULE..., exp_avg_format = exp_avg, exp_avg_sq_format = exp_avg_sq)
    groups = [((name, array) -> name == "c") => rule(:q8, :q8)]
    state = Dsopt.setup(rule(:e4m3, :bf16_random), model; groups = groups, master = :remainder, seed = 7)
    train!(state, model, Numbers(1000), 10)
    kinds = ("remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    return Any[model..., states(state, "abc", kinds)...]
end

function shard_model()
    model = (a = zeros(Float32, 6), b = zeros(Float32, 9000), c = zeros(Float32, 130))
    fill_next!(Numbers(54321), model...)
    return model
end

function sharded_rank(comm, rank)
    model = shard_model()
    state = Dsopt.setup(AdamW(; RULE...), model; data = comm, shard = :data, average = true, max_norm = 1)
    train!(state, model, Numbers(3000 + rank), 5)
    return (model, [states(state, "abc", (kind,)) for kind in ("exp_avg", "exp_avg_sq")])
end

function sharded()
    (model, parts), (_, others) = on_two_ranks(sharded_rank)
    return Any[model..., parts[1]..., others[1]..., parts[2]..., others[2]...]
end

function saving_rank(comm, path)
    model, numbers = shard_model(), Numbers(4000)
    state = Dsopt.setup(AdamW(; RULE...), model; data = comm, shard = :data)
    train!(state, model, numbers, 3)
    Dsopt.save(path, state)
    return (model, numbers)
end

function resharded()
    mktempdir() do folder
        paths = [joinpath(folder, "$rank.safetensors") for rank in 0:1]
        model, numbers = on_two_ranks((comm, rank) -> saving_rank(comm, paths[rank+1]))[1]
        state = Dsopt.setup(AdamW(; RULE...), model)
        Dsopt.load!(paths, state)
        train!(state, model, numbers, 3)
        return Any[model..., states(state, "abc", ("exp_avg", "exp_avg_sq"))...]
    end
end

# Arrays of Julia have the sizes of the others in reverse order, and are used as `x * W` then.
function muon()
    names = ("qkv", "w", "bias")
    model = (qkv = zeros(Float32, 16, 48), w = zeros(Float32, 17, 20), bias = zeros(Float32, 130))
    fill_next!(Numbers(777), model...)
    rule = Muon(eta = 0.015625, momentum = 0.9375, lambda = 0.125)
    groups = [((name, array) -> name == "bias") => AdamW(; RULE..., eta = 0.0078125, lambda = 0.25, epsilon = 0)]
    blocks(name, array) = name == "qkv" ? (16, 16) : nothing
    state = Dsopt.setup(rule, model; groups = groups, blocks = blocks, rows_are_inputs = (name, array) -> true)
    train!(state, model, Numbers(888), 5)
    return Any[model..., states(state, names, ("momentum_buffer", "exp_avg", "exp_avg_sq"))...]
end

function accumulation()
    start, numbers = make_arrays(), Numbers(5000)
    fill_next!(Numbers(12345), start...)
    model = map(array -> Float16.(floor.(array .* 1024) ./ 1024), start)
    scaler = Scaler(init = 1024, window = 2)
    state = Dsopt.setup(AdamW(; RULE...), model; scaler = scaler, max_norm = 1)
    for step in 0:7
        total, factor = make_arrays(), Float32(Dsopt.scale(scaler))
        for micro in 0:2
            for (array, gradient) in zip(total, fill_next!(numbers, make_arrays()...))
                array .+= gradient .* factor
            end
            (step, micro) == (3, 1) && (total.c[1] = Inf32)
        end
        Dsopt.update!(state, model, total)
    end
    scale = Float32[Dsopt.scale(scaler)]
    return Any[model..., states(state, "abc", ("master", "exp_avg", "exp_avg_sq"))..., scale]
end

for run in (adamw, onebit, low_precision, sharded, resharded, muon, accumulation)
    println("julia ", run, " ", digest(run()))
end
