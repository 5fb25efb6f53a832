# SPDX-License-Identifier: Apache-2.0
@testset "hooks" begin
    run_pieces(n, piece) = foreach(piece, 0:n-1)
    calls = Ref(0)
    counted(n, piece) = (calls[] += 1; run_pieces(n, piece))
    steps(context) = begin
        model = (w = values(1, 200000),)
        state = Dsopt.setup(AdamW(0.1), model; context = context)
        for i in 1:3
            Dsopt.update!(state, model, (w = values(10 + i, 200000),))
        end
        model.w
    end
    @test steps(Context(threads = 3, parallel_for = counted)) == steps(Context())
    @test calls[] > 0
    @test Dsopt.threads(Context(threads = 3)) == 3
    @test repr(Context(threads = 2)) == "Context(threads = 2)"

    # The call rethrows an exception of a hook, and the objects stay usable.
    fail = Ref(true)
    function sometimes(n, piece)
        fail[] && throw(KeyError("from the hook"))
        run_pieces(n, piece)
    end
    model = (w = ones(Float32, 200000),)
    state = Dsopt.setup(AdamW(0.1), model; context = Context(threads = 2, parallel_for = sometimes))
    problem = thrown(() -> Dsopt.update!(state, model, (w = ones(Float32, 200000),)))
    @test problem isa KeyError && problem.key == "from the hook"
    fail[] = false
    Dsopt.update!(state, model, (w = ones(Float32, 200000),))

    # A hook that steps the state of the running step.
    inner = Ref{Any}(nothing)
    function again(n, piece)
        inner[] === nothing || Dsopt.update!(inner[], model, nothing)
        run_pieces(n, piece)
    end
    nested = Dsopt.setup(AdamW(0.1), model; context = Context(threads = 2, parallel_for = again))
    inner[] = nested
    problem = thrown(() -> Dsopt.update!(nested, model, (w = ones(Float32, 200000),)))
    @test problem isa ArgumentError && occursin("in use", says(problem))

    # The library detects that pieces were not run.
    lazy = Dsopt.setup(AdamW(0.1), model; context = Context(threads = 2, parallel_for = (n, piece) -> nothing))
    problem = thrown(() -> Dsopt.update!(lazy, model, (w = ones(Float32, 200000),)))
    @test problem isa DsoptError && problem.name == "DSOPT_ERR_HOOK"

    messages = Tuple{Symbol,String}[]
    Context(log = (level, text) -> push!(messages, (level, text)), log_level = 4)
    @test any(((level, text),) -> level === :info && occursin("cpu backend", text), messages)
    @test thrown(() -> Context(log = (level, text) -> error("no words"), log_level = 4)) isa ErrorException
    @test thrown(() -> Comm(Context(parallel_for = run_pieces), Dsopt.local_id(), 0, 2)) isa ArgumentError
end
