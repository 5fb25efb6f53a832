# SPDX-License-Identifier: Apache-2.0
@testset "structs lie as dsopt.json says" begin
    for (type, size, offsets) in Dsopt.ABI.LAYOUT
        @test isbitstype(type)
        @test sizeof(type) == size
        @test [Int(fieldoffset(type, i)) for i in 1:fieldcount(type)] == collect(offsets)
        # A struct that can grow has its size from the start; all other bytes are zero.
        first(fieldnames(type)) === :size && @test type().size == size
    end
    @test Dsopt.version() == VersionNumber(Dsopt.ABI.VERSION)
end
