# SPDX-License-Identifier: Apache-2.0
function entry(optimizer, index)
    info = Ref(ABI.dsopt_state_info())
    check(ABI.dsopt_optimizer_state(optimizer, index, info))
    return info[]
end

"""
    export_state(state) -> Dict

Return copies of everything that a step changes except the model: keys are `"layer1.weight.exp_avg"`, or
`"optimizer.step"` for state of the whole optimizer, as in a checkpoint. Arrays of a parameter have its shape. Before
the first step there may be nothing to copy yet: state of Float16 arrays is initialized from the model.
"""
function export_state(state::State)
    found = Dict{String,Array}()
    call(state) do optimizer
        visit_entries(state, optimizer) do index, name, info, shape
            array = Array{info.tensor.dtype == ABI.DSOPT_DTYPE_F32 ? Float32 : Int32}(undef, shape)
            check(ABI.dsopt_optimizer_export(optimizer, index, array, sizeof(array)))
            found[name] = array
        end
    end
    return found
end

"""
    import_state!(state, dictionary)

Write the result of [`export_state`](@ref) to the state. Every entry must be present, with its size.
"""
function import_state!(state::State, dictionary)
    call(state) do optimizer
        arrays = Any[]
        visit_entries(state, optimizer) do index, name, info, shape
            haskey(dictionary, name) || throw(ArgumentError("$name is missing"))
            type = info.tensor.dtype == ABI.DSOPT_DTYPE_F32 ? Float32 : Int32
            array = dictionary[name]
            array isa Array{type} && size(array) == shape ||
                throw(ArgumentError("$name is a $(summary(array)), not $type of size $shape"))
            push!(arrays, (index, array))
        end
        for (index, array) in arrays # everything is checked before anything is written
            check(ABI.dsopt_optimizer_import(optimizer, index, array, sizeof(array)))
        end
    end
    return state
end

function visit_entries(visit, state, optimizer)
    count = Ref{Int64}(0)
    check(ABI.dsopt_optimizer_state_count(optimizer, count))
    for index in 0:count[]-1
        info = entry(optimizer, index)
        owner = info.param < 0 ? "optimizer" : state.names[info.param+1]
        shape = info.param < 0 ? (Int(info.tensor.numel),) : state.sizes[info.param+1]
        visit(index, string(owner, ".", unsafe_string(info.name)), info, shape)
    end
end

"""
    save(path, state)
    save(path, state, model)

Write a checkpoint, a safetensors file; with `model` its arrays too. A crash leaves the old file or the new one.
"""
save(path::AbstractString, state::State) = transfer(ABI.dsopt_optimizer_save, path, state, nothing)
save(path::AbstractString, state::State, model) = transfer(ABI.dsopt_optimizer_save, path, state, model)

"""
    load!(path, state)
    load!(path, state, model)

Read a checkpoint; with `model` its arrays too. Everything is checked before anything changes.
"""
load!(path::AbstractString, state::State) = transfer(ABI.dsopt_optimizer_load, path, state, nothing)
load!(path::AbstractString, state::State, model) = transfer(ABI.dsopt_optimizer_load, path, state, model)

# The library keeps no memory of a model, so the model is bound only for the call.
function transfer(transfer_file, path, state, model)
    io = Ref(ABI.dsopt_io(flags = model === nothing ? Int32(0) : ABI.DSOPT_IO_PARAMS))
    model === nothing && return call(optimizer -> (check(transfer_file(optimizer, String(path), io)); state), state)
    exclusively(state) do
        fill_lists!(state, model, nothing)
        params, arrays = state.params, state.arrays
        nowhere = [ABI.dsopt_tensor(C_NULL, each.numel, each.dtype, 0) for each in params]
        GC.@preserve params arrays call(state) do optimizer
            check(ABI.dsopt_optimizer_bind(optimizer, ABI.DSOPT_BIND_PARAMS, params, length(params)))
            try
                check(transfer_file(optimizer, String(path), io))
            finally
                check(ABI.dsopt_optimizer_bind(optimizer, ABI.DSOPT_BIND_PARAMS, nowhere, length(nowhere)))
            end
        end
    end
    return state
end
