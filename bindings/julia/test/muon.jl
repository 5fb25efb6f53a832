# SPDX-License-Identifier: Apache-2.0

# A triple for each iteration.
const JORDAN = (3.4445, -4.7750, 2.0315)
const YOU = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
             (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))

norm_of(x) = sqrt(sum(abs2, x))

function orthogonalised(u, triples)
    size(u, 1) > size(u, 2) && return permutedims(orthogonalised(permutedims(u), triples))
    x = u ./ max(norm_of(u), 1e-7)
    for (a, b, c) in triples
        gram = x * x'
        x = a .* x .+ (b .* gram .+ c .* gram * gram) * x
    end
    return x
end

function adjustment(adjust, r, c)
    adjust === :original && return sqrt(max(1, r / c))
    adjust === :match_rms_adamw && return 0.2 * sqrt(max(r, c))
    return adjust === :spectral_unclamped ? sqrt(r / c) : 1.0
end

"""Muon in Float64 on one matrix. `moved` is the sum of the lengths of its updates."""
mutable struct ReferenceMuon
    p::Matrix{Float64}
    m::Matrix{Float64}
    t::Int
    moved::Float64
end
ReferenceMuon(p) = ReferenceMuon(p, zero(p), 0, 0.0)

function step!(rule::ReferenceMuon, g; eta = 1e-3, momentum = 0.95, nesterov = true, lambda = 0.1,
               triples = fill(JORDAN, 5), adjust = :original, bias_correction = false, transposed = false)
    rule.t += 1
    rule.m .= momentum .* rule.m .+ (1 - momentum) .* g
    r, s = nesterov ? (1 - momentum, momentum) : (0.0, 1.0)
    bias_correction && ((r, s) = (r / (1 - momentum^rule.t), s / (1 - momentum^(rule.t + 1))))
    o = orthogonalised(r .* g .+ s .* rule.m, triples)
    outputs, inputs = transposed ? reverse(size(g)) : size(g)
    rate = eta * adjustment(adjust, outputs, inputs)
    rule.p .= rule.p .* (1 - eta * lambda) .- rate .* o
    rule.moved += rate * norm_of(o)
end

"""Error after steps of an array that is cut by `views`, relative to the updates. `rule` and `reference`: keywords."""
function muon_error(array, views, rule, reference; setup...)
    model = (w = copy(array),)
    state = Dsopt.setup(Muon(; eta = 0.02, ns_dtype = Float32, rule...), model; setup...)
    references = [ReferenceMuon(Float64.(part)) for part in views(model.w)]
    for i in 1:4
        g = values(100 + i, size(array)...)
        Dsopt.update!(state, model, (w = g,))
        for (each, part) in zip(references, views(g))
            step!(each, Float64.(part); eta = 0.02, reference...)
        end
    end
    return maximum(norm_of(part .- each.p) / each.moved for (each, part) in zip(references, views(model.w)))
end
whole(x) = [x]

@testset "Muon follows the iterations in Float64" begin
    for size in ((24, 24), (16, 40), (40, 16))
        for (dtype, bound) in ((Float32, 5e-5), (Float16, 5e-3), (Dsopt.BFloat16, 4e-2))
            error = muon_error(values(1, size...), whole, (ns_dtype = dtype,), NamedTuple())
            @test error < bound
            @test (dtype === Float32) == (error < 5e-5)
        end
    end
    for size in ((16, 40), (40, 16)), options in
        ((momentum = 0.8, lambda = 0.0), (nesterov = false,), (bias_correction = true,), (adjust = :match_rms_adamw,),
         (adjust = :spectral_unclamped,), (adjust = :none,))
        @test muon_error(values(1, size...), whole, options, options) < 5e-5
    end
    for (rule, triples) in (((ns_steps = 3,), fill(JORDAN, 3)), ((ns_schedule = :you, ns_steps = 6), [YOU..., YOU[5]]),
                            ((ns_coefficients = (2.0, -1.5, 0.5),), fill((2.0, -1.5, 0.5), 5)))
        @test muon_error(values(1, 16, 40), whole, rule, (triples = triples,)) < 5e-5
    end
end

