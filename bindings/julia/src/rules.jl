# SPDX-License-Identifier: Apache-2.0
"""An algorithm with its hyper-parameters, under the names of Optimisers.jl."""
struct Rule
    group::ABI.dsopt_group
end

# What a keyword is called in the library. `beta` stands for two fields.
const FIELDS = (eta = :lr, lambda = :weight_decay, epsilon = :eps, max_norm = :max_norm, min_trust = :min_trust,
                max_trust = :max_trust, freeze_step = :freeze_step, var_interval_steps = :var_interval_steps,
                local_interval_steps = :local_interval_steps, max_local_interval = :max_local_interval)

"""A struct with some fields replaced."""
function changed(value::T, changes) where {T}
    return T((get(changes, name, getfield(value, name)) for name in fieldnames(T))...)
end

function Rule(algorithm::Int32, flags::Int32; keywords...)
    group = Ref(ABI.dsopt_group())
    check(ABI.dsopt_group_init(group, sizeof(ABI.dsopt_group), algorithm))
    changes = Dict{Symbol,Any}(:flags => flags)
    for (keyword, value) in keywords
        if keyword === :beta
            changes[:beta1], changes[:beta2] = value
        elseif haskey(FIELDS, keyword)
            changes[FIELDS[keyword]] = value
        else
            throw(ArgumentError("$keyword is no hyper-parameter: there are beta, $(join(keys(FIELDS), ", "))"))
        end
    end
    return Rule(changed(group[], changes))
end

for (name, algorithm, formula) in (
    (:Adam, :ADAM, "p -= eta m̂ / (sqrt(v̂) + epsilon), the decay `lambda` being added to the gradient"),
    (:AdamW, :ADAMW, "p -= eta (m̂ / (sqrt(v̂) + epsilon) + lambda p)"),
    (:Lamb, :LAMB, "Adam with a trust ratio per array, between `min_trust` and `max_trust`"),
    (:OnebitAdam, :ONEBIT_ADAM, "1-bit Adam: after step `freeze_step` ranks exchange one bit per element"),
    (:ZeroOneAdam, :ZERO_ONE_ADAM, "0/1 Adam: also `var_interval_steps`, `local_interval_steps`, `max_local_interval`"),
    (:OnebitLamb, :ONEBIT_LAMB, "1-bit LAMB: after step `freeze_step` ranks exchange one bit per element"))
    constant = Symbol(:DSOPT_ALGORITHM_, algorithm)
    text = """
        $name(eta; keywords...)
        $name(; eta = 1e-3, beta = (0.9, 0.999), lambda = 0, epsilon = 1e-8, max_norm = 0, ...)

    $formula. With `max_norm` the gradients of this rule's arrays are clipped by their norm.
    """
    @eval begin
        @doc $text $name(; keywords...) = Rule(ABI.$constant, Int32(0); keywords...)
        $name(eta::Real; keywords...) = $name(; eta = eta, keywords...)
    end
end
