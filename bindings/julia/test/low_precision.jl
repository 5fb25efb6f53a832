# SPDX-License-Identifier: Apache-2.0
# Moments and masters in fewer bytes: formats, remainders, their state, conversion and refusals.

bits(x::Dsopt.BFloat16) = reinterpret(UInt16, x)
bfloat16(array) = reshape(reinterpret.(Dsopt.BFloat16, UInt16.(reinterpret(UInt32, vec(array)) .>> 16)), size(array))
to_float32(x::Dsopt.BFloat16) = reinterpret(Float32, UInt32(bits(x)) << 16)
# Level of a code, without its scale.
function to_float32(x::Dsopt.Float8E4M3)
    code = reinterpret(UInt8, x)
    magnitude = ldexp(reinterpret(Float32, UInt32(code & 0x7f) << 20), 120)
    return code & 0x80 == 0 ? magnitude : -magnitude
end

low_model() = (a = bfloat16(values(1, 7)), b = bfloat16(values(2, 7, 100))) # 1 and 3 blocks
low_gradient(i) = (a = values(100 + i, 7), b = values(200 + i, 7, 100))
low_rule(exp_avg, exp_avg_sq; keywords...) =
    AdamW(; eta = 0.01, lambda = 0.1, exp_avg_format = exp_avg, exp_avg_sq_format = exp_avg_sq, keywords...)
# The recommended formats.
low_state(model; seed = 7) = Dsopt.setup(low_rule(:e4m3, :bf16_random), model; master = :remainder, seed = seed)
steps!(state, model, range) = foreach(i -> Dsopt.update!(state, model, low_gradient(i)), range)

"""Root of the mean squared difference, relative to that of `exact`."""
difference(x, exact) = sqrt(sum(abs2, Float64.(x) .- exact) / sum(abs2, Float64.(exact)))

function refused(call, type, words)
    problem = thrown(call)
    problem isa type && occursin(words, says(problem)) && return true
    @info "not refused as expected" problem words
    return false
end

@testset "export_f32 decodes what is stored" begin
    model = low_model()
    state = low_state(model)
    steps!(state, model, 1:20)
    entries = Dsopt.export_state(state)
    @test entries["b.exp_avg"] isa Matrix{Dsopt.Float8E4M3} && size(entries["b.exp_avg"]) == (7, 100)
    @test entries["b.exp_avg_scale"] isa Vector{Float32} && size(entries["b.exp_avg_scale"]) == (3,)
    @test entries["b.exp_avg_sq"] isa Matrix{Dsopt.BFloat16} && entries["b.remainder"] isa Matrix{Int16}
    scales = [entries["b.exp_avg_scale"][(i-1)÷256+1] for i in 1:700]
    @test vec(Dsopt.export_f32(state, "b.exp_avg")) == to_float32.(vec(entries["b.exp_avg"])) .* scales
    @test Dsopt.export_f32(state, "b.exp_avg_sq") == to_float32.(entries["b.exp_avg_sq"])
    @test Dsopt.export_f32(state, "b.exp_avg_scale") == entries["b.exp_avg_scale"] # Float32 as it is
    q8 = Dsopt.setup(low_rule(:q8, :q8), low_model(); master = :remainder)
    @test Dsopt.export_state(q8)["b.exp_avg_sq"] == zeros(UInt8, 7, 100)
    @test Dsopt.export_state(q8)["b.exp_avg_sq_scale"] == zeros(Float32, 3)
end

@testset "import_f32! and import_state! restore low-precision state" begin
    model = low_model()
    state = low_state(model)
    steps!(state, model, 1:5)
    middle = deepcopy(model)
    copied = Dsopt.export_state(state)

    again = low_model()
    other = low_state(again)
    for name in ("a", "b"), kind in ("remainder", "exp_avg", "exp_avg_sq")
        Dsopt.import_f32!(other, "$name.$kind", Dsopt.export_f32(state, "$name.$kind", model), again)
    end
    @test again == middle # a remainder sets its array
    step = Dsopt.export_state(other)
    step["optimizer.step"] .= 5
    Dsopt.import_state!(other, step)

    third = deepcopy(middle)
    by_arrays = low_state(third)
    Dsopt.import_state!(by_arrays, copied)

    steps!(state, model, 6:8)
    steps!(other, again, 6:8)
    steps!(by_arrays, third, 6:8)
    @test again == third == model != middle # identical bits
    @test Dsopt.export_state(other) == Dsopt.export_state(by_arrays) == Dsopt.export_state(state)
end

@testset "f32_moments and seed reach the library" begin
    model = low_model()
    state = Dsopt.setup(low_rule(:e4m3, :bf16_random), model; f32_moments = (name, x) -> ndims(x) == 1)
    Dsopt.update!(state, model, nothing)
    entries = Dsopt.export_state(state)
    @test eltype(entries["a.exp_avg"]) == eltype(entries["a.exp_avg_sq"]) == Float32
    @test eltype(entries["b.exp_avg"]) == Dsopt.Float8E4M3 && eltype(entries["b.exp_avg_sq"]) == Dsopt.BFloat16
    @test !haskey(entries, "a.exp_avg_scale")
    function squares(seed)
        model = low_model()
        state = low_state(model; seed = seed)
        steps!(state, model, 1:3)
        return Dsopt.export_state(state)["b.exp_avg_sq"]
    end
    @test squares(7) == squares(7) != squares(8)
end

