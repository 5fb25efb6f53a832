# SPDX-License-Identifier: Apache-2.0
"""
Optimizers of the dsopt library for nested containers of arrays, in the style of Optimisers.jl:

    state = Dsopt.setup(AdamW(eta = 1f-3), model)
    state, model = Dsopt.update!(state, model, gradients)

Failures of the library are a [`DsoptError`](@ref).
"""
module Dsopt

using Libdl

include("abi.jl")
include("errors.jl")
include("handles.jl")
include("hooks.jl")
include("objects.jl")
include("rules.jl")
include("tree.jl")
include("state.jl")
include("files.jl")

export Adam, AdamW, Lamb, SGD, AdaGrad, Lion, Muon, OnebitAdam, ZeroOneAdam, OnebitLamb
export Comm, Context, DsoptError, Scaler

"""Path of the library: `DSOPT_LIBRARY`, else its name, which the system looks up."""
library_path() = get(ENV, "DSOPT_LIBRARY", "libdsopt.so.$(ABI.DSOPT_ABI_VERSION)")

function __init__()
    path = library_path()
    library = try
        Libdl.dlopen(path, Libdl.RTLD_NOW | Libdl.RTLD_LOCAL)
    catch problem
        reason = problem isa ErrorException ? problem.msg : string(problem)
        error("Dsopt: libdsopt is not found. Install it, or set DSOPT_LIBRARY to the path of libdsopt.so. $reason")
    end
    # Checks the ABI version first: a library with another ABI version may lack any function.
    version = Libdl.dlsym(library, :dsopt_abi_version; throw_error = false)
    version === nothing && error("Dsopt: $path is not libdsopt")
    number = ccall(version, Int32, ())
    number == ABI.DSOPT_ABI_VERSION ||
        error("Dsopt: $path has ABI version $number, and this package needs $(ABI.DSOPT_ABI_VERSION)")
    ABI.lookup(library)
    make_callbacks()
    return nothing
end

"""Version of the loaded library."""
function version()
    number = ABI.dsopt_version()
    return VersionNumber(number ÷ 10000, number ÷ 100 % 100, number % 100)
end

end
