# SPDX-License-Identifier: Apache-2.0
function entry(optimizer, index)
    info = Ref(ABI.dsopt_state_info())
    check(ABI.dsopt_optimizer_state(optimizer, index, info))
    return info[]
end

# Element types of state tensors.
const ELEMENTS = Dict(ABI.DSOPT_DTYPE_F32 => Float32, ABI.DSOPT_DTYPE_BF16 => BFloat16,
                      ABI.DSOPT_DTYPE_F8_E4M3 => Float8E4M3, ABI.DSOPT_DTYPE_U8 => UInt8, ABI.DSOPT_DTYPE_I16 => Int16,
                      ABI.DSOPT_DTYPE_I32 => Int32)

"""
    export_state(state) -> Dict

Return copies of everything that a step changes except the model: keys are `"layer1.weight.exp_avg"`, or
`"optimizer.step"` for state of the whole optimizer, as in a checkpoint. Arrays of a parameter have its shape, except
scales, which have one element per 256, and vectors of sharded state, which are the part of this rank
([`shard`](@ref)). Moments are copied in their format, as Float32, [`BFloat16`](@ref),
[`Float8E4M3`](@ref) or, for `:q8`, UInt8. Before the first step there may be nothing to copy yet: state of Float16
arrays is initialized from the model.
"""
function export_state(state::State)
    found = Dict{String,Array}()
    call(state) do optimizer
        visit_entries(state, optimizer) do index, name, info, shape
            array = Array{ELEMENTS[info.tensor.dtype]}(undef, shape)
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
            type = ELEMENTS[info.tensor.dtype]
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
        whole = info.block == 1 && info.flags & ABI.DSOPT_STATE_SHARDED == 0
        shape = whole ? state.sizes[info.param+1] : (Int(info.tensor.numel),)
        visit(index, string(owner, ".", unsafe_string(info.name)), info, shape)
    end
end

function find_entry(state, optimizer, wanted)
    found = nothing
    visit_entries(state, optimizer) do index, name, info, shape
        name == wanted && (found = (index, shape))
    end
    found === nothing && throw(ArgumentError("there is no state $wanted"))
    return found
end

"""
    export_f32(state, name)
    export_f32(state, name, model)

Return a copy of one entry of [`export_state`](@ref) in Float32: a moment, whatever its format, or the master of which a
remainder is a part, for which `model` is needed. Other entries of Float32 are copied as they are.
"""
function export_f32(state::State, name::AbstractString, model = nothing)
    return with_model(state, model) do optimizer
        index, shape = find_entry(state, optimizer, name)
        array = Array{Float32}(undef, shape)
        check(ABI.dsopt_optimizer_export_f32(optimizer, index, array, length(array)))
        array
    end
end

"""
    import_f32!(state, name, array)
    import_f32!(state, name, array, model)

The reverse of [`export_f32`](@ref), rounded to nearest. A remainder also sets its array in `model`.
"""
function import_f32!(state::State, name::AbstractString, array, model = nothing)
    with_model(state, model) do optimizer
        index, shape = find_entry(state, optimizer, name)
        array isa Array{Float32} && size(array) == shape ||
            throw(ArgumentError("$name needs an Array of Float32 of size $shape, not a $(summary(array))"))
        check(ABI.dsopt_optimizer_import_f32(optimizer, index, array, length(array)))
    end
    return state
end

"""
    save(path, state)
    save(path, state, model)

Write a checkpoint, a safetensors file; with `model` its arrays too. A crash leaves the old file or the new one.
"""
function save(path::AbstractString, state::State, model = nothing)
    flags = model === nothing ? Int32(0) : ABI.DSOPT_IO_PARAMS
    return transfer(ABI.dsopt_optimizer_save, blocking_save, path, state, model, flags)
end

"""
    load!(path, state; convert = false)
    load!(path, state, model; convert = false, arrays = true)

Read a checkpoint; with `model` its arrays too. Everything is checked before anything changes. `path` may be a vector of
the files of all ranks that saved, for 1-bit rules and sharded state.

  * `convert = true`: moments that were saved in another format are converted. Otherwise they are refused.
  * `arrays = false`: arrays of the model in the file are not read. With `master = :remainder` the model still changes,
    because it is a part of the masters.
"""
function load!(path::Union{AbstractString,AbstractVector{<:AbstractString}}, state::State, model = nothing;
               convert::Bool = false, arrays::Bool = true)
    flags = (convert ? ABI.DSOPT_IO_CONVERT : Int32(0)) |
            (arrays && model !== nothing ? ABI.DSOPT_IO_PARAMS : Int32(0))
    return transfer(ABI.dsopt_optimizer_load, blocking_load, path, state, model, flags)
end

function transfer(transfer_file, blocking_file, path, state, model, flags)
    names = path isa AbstractString ? String[] : String[path...]
    pointers = Cstring[Base.unsafe_convert(Cstring, name) for name in names]
    file = path isa AbstractString ? String(path) : Cstring(C_NULL)
    GC.@preserve names pointers begin
        io = Ref(isempty(names) ? ABI.dsopt_io(flags = flags) :
                 ABI.dsopt_io(flags = flags, files = length(names), paths = pointer(pointers)))
        with_model(state, model) do optimizer
            # As in update!
            transfer_now = state.context.hooks === nothing ? blocking_file : transfer_file
            check(transfer_now(optimizer, file, io))
        end
    end
    return state
end

"""
Run `f(optimizer)`. The library keeps no memory of a model, so a model that is not `nothing` is bound only for the call.
"""
function with_model(f::F, state, model) where {F}
    model === nothing && return call(f, state)
    return exclusively(state) do
        fill_lists!(state, model, nothing)
        params, arrays = state.params, state.arrays
        nowhere = [ABI.dsopt_tensor(C_NULL, each.numel, each.dtype, 0) for each in params]
        GC.@preserve params arrays call(state) do optimizer
            check(ABI.dsopt_optimizer_bind(optimizer, ABI.DSOPT_BIND_PARAMS, params, length(params)))
            try
                f(optimizer)
            finally
                check(ABI.dsopt_optimizer_bind(optimizer, ABI.DSOPT_BIND_PARAMS, nowhere, length(nowhere)))
            end
        end
    end
end
