# SPDX-License-Identifier: Apache-2.0
@testset "checkpoints" begin
    mktempdir() do folder
        path = joinpath(folder, "run.safetensors")
        make() = (w = values(1, 6, 5), h = Float16.(values(2, 9)))
        gradient(i) = (w = values(10 + i, 6, 5), h = Float16.(values(20 + i, 9)))
        model = make()
        state = Dsopt.setup(AdamW(0.01), model)
        foreach(i -> Dsopt.update!(state, model, gradient(i)), 1:3)
        Dsopt.save(path, state, model)
        copied = Dsopt.export_state(state)
        middle = deepcopy(model)
        foreach(i -> Dsopt.update!(state, model, gradient(i)), 4:6)

        again = make()
        other = Dsopt.setup(AdamW(0.5), again)
        Dsopt.load!(path, other, again)
        @test again == middle
        foreach(i -> Dsopt.update!(other, again, gradient(i)), 4:6)
        @test again == model # identical bits

        # The same with arrays.
        third = deepcopy(middle)
        by_arrays = Dsopt.setup(AdamW(0.01), third)
        @test_throws Union{ArgumentError,DsoptError} Dsopt.import_state!(by_arrays, Dict{String,Array}())
        Dsopt.update!(by_arrays, third, nothing) # masters are initialized from the model
        Dsopt.import_state!(by_arrays, copied)
        foreach(i -> Dsopt.update!(by_arrays, third, gradient(i)), 4:6)
        @test third == model

        # A call that fails changes nothing.
        bytes = read(path)
        bytes[end-3] = xor(bytes[end-3], 0xff)
        write(path, bytes)
        problem = thrown(() -> Dsopt.load!(path, other))
        @test problem isa DsoptError && problem.name == "DSOPT_ERR_CHECKSUM"
        problem = thrown(() -> Dsopt.load!(joinpath(folder, "none"), other))
        @test problem isa DsoptError && problem.name == "DSOPT_ERR_IO"
        problem = thrown(() -> Dsopt.save(joinpath(folder, "no", "folder"), other, again))
        @test problem isa DsoptError && problem.name == "DSOPT_ERR_IO"
        Dsopt.save(path, other)
        problem = thrown(() -> Dsopt.load!(path, Dsopt.setup(AdamW(), (w = values(1, 4),))))
        @test problem isa DsoptError && problem.name == "DSOPT_ERR_MISMATCH"
    end
end
