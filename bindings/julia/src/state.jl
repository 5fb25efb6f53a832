# SPDX-License-Identifier: Apache-2.0
"""
Result of [`setup`](@ref): the optimizer with its state, and the lists that a step passes. One task at a time may use
it; a concurrent call throws an error.
"""
struct State
    handle::Handle
    context::Context
    scaler::Union{Scaler,Nothing}
    groups::Int
    names::Vector{String}
    sizes::Vector{Tuple{Vararg{Int}}}
    types::Vector{DataType}
    # Lists of the running call, reused by later calls.
    params::Vector{ABI.dsopt_tensor}
    grads::Vector{ABI.dsopt_tensor}
    arrays::Vector{Any}
    busy::Threads.Atomic{Bool}
end

kind_of(::State) = "state"
Base.close(state::State) = close(state.handle)
Base.show(io::IO, state::State) =
    print(io, "Dsopt.State of ", length(state.names), " arrays, ", sum(prod, state.sizes), " elements")

"""
    setup(rule, model; groups = [], scaler, max_norm, max_value, data, node, average, shard, master, f32_moments, seed,
          blocks, rows_are_inputs, split_matrices, context, ...)

Make the state of an optimizer for every array of Float32, Float16 or [`BFloat16`](@ref) in `model`. No memory of the
model is kept.

  * `groups`: pairs `choose => rule`. The first pair with `choose(name, array)` determines the rule of the array; other
    arrays have the first argument. `name` is such as `"layer1.weight"`.
  * `scaler`: a [`Scaler`](@ref) for Float16 gradients.
  * `max_norm`, `max_value`: clip all gradients by their norm, or each element.
  * `data`: a [`Comm`](@ref) of the data-parallel ranks. The 1-bit rules exchange over it. `node`: a comm of the ranks
    of this node, where `data` has one rank per node.
  * `average = true`: gradients are those of this rank, and steps average them over `data` and `node`; `nothing` then
    counts as zeros of the type of the array, which must be that of the gradients of the other ranks. `false`: the
    caller averages. The default is `true` for 1-bit rules with `data`, and else `false`.
  * `shard`: `:data` spreads the state over the ranks of `data` and `node`, `:node` over those of `node`. Each step is
    then a collective. See [`shard`](@ref).
  * `master = false`: arrays of 16 bits have no copy in Float32. `master = :remainder`: BFloat16 arrays have 16 more
    bits in place of the copy. Functions that read or write the copy then need the model.
  * `f32_moments(name, array)`: if true, the moments of the array are Float32, whatever the formats of its rule.
  * `seed`: of moments in `:bf16_random`.
  * `blocks(name, array)`, of the arrays of [`Muon`](@ref): the size `(rows, cols)` of the matrices into which the array
    is cut, each made orthogonal on its own, or `nothing`: a matrix is not cut. If `rows` is the product of the first
    sizes, every `cols` columns of that length are a matrix: `(kw kh in, out)` for a convolution of size
    `(kw, kh, in, out)`, `(out, in)` for a stack of size `(out, in, experts)`. Otherwise `rows` divides the first size,
    and a matrix is `rows` rows of `cols` columns: `(d, d)` for queries, keys and values in one array of size `(3d, d)`.
  * `rows_are_inputs(name, array)`, of the arrays of [`Muon`](@ref): true if `adjust` must take columns for outputs, as
    for convolutions. By default a matrix is used as `W * x`.
  * `split_matrices = true`: the ranks of `data`, with `node` those of a node, partition the matrices of [`Muon`](@ref).
  * `nonfinite`: policy for Inf and NaN in gradients: `:auto`, `:skip` or `:apply`.
"""
function setup(rule::Rule, model; groups = Pair[], context::Union{Context,Nothing} = nothing,
               scaler::Union{Scaler,Nothing} = nothing, data::Union{Comm,Nothing} = nothing,
               node::Union{Comm,Nothing} = nothing, max_norm = 0, max_value = 0,
               average::Union{Bool,Nothing} = nothing, shard::Union{Symbol,Nothing} = nothing,
               master::Union{Bool,Symbol} = true, f32_moments = nothing, seed::Integer = 0, blocks = nothing,
               rows_are_inputs = nothing, split_matrices::Bool = false, nonfinite::Symbol = :auto)
    master isa Bool || master === :remainder ||
        throw(ArgumentError("master is :$master, not one of true, false, :remainder"))
    haskey(NONFINITE, nonfinite) || throw(ArgumentError("nonfinite is :$nonfinite, not one of :auto, :skip, :apply"))
    shard === nothing || haskey(SHARD, shard) || throw(ArgumentError("shard is :$shard, not one of :data, :node"))
    if context === nothing
        owners = (scaler, data, node)
        first_owner = findfirst(owner -> owner !== nothing, owners)
        context = first_owner === nothing ? Context() : owners[first_owner].context
    end
    rules = Rule[rule; [last(pair) for pair in groups]]
    names, sizes, types, places, param_flags = String[], Tuple{Vararg{Int}}[], DataType[], Int32[], Int32[]
    matrices = Tuple{Int,Int}[]
    seen = IdDict{Any,String}()
    walk(model, nothing) do leaf, _, path
        haskey(seen, leaf) &&
            throw(ArgumentError("$(name_of(path)) is the array of $(seen[leaf]): one array is one parameter"))
        seen[leaf] = name_of(path)
        push!(names, name_of(path))
        push!(sizes, size(leaf))
        push!(types, eltype(leaf))
        chosen = findfirst(pair -> first(pair)(names[end], leaf), groups)
        push!(places, chosen === nothing ? 0 : chosen)
        keeps_f32 = f32_moments !== nothing && f32_moments(names[end], leaf)
        param_flag = keeps_f32 ? ABI.DSOPT_PARAM_F32_MOMENTS : Int32(0)
        matrix = (0, 0)
        if rules[places[end]+1].group.algorithm == ABI.DSOPT_ALGORITHM_MUON
            # The rows of the library are columns here.
            are_inputs = rows_are_inputs !== nothing && rows_are_inputs(names[end], leaf)
            are_inputs || (param_flag |= ABI.DSOPT_PARAM_ROWS_ARE_INPUTS)
            block = blocks === nothing ? nothing : blocks(names[end], leaf)
            block === nothing || (matrix = (block[1], block[2]))
        end
        push!(param_flags, param_flag)
        push!(matrices, matrix)
    end
    isempty(names) && throw(ArgumentError("the model has no array of Float32, Float16 or BFloat16"))
    if average === nothing
        average = data !== nothing && any(rule -> rule.group.algorithm in ONEBIT, rules)
    end
    flags = (master === false ? ABI.DSOPT_OPTIMIZER_NO_MASTER : Int32(0)) |
            (average ? ABI.DSOPT_OPTIMIZER_AVERAGES : Int32(0)) | (shard === nothing ? Int32(0) : SHARD[shard]) |
            (split_matrices ? ABI.DSOPT_OPTIMIZER_SPLIT_MATRICES : Int32(0))
    handle = with_hooks(context.hooks) do
        use(context) do ctx
            use(scaler) do scale
                use(data) do comm
                    use(node) do node_comm
                        desc = ABI.dsopt_optimizer_desc(
                            flags = flags, nonfinite = NONFINITE[nonfinite], max_norm = max_norm,
                            max_value = max_value, scaler = scale, data = comm, node = node_comm, seed = seed,
                            masters = master === :remainder ? ABI.DSOPT_MASTERS_REMAINDER :
                                      ABI.DSOPT_MASTERS_PER_TENSOR)
                        new_handle(out -> ABI.dsopt_optimizer_create(ctx, Ref(desc), out),
                                   ABI.dsopt_optimizer_destroy)
                    end
                end
            end
        end
    end
    count = length(names)
    state = State(handle, context, scaler, length(rules), names, sizes, types, fill(ABI.dsopt_tensor(), count),
                  fill(ABI.dsopt_tensor(), count), Any[], Threads.Atomic{Bool}(false))
    call(state) do optimizer
        for each in rules
            check(ABI.dsopt_optimizer_add_group(optimizer, Ref(each.group), C_NULL, 0))
        end
        # The last dimension is contiguous in C, the first one in Julia.
        dims = [Int64[reverse(size)...] for size in sizes]
        GC.@preserve names dims begin
            params = map(1:count) do i
                ABI.dsopt_param(
                    tensor = ABI.dsopt_tensor(C_NULL, prod(sizes[i]), dtype_of(types[i]), 0), name = pointer(names[i]),
                    dims = pointer(dims[i]), ndim = length(dims[i]) > 8 ? 0 : length(dims[i]), flags = param_flags[i],
                    group = places[i], rows = matrices[i][2], cols = matrices[i][1])
            end
            check(ABI.dsopt_optimizer_add_params(optimizer, params, count))
        end
    end
    return state