@testset "every rule trains with its formats" begin
    for (rule, entry, type) in (
        (Adam(exp_avg_format = :bf16), "exp_avg", Dsopt.BFloat16),
        (Lamb(exp_avg_sq_format = :q8), "exp_avg_sq", UInt8),
        (SGD(0.1; momentum = 0.9, exp_avg_format = :e4m3), "momentum_buffer", Dsopt.Float8E4M3),
        (AdaGrad(exp_avg_sq_format = :bf16_random), "sum", Dsopt.BFloat16),
        (Lion(exp_avg_format = :q8), "exp_avg", UInt8))
        model = low_model()
        state = Dsopt.setup(rule, model; master = :remainder)
        steps!(state, model, 1:2)
        @test model.b != low_model().b
        @test eltype(Dsopt.export_state(state)["b.$entry"]) == type
    end
end

@testset "load! converts moments only if asked" begin
    mktempdir() do folder
        path = joinpath(folder, "run.safetensors")
        exact, model = low_model(), low_model()
        reference, state = Dsopt.setup(low_rule(:f32, :f32), exact), low_state(model)
        steps!(reference, exact, 1:5)
        Dsopt.save(path, reference) # without arrays of the model
        @test refused(() -> Dsopt.load!(path, state, model; arrays = false), DsoptError, "a.exp_avg")
        @test refused(() -> Dsopt.load!(path, state; convert = true), DsoptError, "'a' has no memory")
        @test refused(() -> Dsopt.load!(path, state, model; convert = true), DsoptError, "a.param")
        @test model == low_model()
        Dsopt.load!(path, state, model; convert = true, arrays = false)
        @test Dsopt.export_f32(state, "b.remainder", model) == Dsopt.export_f32(reference, "b.master") # exact
        moment = Dsopt.export_f32(state, "b.exp_avg")
        @test moment != Dsopt.export_f32(reference, "b.exp_avg")
        @test difference(moment, Dsopt.export_f32(reference, "b.exp_avg")) < 0.05

        # And back: Float32 holds every level.
        @test refused(() -> Dsopt.save(path, state), DsoptError, "'a' has no memory")
        Dsopt.save(path, state, model)
        Dsopt.load!(path, reference; convert = true)
        @test Dsopt.export_f32(reference, "b.exp_avg") == moment
        @test Dsopt.export_f32(reference, "b.master") == Dsopt.export_f32(state, "b.remainder", model)
    end
end

@testset "formats that cannot be are refused" begin
    model = low_model()
    setup(rule; keywords...) = () -> Dsopt.setup(rule, model; keywords...)
    @test refused(() -> AdamW(exp_avg_format = :f16), ArgumentError, "exp_avg_format is :f16, not one of :f32, :bf16")
    @test refused(() -> AdamW(exp_avg_format = "e4m3"), ArgumentError, "exp_avg_format is \"e4m3\"")
    @test refused(setup(low_rule(:f32, :e4m3)), DsoptError, "exp_avg_sq_format is E4M3")
    @test refused(setup(low_rule(:f32, :bf16)), DsoptError, "exp_avg_sq_format is BF16")
    @test refused(setup(AdaGrad(exp_avg_sq_format = :q8)), DsoptError, "exp_avg_sq_format is Q8")
    @test refused(setup(AdaGrad(exp_avg_format = :q8)), DsoptError, "exp_avg_format has no effect in adagrad")
    @test refused(setup(Lion(exp_avg_sq_format = :q8)), DsoptError, "exp_avg_sq_format has no effect in lion")
    @test refused(setup(SGD(exp_avg_format = :e4m3)), DsoptError, "no effect in sgd without momentum")
    @test refused(setup(OnebitAdam(exp_avg_format = :e4m3)), DsoptError, "exp_avg_format is E4M3")
    @test refused(setup(OnebitAdam(); master = :remainder), DsoptError, "REMAINDER")
    @test refused(setup(AdamW(); f32_moments = (name, x) -> true), DsoptError, "F32_MOMENTS of parameter 'a'")
    @test refused(setup(AdamW(); master = :flat), ArgumentError, "master is :flat")
    half = (w = ones(Float16, 3),)
    @test refused(() -> Dsopt.setup(AdamW(), half; master = :remainder), DsoptError, "'w' is F16")
    codes = (w = reinterpret.(Dsopt.Float8E4M3, zeros(UInt8, 3)),)
    @test refused(() -> Dsopt.setup(AdamW(), codes), ArgumentError, "parameters are Arrays of Float32")

    state = low_state(model)
    steps!(state, model, 1:1)
    @test thrown(() -> Dsopt.adjust!(state; exp_avg_format = :f32)) isa ArgumentError
    @test refused(() -> Dsopt.export_f32(state, "a.master"), ArgumentError, "no state a.master")
    @test refused(() -> Dsopt.export_f32(state, "optimizer.step"), DsoptError, "integers")
    @test refused(() -> Dsopt.export_f32(state, "a.remainder"), DsoptError, "'a' has no memory")
    @test refused(() -> Dsopt.import_f32!(state, "a.remainder", zeros(Float32, 7)), DsoptError, "'a' has no memory")
    for array in (zeros(Float32, 6), zeros(7), zeros(Float32, 7, 1))
        @test refused(() -> Dsopt.import_f32!(state, "a.exp_avg", array), ArgumentError, "of size (7,)")
    end
    entries = Dsopt.export_state(state)
    entries["a.exp_avg"] = reinterpret.(UInt8, entries["a.exp_avg"]) # codes of another format have this type
    @test refused(() -> Dsopt.import_state!(state, entries), ArgumentError, "a.exp_avg is a 7-element")
end
