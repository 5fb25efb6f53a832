# SPDX-License-Identifier: Apache-2.0

"""Run `rank_program(rank)` on one thread per rank. Return the results; an exception of a rank is rethrown."""
function on_ranks(rank_program, ranks)
    results = Vector{Any}(undef, ranks)
    Threads.@threads :static for rank in 0:ranks-1
        results[rank+1] = try
            rank_program(rank)
        catch problem
            problem
        end
    end
    foreach(result -> result isa Exception && throw(result), results)
    return results
end

if Threads.nthreads() < 2
    @info "Dsopt: ranks are not tested, because Julia has one thread: set JULIA_NUM_THREADS=2"
else
    @testset "1-bit Adam on two ranks" begin
        id = Dsopt.local_id()
        models = on_ranks(2) do rank
            context = Context(threads = 1)
            model = (u = values(1, 5), v = values(2, 130))
            comm = Comm(context, id, rank, 2; timeout = 300)
            state = Dsopt.setup(OnebitAdam(eta = 0.01, freeze_step = 3), model; data = comm)
            numbers = Numbers(100 + rank)
            for i in 1:8
                # Garbage and a collection on one rank, while the other rank may be waiting for it inside the library.
                gradient = (u = fill!!(numbers, zeros(Float32, 5)), v = fill!!(numbers, zeros(Float32, 130)))
                (i + rank) % 2 == 0 && GC.gc()
                Dsopt.update!(state, model, gradient)
            end
            model
        end
        @test models[1] == models[2]
        @test models[1].v != values(2, 130)
    end

    sharded_sizes = (a = (5,), b = (0, 4), c = (3, 3000), d = (130,))
    sharded_gradient(seed) = map(size -> values(seed + length(size), size...), sharded_sizes)

    @testset "parts tile, and state is the part of the rank" begin
        function look(rank; setup...)
            model = sharded_gradient(1000)
            state = Dsopt.setup(AdamW(0.01; lambda = 0.1), model; setup...)
            for i in 1:4 # with collections on one rank, as above
                (i + rank) % 2 == 0 && GC.gc()
                Dsopt.update!(state, model, sharded_gradient(10 * i))
            end
            entries = Dsopt.export_state(state)
            for (name, size) in pairs(sharded_sizes)
                parts = [Dsopt.shard(state, string(name); rank = of) for of in 0:1]
                @test sort([parts[1]; parts[2]]) == 1:prod(size)
                @test all(part -> (first(part) - 1) % 4096 == 0, parts)
                @test Dsopt.shard(state, string(name)) == parts[rank+1]
                for kind in ("exp_avg", "exp_avg_sq")
                    @test Base.size(entries["$name.$kind"]) == (length(parts[rank+1]),)
                end
            end
            @test Dsopt.export_f32(state, "c.exp_avg") == entries["c.exp_avg"]
            Dsopt.import_state!(state, entries)
            problem = thrown(() -> Dsopt.shard(state, "a"; rank = 2))
            @test problem isa DsoptError && problem.name == "DSOPT_ERR_ARGUMENT"
        end
        for over in (:data, :node)
            id = Dsopt.local_id()
            on_ranks(2) do rank
                comm = Comm(Context(threads = 1), id, rank, 2; timeout = 300)
                look(rank; shard = over, (over === :node ? (node = comm,) : (data = comm,))...)
            end
        end
    end

    @testset "files of sharded state are loaded by all ranks together" begin
        mktempdir() do folder
            paths = [joinpath(folder, "rank$rank.safetensors") for rank in 0:1]
            make(comm, model) = Dsopt.setup(AdamW(0.01), model; data = comm, shard = :data)
            function continued(state, model)
                foreach(i -> Dsopt.update!(state, model, sharded_gradient(10 * i)), 11:13)
                return model
            end
            connect(id, rank, ranks) = Comm(Context(threads = 1), id, rank, ranks; timeout = 300)
            first_id = Dsopt.local_id()
            expected, _ = on_ranks(2) do rank
                model = sharded_gradient(1000)
                state = make(connect(first_id, rank, 2), model)
                Dsopt.update!(state, model, sharded_gradient(5))
                Dsopt.save(paths[rank+1], state, model)
                continued(state, model)
            end
            second_id = Dsopt.local_id()
            models = on_ranks(2) do rank
                model = sharded_gradient(2000)
                state = make(connect(second_id, rank, 2), model)
                Dsopt.load!(paths, state, model)
                continued(state, model)
            end
            @test all(isequal(expected), models)
            model = sharded_gradient(2000)
            whole = Dsopt.setup(AdamW(0.01), model)
            problem = thrown(() -> Dsopt.load!(paths[1:1], whole, model))
            @test problem isa DsoptError && problem.name == "DSOPT_ERR_MISMATCH"
        end
    end

    @testset "Comm times out if a rank is missing" begin
        id = Dsopt.local_id()
        problem = thrown(() -> Comm(Context(), id, 0, 2; timeout = 0.2))
        @test problem isa DsoptError && problem.name == "DSOPT_ERR_TIMEOUT"
        @test thrown(() -> Comm(Context(), UInt8[1, 2], 0, 2)) isa DsoptError
    end

    @testset "update! fails after an abort" begin
        id = Dsopt.local_id()
        comms = on_ranks(rank -> Comm(Context(threads = 1), id, rank, 2), 2)
        Dsopt.abort(comms[2])
        model = (w = ones(Float32, 64),)
        state = Dsopt.setup(OnebitAdam(freeze_step = 1), model; data = comms[1])
        problem = thrown(() -> Dsopt.update!(state, model, (w = ones(Float32, 64),)))
        @test problem isa DsoptError && problem.name == "DSOPT_ERR_ABORTED"
    end
end