end

const NONFINITE = (auto = ABI.DSOPT_NONFINITE_AUTO, skip = ABI.DSOPT_NONFINITE_SKIP, apply = ABI.DSOPT_NONFINITE_APPLY)
const SHARD = (data = ABI.DSOPT_OPTIMIZER_SHARD, node = ABI.DSOPT_OPTIMIZER_SHARD_NODE)
const ONEBIT = (ABI.DSOPT_ALGORITHM_ONEBIT_ADAM, ABI.DSOPT_ALGORITHM_ZERO_ONE_ADAM, ABI.DSOPT_ALGORITHM_ONEBIT_LAMB)

"""Run `call(pointer)` on the optimizer; exceptions and messages of hooks are handled afterwards."""
call(f::F, state::State) where {F} = with_hooks(() -> use(f, state), state.context.hooks)

"""Run `f()` with exclusive use of the state's lists."""
function exclusively(f::F, state::State) where {F}
    Threads.atomic_xchg!(state.busy, true) && throw(ArgumentError("the state is in use by another task"))
    try
        return f()
    finally
        empty!(state.arrays)
        state.busy[] = false
    end
end

"""Fill the lists of parameters and gradients from a model, which must have the structure that it had in `setup`."""
function fill_lists!(state::State, model, gradient)
    index = 0
    walk(model, gradient) do leaf, gradient, path
        index += 1
        index <= length(state.names) || throw(ArgumentError("$(name_of(path)) was not in the model of setup"))
        size(leaf) == state.sizes[index] || throw(DimensionMismatch(
            "$(state.names[index]) had size $(state.sizes[index]) in setup, and $(name_of(path)) has $(size(leaf))"))
        eltype(leaf) === state.types[index] || throw(ArgumentError(
            "$(state.names[index]) was of $(state.types[index]) in setup, and $(name_of(path)) is of $(eltype(leaf))"))
        push!(state.arrays, leaf)
        state.params[index] = tensor_of(leaf)
        if gradient === nothing
            state.grads[index] = ABI.dsopt_tensor(C_NULL, length(leaf), dtype_of(eltype(leaf)), 0)
        else
            array = dense(gradient, leaf, path)
            push!(state.arrays, array)
            state.grads[index] = tensor_of(array)
        end
    end
    index == length(state.names) || throw(ArgumentError("$(state.names[index+1]) of setup is not in this model"))
    return nothing
