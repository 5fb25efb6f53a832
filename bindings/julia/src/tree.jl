# SPDX-License-Identifier: Apache-2.0
# A model is any nesting of named tuples, tuples, dictionaries, arrays and structs around arrays of floats.

# `Core.BFloat16` exists since Julia 1.11.
if isdefined(Core, :BFloat16)
    const BFloat16 = Core.BFloat16
else
    primitive type BFloat16 <: AbstractFloat 16 end
    Base.show(io::IO, x::BFloat16) = print(io, "BFloat16(", repr(reinterpret(UInt16, x)), ")")
end
@doc """
Elements of bfloat16 arrays: `Core.BFloat16`, or before Julia 1.11 a type for storage only. `reinterpret` converts from
and to `UInt16`.
""" BFloat16

"""Codes of moments in `:e4m3`, for storage only: the bits of FP8 E4M3. `reinterpret` converts from and to `UInt8`."""
primitive type Float8E4M3 <: AbstractFloat 8 end
Base.show(io::IO, x::Float8E4M3) = print(io, "Float8E4M3(", repr(reinterpret(UInt8, x)), ")")

const Element = Union{Float32,Float16,BFloat16}
const Leaf = Array{<:Element}

dtype_of(::Type{Float32}) = ABI.DSOPT_DTYPE_F32
dtype_of(::Type{Float16}) = ABI.DSOPT_DTYPE_F16
dtype_of(::Type{BFloat16}) = ABI.DSOPT_DTYPE_BF16

"""Position in a model: the keys from the innermost one outwards. Formatted only for messages and names."""
struct Path
    outer::Union{Path,Nothing}
    key::Any
end

Base.print(io::IO, path::Path) = path.outer === nothing ? print(io, path.key) : print(io, path.outer, ".", path.key)
name_of(::Nothing) = "p" # the model is one array
name_of(path::Path) = string(path)

"""
    children(x)

Return the parts of a model that may hold parameters, as pairs of key and value. A method for a user-defined type can
omit parts that are not trained.
"""
children(x::NamedTuple) = pairs(x)
children(x::Tuple) = pairs(x)
# The order must be the same in every process.
children(x::AbstractDict) = sort!(collect(pairs(x)); by = pair -> string(first(pair)))
children(x::AbstractArray) = eltype(x) <: Number || eltype(x) <: AbstractString ? () : enumerate(x)
children(::Union{Number,AbstractString,Symbol,Function,Module,Type,Nothing,Missing,AbstractRange}) = ()
function children(x::T) where {T}
    return isprimitivetype(T) ? () : (name => getfield(x, name) for name in fieldnames(T) if isdefined(x, name))
end

"""
Return the gradient of a child of the model. The gradient of a model is `nothing`, a container with the same keys, or
for a struct a named tuple of its fields.
"""
child(::Nothing, key) = nothing
child(gradient::NamedTuple, key) = get(gradient, key, nothing)
child(gradient::AbstractDict, key) = get(gradient, key, nothing)
child(gradient::Union{Tuple,AbstractArray}, key) = checkbounds(Bool, 1:length(gradient), key) ? gradient[key] : nothing
child(gradient, key) = hasproperty(gradient, key) ? getproperty(gradient, key) : nothing

"""Refuse keys of a gradient that the model does not have: that gradient would be ignored."""
function check_keys(model, gradient::Union{NamedTuple,AbstractDict,Tuple}, path)
    known = Set(first(pair) for pair in children(model))
    for key in keys(gradient)
        key in known || gradient[key] === nothing ||
            throw(ArgumentError("there is a gradient for $(string(Path(path, key))), which is no part of the model"))
    end
end
check_keys(model, gradient, path) = nothing

"""Call `visit(leaf, gradient, path)` for each array of floats, in the model's order."""
function walk(visit::F, model, gradient, path = nothing) where {F}
    if model isa Leaf
        visit(model, gradient, path)
    elseif model isa AbstractArray{<:AbstractFloat} && !(model isa AbstractRange)
        throw(ArgumentError(
            "$(name_of(path)) is a $(typeof(model)): parameters are Arrays of Float32, Float16 or BFloat16"))
    else
        gradient === nothing || check_keys(model, gradient, path)
        for (key, value) in children(model)
            walk(visit, value, child(gradient, key), Path(path, key))
        end
    end
    return nothing
end

function tensor_of(array::Array{T}) where {T<:Element}
    return ABI.dsopt_tensor(Ptr{Cvoid}(pointer(array)), length(array), dtype_of(T), 0)
end

"""
Return a gradient as an array that the library can read: itself, or a dense copy of a lazy array (such as `Adjoint` or
`SubArray`).
"""
function dense(gradient, leaf, path)
    gradient isa AbstractArray ||
        throw(ArgumentError("the gradient of $(name_of(path)) is a $(typeof(gradient)), not an array"))
    eltype(gradient) <: Element || throw(ArgumentError(
        "the gradient of $(name_of(path)) has elements of $(eltype(gradient)), not Float32, Float16 or BFloat16"))
    size(gradient) == size(leaf) || throw(DimensionMismatch(
        "the gradient of $(name_of(path)) has size $(size(gradient)), the parameter $(size(leaf))"))
    return gradient isa Leaf ? gradient : Array(gradient)
end
