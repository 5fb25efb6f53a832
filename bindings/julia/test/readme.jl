# SPDX-License-Identifier: Apache-2.0
@testset "the README.md program prints its output" begin
    text = read(joinpath(@__DIR__, "..", "README.md"), String)
    program = match(r"^```julia\n(.*?)^```$"ms, text)[1]
    expected = match(r"^```text\n(.*?)^```$"ms, text)[1]
    mktempdir() do folder
        write(joinpath(folder, "program.jl"), program)
        environment = merge(ENV, Dict("JULIA_LOAD_PATH" => abspath(@__DIR__, "..") * ":@stdlib"))
        command = setenv(`$(Base.julia_cmd()) --startup-file=no program.jl`, environment; dir = folder)
        @test read(command, String) == expected
        @test isfile(joinpath(folder, "run.safetensors"))
    end
end