end

"""
    update!(state, model, gradients) -> (state, model)

One step: the arrays of `model` change in place. `gradients` has the structure of the model; `nothing`, anywhere in it,
means that the arrays below are not changed; see `average` of [`setup`](@ref).
"""
function update!(state::State, model, gradient)
    exclusively(state) do
        fill_lists!(state, model, gradient)
        params, grads, arrays = state.params, state.grads, state.arrays
        GC.@preserve params grads arrays begin
            step = Ref(ABI.dsopt_step(grads = pointer(grads), count = length(grads), params = pointer(params)))
            call(state) do optimizer
                # Hooks are Julia code: with hooks this thread must not enter a GC-safe region.
                step_now = state.context.hooks === nothing ? blocking_step : ABI.dsopt_optimizer_step
                check(step_now(optimizer, step))
            end
        end
    end
    return state, model
end

# Keys of Rule's keywords.
const KEYS = Dict(:eta => ABI.DSOPT_KEY_LR, :lambda => ABI.DSOPT_KEY_WEIGHT_DECAY, :epsilon => ABI.DSOPT_KEY_EPS,
                  :max_norm => ABI.DSOPT_KEY_GROUP_MAX_NORM, :min_trust => ABI.DSOPT_KEY_MIN_TRUST,
                  :max_trust => ABI.DSOPT_KEY_MAX_TRUST, :beta1 => ABI.DSOPT_KEY_BETA1, :beta2 => ABI.DSOPT_KEY_BETA2,
                  :freeze_step => ABI.DSOPT_KEY_FREEZE_STEP, :momentum => ABI.DSOPT_KEY_MOMENTUM,
                  :dampening => ABI.DSOPT_KEY_DAMPENING, :nesterov => ABI.DSOPT_KEY_NESTEROV,
                  :lr_decay => ABI.DSOPT_KEY_LR_DECAY,
                  :initial_accumulator_value => ABI.DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE,
                  :bias_correction => ABI.DSOPT_KEY_BIAS_CORRECTION, :ns_steps => ABI.DSOPT_KEY_NS_STEPS,
                  :ns_a => ABI.DSOPT_KEY_NS_A, :ns_b => ABI.DSOPT_KEY_NS_B, :ns_c => ABI.DSOPT_KEY_NS_C,
                  :adjust => ABI.DSOPT_KEY_ADJUST, :ns_schedule => ABI.DSOPT_KEY_NS_SCHEDULE)

