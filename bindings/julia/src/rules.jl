# SPDX-License-Identifier: Apache-2.0
"""An algorithm with its hyper-parameters, with the names of Optimisers.jl if they exist there, else the library's."""
struct Rule
    group::ABI.dsopt_group
end

# Name of a keyword in the library. `beta` stands for two fields.
const FIELDS = (eta = :lr, lambda = :weight_decay, epsilon = :eps, max_norm = :max_norm, min_trust = :min_trust,
                max_trust = :max_trust, freeze_step = :freeze_step, var_interval_steps = :var_interval_steps,
                local_interval_steps = :local_interval_steps, max_local_interval = :max_local_interval,
                momentum = :momentum, dampening = :dampening, lr_decay = :lr_decay,
                initial_accumulator_value = :initial_accumulator_value, ns_steps = :ns_steps)
# Flags, and whether they are set if the keyword is true.
const FLAGS = (nesterov = (ABI.DSOPT_GROUP_NESTEROV, true),
               bias_correction = (ABI.DSOPT_GROUP_NO_BIAS_CORRECTION, false))
const MOMENTS = (f32 = ABI.DSOPT_MOMENT_F32, bf16 = ABI.DSOPT_MOMENT_BF16, bf16_random = ABI.DSOPT_MOMENT_BF16_RANDOM,
                 e4m3 = ABI.DSOPT_MOMENT_E4M3, q8 = ABI.DSOPT_MOMENT_Q8)

# Keywords whose value is a symbol, and the constants of these symbols.
const SYMBOLS = (exp_avg_format = MOMENTS, exp_avg_sq_format = MOMENTS,
                 ns_schedule = (constant = ABI.DSOPT_NS_CONSTANT, polar_express = ABI.DSOPT_NS_POLAR_EXPRESS,
                                you = ABI.DSOPT_NS_YOU),
                 adjust = (original = ABI.DSOPT_ADJUST_ORIGINAL,
                           match_rms_adamw = ABI.DSOPT_ADJUST_MATCH_RMS_ADAMW,
                           spectral_unclamped = ABI.DSOPT_ADJUST_SPECTRAL, none = ABI.DSOPT_ADJUST_NONE))

function constant_of(keyword, value)
    constants = SYMBOLS[keyword]
    value isa Symbol && haskey(constants, value) && return constants[value]
    throw(ArgumentError("$keyword is $(repr(value)), not one of $(join(repr.(keys(constants)), ", "))"))
end

const COEFFICIENTS = (:ns_a, :ns_b, :ns_c)

"""A struct with some fields replaced."""
function changed(value::T, changes) where {T}
    return T((get(changes, name, getfield(value, name)) for name in fieldnames(T))...)
end

function Rule(algorithm::Int32; keywords...)
    group = Ref(ABI.dsopt_group())
    check(ABI.dsopt_group_init(group, sizeof(ABI.dsopt_group), algorithm))
    flags = group[].flags
    changes = Dict{Symbol,Any}()
    if get(keywords, :ns_schedule, :constant) !== :constant # a preset has its own coefficients
        for name in COEFFICIENTS
            changes[name] = 0
        end
    end
    for (keyword, value) in keywords
        if keyword === :beta
            changes[:beta1], changes[:beta2] = value
        elseif haskey(FIELDS, keyword)
            changes[FIELDS[keyword]] = value
        elseif haskey(FLAGS, keyword)
            flag, sets = FLAGS[keyword]
            flags = value == sets ? flags | flag : flags & ~flag
        elseif haskey(SYMBOLS, keyword)
            changes[keyword] = constant_of(keyword, value)
        elseif keyword === :ns_dtype
            changes[:ns_dtype] = dtype_of(value)
        elseif keyword === :ns_coefficients
            value === nothing || merge!(changes, Dict(zip(COEFFICIENTS, value)))
        else
            names = join((keys(FIELDS)..., keys(FLAGS)..., keys(SYMBOLS)..., :ns_dtype, :ns_coefficients), ", ")
            throw(ArgumentError("$keyword is no hyper-parameter: there are beta, $names"))
        end
    end
    changes[:flags] = flags
    return Rule(changed(group[], changes))
end

const ADAPTIVE = "eta = 1e-3, beta = (0.9, 0.999), lambda = 0, epsilon = 1e-8, max_norm = 0, ..."
const GRADIENTS = "`exp_avg_format`, the format of the moment of gradients, is `:f32`, `:bf16`, `:bf16_random`,
     `:e4m3` or `:q8`."
