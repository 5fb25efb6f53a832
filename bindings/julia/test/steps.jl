# SPDX-License-Identifier: Apache-2.0

"""AdamW as Loshchilov and Hutter write it, in Float64."""
mutable struct ReferenceAdamW
    eta::Float64
    beta::Tuple{Float64,Float64}
    lambda::Float64
    epsilon::Float64
    t::Int
    m::Vector{Float64}
    v::Vector{Float64}
end
ReferenceAdamW(n; eta, beta = (0.9, 0.999), lambda = 0.0, epsilon = 1e-8) =
    ReferenceAdamW(eta, beta, lambda, epsilon, 0, zeros(n), zeros(n))

function step!(rule::ReferenceAdamW, p, g)
    rule.t += 1
    rule.m .= rule.beta[1] .* rule.m .+ (1 - rule.beta[1]) .* g
    rule.v .= rule.beta[2] .* rule.v .+ (1 - rule.beta[2]) .* g .^ 2
    m = rule.m ./ (1 - rule.beta[1]^rule.t)
    v = rule.v ./ (1 - rule.beta[2]^rule.t)
    p .-= rule.eta .* (m ./ (sqrt.(v) .+ rule.epsilon) .+ rule.lambda .* p)
end

@testset "AdamW matches the textbook formula" begin
    first, second = (weight = values(1, 5, 3), bias = values(2, 5)), (weight = values(3, 2, 5), bias = nothing)
    model = (layers = [first, second], scale = values(4))
    arrays = (first.weight, first.bias, second.weight, model.scale)
    flat = [Float64[x...] for x in arrays]
    references = [ReferenceAdamW(length(x); eta = 0.01, lambda = 0.1) for x in flat]
    state = Dsopt.setup(AdamW(eta = 0.01, lambda = 0.1), model)
    numbers = Numbers(5)
    for _ in 1:25
        grads = [fill!!(numbers, similar(x)) for x in arrays]
        layers = [(weight = grads[1], bias = grads[2]), (weight = grads[3], bias = nothing)]
        gradient = (layers = layers, scale = grads[4])
        result = Dsopt.update!(state, model, gradient)
        @test result === (state, model)
        foreach(step!, references, flat, [Float64[g...] for g in grads])
    end
    @test vec(model.layers[1].weight) ≈ flat[1] rtol = 1e-5
    @test model.layers[1].bias ≈ flat[2] rtol = 1e-5
    @test vec(model.layers[2].weight) ≈ flat[3] rtol = 1e-5
    @test model.scale[] ≈ flat[4][1] rtol = 1e-5
    @test Dsopt.report(state).calls == 25
    @test Dsopt.export_state(state)["layers.1.weight.exp_avg"] ≈ reshape(references[1].m, 5, 3) rtol = 1e-5
end

# A small regression compared with the reference: both must find the same line.
@testset "training finds the same line as the reference" begin
    model = Dict("w" => zeros(Float32, 2), "b" => zeros(Float32, 1))
    state = Dsopt.setup(AdamW(0.02; lambda = 0), model)
    reference, p = ReferenceAdamW(3; eta = 0.02), zeros(3)
    for i in 0:1999
        x = [i % 7 / 7, i % 5 / 5, 1]
        y = 2x[1] - 3x[2] + 1
        error = model["w"][1] * x[1] + model["w"][2] * x[2] + model["b"][1] - y
        Dsopt.update!(state, model, Dict("w" => Float32.(error .* x[1:2]), "b" => Float32[error]))
        step!(reference, p, (sum(p .* x) - y) .* x)
    end
    @test model["w"] ≈ [2, -3] atol = 0.05
    @test [model["w"]; model["b"]] ≈ p atol = 1e-3
end

@testset "every rule updates the weights" begin
    for rule in (Adam, AdamW, Lamb, Lion, OnebitAdam, ZeroOneAdam, OnebitLamb)
        model = (w = values(6, 33),)
        before = copy(model.w)
        state = Dsopt.setup(rule(0.01; beta = (0.8, 0.9)), model)
        for i in 1:3
            Dsopt.update!(state, model, (w = values(i, 33),))
        end
        @test model.w != before
        @test all(isfinite, model.w)
    end
end

"""One weight that starts as 1, after steps with these gradients, and its state."""
function trained(rule, gradients)
    model = (w = ones(Float32, 1),)
    state = Dsopt.setup(rule, model)
    for g in gradients
        Dsopt.update!(state, model, (w = Float32[g],))
    end
    return model.w[1], state
end

@testset "SGD matches PyTorch" begin
    @test trained(SGD(0.5), [0.5, -0.25])[1] == 0.875 # 1 - 0.25 + 0.125
    # b is 0.5, then 0.25 - 0.125
    @test trained(SGD(0.5; momentum = 0.5, dampening = 0.5), [0.5, -0.25])[1] == 0.6875
    # b is 0.5, then 0; g + b/2 is 0.75, then -0.25
    @test trained(SGD(0.5; momentum = 0.5, nesterov = true), [0.5, -0.25])[1] == 0.75
    w, state = trained(SGD(0.5; momentum = 0.5, nesterov = false, lambda = 0.5), [0.5, -0.25])
    @test w == 0.25 # b is 1, then 0.5 + 0
    @test Dsopt.export_state(state)["w.momentum_buffer"] == [0.5f0]
    model = (w = ones(Float32, 1),)
    Dsopt.adjust!(state; momentum = 0.25, nesterov = true, lambda = 0)
    Dsopt.update!(state, model, (w = [0.5f0],)) # b is 0.125 + 0.5
    @test model.w == [1 - 0.5f0 * (0.5f0 + 0.25f0 * 0.625f0)]
