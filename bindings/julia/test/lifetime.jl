# SPDX-License-Identifier: Apache-2.0
@testset "objects can be closed in any order" begin
    for order in ((1, 2, 3), (3, 2, 1), (2, 1, 3), (2, 3, 1))
        model = (w = ones(Float16, 5),)
        context = Context()
        scaler = Scaler(context)
        state = Dsopt.setup(Adam(), model; scaler = scaler)
        Dsopt.update!(state, model, (w = ones(Float16, 5),))
        foreach(i -> close((context, scaler, state)[i]), order)
        close(state)
        problem = thrown(() -> Dsopt.update!(state, model, nothing))
        @test problem isa ArgumentError && occursin("the state is closed", says(problem))
        @test occursin("closed", says(thrown(() -> Dsopt.scale(scaler))))
        @test occursin("closed", says(thrown(() -> Dsopt.setup(Adam(), model; context = context))))
    end
    # Garbage of many kinds, collected between and during steps.
    model = (w = ones(Float32, 100),)
    state = Dsopt.setup(Adam(), model)
    for i in 1:200
        Dsopt.setup(Adam(), model; scaler = i % 2 == 0 ? Scaler() : nothing)
        Dsopt.update!(state, model, (w = ones(Float32, 100),))
        i % 20 == 0 && GC.gc()
    end
    @test Dsopt.report(state).calls == 200
    @test occursin("1 arrays, 100 elements", sprint(show, state))
end