const SQUARES = "`exp_avg_sq_format`, that of squares, is `:f32`, `:bf16_random` or `:q8`."
const SUM = "`exp_avg_sq_format`, the format of the sum, is `:f32` or `:bf16_random`."
for (name, algorithm, defaults, formula, formats) in (
    (:Adam, :ADAM, ADAPTIVE, "p -= eta m̂ / (sqrt(v̂) + epsilon), the decay `lambda` being added to the gradient",
     GRADIENTS * " " * SQUARES),
    (:AdamW, :ADAMW, replace(ADAPTIVE, "lambda = 0" => "lambda = 0.01"), "p -= eta (m̂ / (sqrt(v̂) + epsilon) + lambda p)",
     GRADIENTS * " " * SQUARES),
    (:Lamb, :LAMB, ADAPTIVE, "Adam with a trust ratio per array, between `min_trust` and `max_trust`",
     GRADIENTS * " " * SQUARES),
    (:SGD, :SGD, "eta = 1e-3, momentum = 0, dampening = 0, nesterov = false, lambda = 0, max_norm = 0",
     "As torch.optim.SGD: g += lambda p; b = momentum b + (1 - dampening) g, at first g; p -= eta b. With `nesterov`
     p -= eta (g + momentum b). Without momentum p -= eta g, and there is no state", GRADIENTS),
    (:AdaGrad, :ADAGRAD,
     "eta = 1e-2, lr_decay = 0, lambda = 0, initial_accumulator_value = 0, epsilon = 1e-10, max_norm = 0",
     "As torch.optim.Adagrad: g += lambda p; s += g^2; p -= eta / (1 + (t - 1) `lr_decay`) g / (sqrt(s) + epsilon),
     where s starts as `initial_accumulator_value`", SUM),
    (:Lion, :LION, "eta = 1e-4, beta = (0.9, 0.99), lambda = 0, max_norm = 0",
     "p -= eta (sign(beta[1] m + (1 - beta[1]) g) + lambda p), then m = beta[2] m + (1 - beta[2]) g", GRADIENTS),
    (:Muon, :MUON,
     "eta = 1e-3, momentum = 0.95, nesterov = true, lambda = 0.1, epsilon = 1e-7, ns_steps = 5,
             ns_coefficients = nothing, ns_schedule = :constant, ns_dtype = BFloat16, adjust = :original,
             bias_correction = false, max_norm = 0",
     "As torch.optim.Muon, for matrices: m = momentum m + (1 - momentum) g; u = (1 - momentum) g + momentum m, or m
     without `nesterov`; p -= eta (`adjust` O + lambda p), where O is u made orthogonal by `ns_steps` Newton-Schulz iterations.
     Their coefficients are `ns_coefficients`, (3.4445, -4.775, 2.0315) by default, or with `ns_schedule` five triples:
     `:polar_express` or `:you`. The inputs of their products are rounded to `ns_dtype`: Float32, Float16 or BFloat16.
     `adjust`, for a matrix of r outputs and c inputs, is `:original`, sqrt(max(1, r / c)), `:match_rms_adamw`,
     0.2 sqrt(max(r, c)), `:spectral_unclamped`, sqrt(r / c), or `:none`, 1. With `bias_correction` u is that of optax.
     Arrays with other than two dimensions need `blocks` of [`setup`](@ref), or another rule",
     "`exp_avg_format`, the format of the momentum, is `:f32`, `:bf16` or `:bf16_random`."),
    (:OnebitAdam, :ONEBIT_ADAM, ADAPTIVE, "1-bit Adam: after step `freeze_step` ranks exchange one bit per element",
     ""),
    (:ZeroOneAdam, :ZERO_ONE_ADAM, ADAPTIVE,
     "0/1 Adam: also `var_interval_steps`, `local_interval_steps`, `max_local_interval`", ""),
    (:OnebitLamb, :ONEBIT_LAMB, ADAPTIVE, "1-bit LAMB: after step `freeze_step` ranks exchange one bit per element",
     ""))
    constant = Symbol(:DSOPT_ALGORITHM_, algorithm)
    text = """
        $name(eta; keywords...)
        $name(; $defaults)

    $formula. With `max_norm` the gradients of this rule's arrays are clipped by their norm. $formats
    """
    @eval begin
        @doc $text $name(; keywords...) = Rule(ABI.$constant; keywords...)
        $name(eta::Real; keywords...) = $name(; eta = eta, keywords...)
    end
end