end

@testset "AdaGrad matches PyTorch" begin
    @test trained(AdaGrad(0.5; epsilon = 0.5), [3, 4])[1] ≈ 1 - 0.5 * 3 / 3.5 - 0.5 * 4 / 5.5
    w, state = trained(AdaGrad(0.5; epsilon = 0.5, lr_decay = 1, initial_accumulator_value = 16), [3, 4])
    @test w ≈ 1 - 0.5 * 3 / 5.5 - 0.25 * 4 / (sqrt(41) + 0.5)
    @test Dsopt.export_state(state)["w.sum"] == [41.0f0]
    model = (w = ones(Float32, 1),)
    Dsopt.adjust!(state; lr_decay = 0)
    Dsopt.update!(state, model, (w = [3.0f0],))
    @test model.w[1] ≈ 1 - 0.5 * 3 / (sqrt(50) + 0.5)
end

@testset "Lion matches the paper" begin
    # m is 1, then 0.625: two steps down, one up
    @test trained(Lion(0.25; beta = (0.5, 0.75)), [4, -0.5, -4])[1] == 0.75
    w, state = trained(Lion(0.25; beta = (0.5, 0.75), lambda = 0.5), [4, 0])
    @test w == 0.296875 # 1 - 0.25 * 1.5 is 0.625, less 0.25 * 1.3125
    @test Dsopt.export_state(state)["w.exp_avg"] == [0.75f0]
    @test thrown(() -> Dsopt.setup(Lion(epsilon = 1e-8), (w = ones(Float32, 1),))) isa DsoptError
end

@testset "arrays without gradients are unchanged" begin
    model = (a = (values(1, 3), values(2, 4)), b = values(3, 2))
    before = deepcopy(model)
    state = Dsopt.setup(Adam(0.1), model)
    Dsopt.update!(state, model, (a = (nothing, ones(Float32, 4)), b = nothing))
    @test model.a[1] == before.a[1] && model.b == before.b && model.a[2] != before.a[2]
    Dsopt.update!(state, model, nothing)
    Dsopt.update!(state, model, (b = ones(Float32, 2),))
    @test model.a[1] == before.a[1] && model.b != before.b
    @test vec(Dsopt.export_state(state)["optimizer.step"]) == [0, 1, 1]
end

struct Dense
    weight::Matrix{Float32}
    bias::Vector{Float32}
    activation::Function
    inputs::Int
end

@testset "structs, empty arrays, integers, lazy gradients" begin
    model = [Dense(values(1, 3, 2), values(2, 3), tanh, 2), (rows = [1, 2], none = zeros(Float32, 0, 4))]
    state = Dsopt.setup(AdamW(0.1; lambda = 0), model)
    @test state.names == ["1.weight", "1.bias", "2.none"]
    before = copy(model[1].weight)
    Dsopt.update!(state, model, [(weight = ones(Float32, 2, 3)', bias = view(ones(Float32, 9), 1:2:5)), nothing])
    @test model[1].weight ≈ before .- 0.1f0
    Dsopt.update!(state, model, (Dense(ones(Float32, 3, 2), ones(Float32, 3), tanh, 2), nothing))
    @test model[1].weight ≈ before .- 0.2f0
end

@testset "groups and adjust! change hyper-parameters" begin
    model = (w = ones(Float32, 2, 2), b = ones(Float32, 2))
    groups = [((name, x) -> ndims(x) == 1) => AdamW(eta = 0.25, lambda = 0)]
    state = Dsopt.setup(AdamW(eta = 0.5, lambda = 0.5), model; groups = groups)
    zero = (w = zeros(Float32, 2, 2), b = zeros(Float32, 2))
    Dsopt.update!(state, model, zero)
    @test model.w == fill(0.75f0, 2, 2) && model.b == ones(Float32, 2)
    Dsopt.adjust!(state; group = 1, lambda = 1.0)
    Dsopt.update!(state, model, zero)
    @test model.w == fill(0.5625f0, 2, 2) && model.b == fill(0.75f0, 2)
    Dsopt.adjust!(state, 0)
    Dsopt.adjust!(state; beta = (0.5, 0.5), epsilon = 1e-6)
    Dsopt.update!(state, model, zero)
    @test model.w == fill(0.5625f0, 2, 2) && model.b == fill(0.75f0, 2)
end

@testset "Float16 with a loss scale" begin
    scaler = Scaler(init = 2^20, window = 50)
    model = (w = zeros(Float16, 3),)
    state = Dsopt.setup(AdamW(0.02; lambda = 0), model; scaler = scaler, max_norm = 1)
    for i in 0:1999
        x = Float32[i % 7 / 7, i % 5 / 5, 1]
        error = sum(Float32.(model.w) .* x) - (2x[1] - 3x[2] + 1)
        Dsopt.update!(state, model, (w = Float16.(clamp.(Float32(Dsopt.scale(scaler)) * error .* x, -Inf32, Inf32)),))
    end
    report = Dsopt.report(state)
    @test report.skipped > 0
    @test report.loss_scale == Dsopt.scale(scaler) > 1
    @test Float32.(model.w) ≈ [2, -3, 1] atol = 0.1
    @test Dsopt.export_state(state)["w.master"] ≈ Float32.(model.w) rtol = 1e-2
    Dsopt.update!(state, model, (w = Float16[NaN, 0, 0],))
    @test Dsopt.report(state).last_skipped && Dsopt.report(state).first_bad == "w"
end