"""
    adjust!(state, eta; group = nothing)
    adjust!(state; group = nothing, eta, beta, lambda, epsilon, ...)

Change hyper-parameters from the next step on, of all groups or of one: group 0 is that of `setup`'s first argument, 1
the first of `groups`.
"""
adjust!(state::State, eta::Real; group = nothing) = adjust!(state; group = group, eta = eta)

function adjust!(state::State; group = nothing, keywords...)
    index = group === nothing ? ABI.DSOPT_ALL_GROUPS : Int32(group)
    changes = Pair{Symbol,Float64}[]
    for (keyword, value) in keywords
        if keyword === :beta
            append!(changes, [:beta1 => value[1], :beta2 => value[2]])
        elseif keyword === :ns_coefficients
            append!(changes, [name => x for (name, x) in zip(COEFFICIENTS, value)])
        elseif keyword in (:adjust, :ns_schedule)
            push!(changes, keyword => constant_of(keyword, value))
        elseif haskey(KEYS, keyword)
            push!(changes, keyword => value)
        else
            throw(ArgumentError("$keyword is no hyper-parameter that can change"))
        end
    end
    call(state) do optimizer
        for (keyword, value) in changes
            check(ABI.dsopt_optimizer_set(optimizer, index, KEYS[keyword], value))
        end
    end
    return state
end

"""
    shard(state, name; rank = nothing)

Return the linear indices of the array `name` whose state a data-parallel rank keeps: all of them without `shard` in
[`setup`](@ref), and `1:0` if there are none. `rank`, from 0 on, is the rank in `data` + ranks of `data` * rank in
`node`; `nothing` is this rank.
"""
function shard(state::State, name::AbstractString; rank::Union{Integer,Nothing} = nothing)
    index = findfirst(isequal(name), state.names)
    index === nothing && throw(ArgumentError("there is no array $name"))
    rank === nothing || rank >= 0 || throw(ArgumentError("rank is $rank"))
    start, numel = Ref{Int64}(0), Ref{Int64}(0)
    call(state) do optimizer
        check(ABI.dsopt_optimizer_shard(optimizer, index - 1, rank === nothing ? -1 : rank, start, numel))
    end
    return Int(start[])+1:Int(start[])+Int(numel[])
end

"""
    report(state)

Return statistics of the steps so far, as a named tuple: `calls`, `skipped`, `last_skipped`, `loss_scale`, `grad_norm`,
`first_bad` (the name of the first array with Inf or NaN in the last step, or `nothing`) and more. A norm that was not
computed is NaN.
"""
function report(state::State)
    report = Ref(ABI.dsopt_report())
    call(state) do optimizer
        check(ABI.dsopt_optimizer_report(optimizer, report))
    end
    result = report[]
    return (calls = result.calls, skipped = result.skipped, skipped_in_row = result.skipped_in_row,
            last_skipped = result.last_skipped != 0, nonfinite = result.nonfinite,
            first_bad = result.first_bad < 0 ? nothing : state.names[result.first_bad+1],
            loss_scale = result.loss_scale, scale_used = result.scale_used, grad_norm = result.grad_norm, divisor = result.divisor,
            state_bytes = result.state_bytes)
end
