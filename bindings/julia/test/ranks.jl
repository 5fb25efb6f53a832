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
