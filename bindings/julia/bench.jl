# SPDX-License-Identifier: Apache-2.0
# bench.jl [CALL_COST]: measures the overhead of Dsopt.update!: AdamW over 148 arrays of 4 elements, whose pointers are
# read again in each step. CALL_COST is the program of bench/call_cost.c, which times the same step from C in the same
# run. Prints medians in microseconds, and the difference. Run it with DSOPT_LIBRARY and JULIA_LOAD_PATH as
# bindings/julia/check does.
using Dsopt

const TENSORS, NUMEL, WARM_UP, STEPS = 148, 4, 200, 2000

function median_cost(state, model, gradient)
    times = zeros(STEPS)
    foreach(_ -> Dsopt.update!(state, model, gradient), 1:WARM_UP)
    for i in 1:STEPS
        begun = time_ns()
        Dsopt.update!(state, model, gradient)
        times[i] = (time_ns() - begun) / 1000
    end
    return sort!(times)[STEPS÷2]
end

model = [zeros(Float32, NUMEL) for _ in 1:TENSORS]
gradient = [Float32[0.01, 0.02, 0.03, 0.04] for _ in 1:TENSORS]
julia = median_cost(Dsopt.setup(AdamW(), model), model, gradient)
println("julia ", round(julia; digits = 2))
if !isempty(ARGS)
    output = read(`$(ARGS[1])`, String)
    c = parse(Float64, split(output)[2])
    print(output)
    println("julia - c ", round(julia - c; digits = 2), ", julia / c ", round(julia / c; digits = 2))
end
