# SPDX-License-Identifier: Apache-2.0
@testset "errors name their subject" begin
    model = (layer = (w = ones(Float32, 4), b = ones(Float32, 2)),)
    state = Dsopt.setup(AdamW(0.1), model)
    gradient(w, b = ones(Float32, 2)) = (layer = (w = w, b = b),)
    before = deepcopy(model)
    for (gradient_of_w, type, words) in (
        (ones(Float32, 3), DimensionMismatch, r"layer\.w has size \(3,\)"),
        (ones(Float64, 4), ArgumentError, r"layer\.w has elements of Float64"),
        (ones(Int, 4), ArgumentError, r"layer\.w has elements of Int64"),
        ("text", ArgumentError, r"layer\.w is a String"))
        problem = thrown(() -> Dsopt.update!(state, model, gradient(gradient_of_w)))
        @test problem isa type && occursin(words, says(problem))
    end
    for other in ((layer = (v = ones(Float32, 4),),), (layer = Dict(:v => ones(Float32, 4)),))
        problem = thrown(() -> Dsopt.update!(state, model, other))
        @test problem isa ArgumentError && occursin("layer.v", says(problem))
    end
    # A gradient whose name is not a parameter is not silently ignored.
    problem = thrown(() -> Dsopt.update!(state, model, (layer = (v = ones(Float32, 4),),)))
    @test problem isa ArgumentError && occursin("layer.v", says(problem))

    # The model has changed since setup.
    resize!(model.layer.w, 7)
    problem = thrown(() -> Dsopt.update!(state, model, gradient(ones(Float32, 7))))
    @test problem isa DimensionMismatch && occursin("layer.w had size (4,)", says(problem))
    resize!(model.layer.w, 4)
    problem = thrown(() -> Dsopt.update!(state, (layer = (w = ones(Float32, 4),),), nothing))
    @test problem isa ArgumentError && occursin("layer.b of setup", says(problem))
    more = (layer = (w = ones(Float32, 4), b = ones(Float32, 2), c = ones(Float32, 1)),)
    problem = thrown(() -> Dsopt.update!(state, more, nothing))
    @test problem isa ArgumentError && occursin("layer.c", says(problem))
    problem = thrown(() -> Dsopt.update!(state, (layer = (w = ones(Float16, 4), b = ones(Float32, 2)),), nothing))
    @test problem isa ArgumentError && occursin("Float16", says(problem))
    @test model == before # no value has changed
    Dsopt.update!(state, model, gradient(ones(Float32, 4)))
    @test model != before

    # Types that cannot be parameters.
    lazy = view(ones(Float32, 9), 1:2:5)
    for (array, words) in ((ones(3), "Float64"), (lazy, "SubArray"), (ones(Float32, 2, 2)', "Adjoint"))
        problem = thrown(() -> Dsopt.setup(AdamW(), (a = (array,),)))
        @test problem isa ArgumentError && occursin("a.1 is a", says(problem)) && occursin(words, says(problem))
    end
    @test thrown(() -> Dsopt.setup(AdamW(), (n = 3, f = sin))) isa ArgumentError

    # Errors of the library.
    problem = thrown(() -> Dsopt.setup(AdamW(-1.0), (w = ones(Float32, 1),)))
    @test problem isa DsoptError && problem.status == 10 && problem.name == "DSOPT_ERR_ARGUMENT"
    @test occursin("lr", problem.text)
    @test says(problem) == "DsoptError: $(problem.text) (DSOPT_ERR_ARGUMENT)"
    same = ones(Float32, 3)
    problem = thrown(() -> Dsopt.setup(AdamW(), (a = same, b = (c = same,))))
    @test problem isa ArgumentError && occursin("b.c is the array of a", says(problem))
    problem = thrown(() -> Dsopt.setup(AdamW(freeze_step = 3), (w = same,)))
    @test problem isa DsoptError && occursin("freeze_step", problem.text)
    @test thrown(() -> AdamW(rate = 1)) isa ArgumentError
    @test thrown(() -> Dsopt.adjust!(state; rate = 1)) isa ArgumentError
    problem = thrown(() -> Dsopt.adjust!(state; momentum = 1))
    @test problem isa DsoptError && occursin("momentum", problem.text)
    problem = thrown(() -> Dsopt.setup(SGD(nesterov = true), (w = same,)))
    @test problem isa DsoptError && occursin("nesterov", problem.text)
    @test thrown(() -> Dsopt.adjust!(state; group = 5, eta = 1)) isa DsoptError
    @test thrown(() -> Dsopt.setup(AdamW(), (w = same,); nonfinite = :ignore)) isa ArgumentError
    @test thrown(() -> Context(threads = -1)) isa DsoptError
end

@testset "what cannot be sharded is refused" begin
    model = (w = ones(Float32, 3),)
    single(context = Context()) = Comm(context, Dsopt.local_id(), 0, 1)
    refusal(rule, words; keywords...) = begin
        problem = thrown(() -> Dsopt.setup(rule, model; keywords...))
        problem isa DsoptError && problem.name == "DSOPT_ERR_UNSUPPORTED" && occursin(words, problem.text)
    end
    @test refusal(AdamW(), "SHARD has no effect without"; shard = :data)
    @test refusal(AdamW(), "SHARD_NODE has no effect without"; shard = :node, data = single())
    @test refusal(AdamW(), "AVERAGES has no effect without"; average = true)
    @test refusal(OnebitAdam(), "1-bit family"; shard = :data, data = single())
    @test refusal(ZeroOneAdam(), "0/1 Adam is not sharded"; shard = :data, data = single())
    problem = thrown(() -> Dsopt.setup(AdamW(), model; shard = :all, data = single()))
    @test problem isa ArgumentError && occursin("shard is :all", says(problem))
    state = Dsopt.setup(AdamW(), model)
    @test Dsopt.shard(state, "w") == 1:3
    @test thrown(() -> Dsopt.shard(state, "v")) isa ArgumentError
    @test thrown(() -> Dsopt.shard(state, "w"; rank = -1)) isa ArgumentError
    problem = thrown(() -> Dsopt.shard(state, "w"; rank = 1))
    @test problem isa DsoptError && problem.name == "DSOPT_ERR_ARGUMENT"
end
