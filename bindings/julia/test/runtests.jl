# SPDX-License-Identifier: Apache-2.0
# Run with two threads (JULIA_NUM_THREADS=2): the ranks of a comm are threads.
using Dsopt
using Test

include("support.jl")

@testset "Dsopt" begin
    include("layout.jl")
    include("steps.jl")
    include("refusals.jl")
    include("hooks.jl")
    include("files.jl")
    include("low_precision.jl")
    include("lifetime.jl")
    include("ranks.jl")
    include("muon.jl")
    include("readme.jl")
end