@testset "blocks of an array are matrices of their own" begin
    rows(count) = x -> [x[i:i+count-1, :] for i in 1:count:size(x, 1)]
    columns(count) = x -> [x[:, i:i+count-1] for i in 1:count:size(x, 2)]
    for (size, views, block) in (((60, 18), rows(20), (20, 18)), ((18, 60), columns(20), (18, 20)),
                                 ((20, 18, 3), x -> [x[:, :, i] for i in 1:3], (20, 18)),
                                 ((3, 3, 2, 20), x -> [reshape(x, 18, 20)], (18, 20)))
        error(reference; setup...) =
            muon_error(values(1, size...), views, NamedTuple(), reference; blocks = (name, x) -> block, setup...)
        @test error(NamedTuple()) < 5e-5
        @test error((transposed = true,); rows_are_inputs = (name, x) -> true) < 5e-5
    end
end

@testset "Muon next to another rule, and its keywords" begin
    model = (w = values(1, 20, 16), b = values(2, 20))
    groups = [((name, x) -> ndims(x) != 2) => AdamW(0.01)]
    state = Dsopt.setup(Muon(0.02; exp_avg_format = :bf16), model; groups = groups, nonfinite = :skip)
    gradient(i) = (w = values(i, 20, 16), b = values(i + 50, 20))
    before = deepcopy(model)
    foreach(i -> Dsopt.update!(state, model, gradient(i)), 1:3)
    @test model.w != before.w && model.b != before.b
    exported = Dsopt.export_state(state)
    @test eltype(exported["w.momentum_buffer"]) === Dsopt.BFloat16 && haskey(exported, "b.exp_avg")

    # A loaded state continues with the same bits.
    path = tempname()
    Dsopt.save(path, state, model)
    copied = (w = zeros(Float32, 20, 16), b = zeros(Float32, 20))
    other = Dsopt.setup(Muon(0.02; exp_avg_format = :bf16), copied; groups = groups)
    Dsopt.load!(path, other, copied)
    rm(path)
    for each in ((state, model), (other, copied))
        Dsopt.adjust!(each[1]; group = 0, adjust = :none, ns_steps = 4, ns_coefficients = (3.0, -4.0, 2.0))
        Dsopt.update!(each..., gradient(9))
        Dsopt.adjust!(each[1]; group = 0, ns_schedule = :you, nesterov = true, momentum = 0.9)
        Dsopt.update!(each..., gradient(10))
    end
    @test copied == model

    for (rule, words) in ((Muon(momentum = 1), "momentum"), (Muon(ns_steps = 0), "ns_steps"),
                          (Muon(epsilon = 2), "eps"), (Muon(ns_schedule = :you, ns_coefficients = (1, 1, 1)), "preset"),
                          (Muon(nesterov = false, bias_correction = true), "bias correction"),
                          (Muon(exp_avg_format = :q8), "Q8"))
        problem = thrown(() -> Dsopt.setup(rule, (w = model.w,)))
        @test problem isa DsoptError && occursin(words, problem.text)
    end
    for (keywords, words) in (((adjust = :large,), "adjust is :large"),
                              ((ns_schedule = "you",), "ns_schedule is \"you\""))
        problem = thrown(() -> Muon(; keywords...))
        @test problem isa ArgumentError && occursin(words, says(problem))
    end
    refusal(words; keywords...) = begin
        problem = thrown(() -> Dsopt.setup(Muon(), model; keywords...))
        problem isa DsoptError && occursin(words, problem.text)
    end
    @test refusal("'b'")
    @test refusal("cannot be cut"; groups = groups, blocks = (name, x) -> (7, 16))
    @test refusal("SPLIT_MATRICES"; groups = groups, split_matrices = true)
end

if Threads.nthreads() > 1
    @testset "ranks that split matrices have the bits of one rank" begin
        function train(context; ranks...)
            model = (a = values(1, 20, 16), b = values(2, 16, 40), c = values(3, 5))
            state = Dsopt.setup(Muon(0.02), model; groups = [((name, x) -> name == "c") => AdamW(0.01)],
                                context = context, ranks...)
            for i in 1:3
                Dsopt.update!(state, model, (a = values(i, 20, 16), b = values(i, 16, 40), c = values(i, 5)))
            end
            return model
        end
        id = Dsopt.local_id()
        models = on_ranks(2) do rank
            context = Context(threads = 1)
            comm = Comm(context, id, rank, 2; timeout = 300)
            train(context; data = comm, split_matrices = true)
        end
        @test models[1] == models[2] == train(Context(threads = 1))
    end
end
