# SPDX-License-Identifier: Apache-2.0
@testset "struct layouts match dsopt.json" begin
    for (type, size, offsets) in Dsopt.ABI.LAYOUT
        @test isbitstype(type)
        @test sizeof(type) == size
        @test [Int(fieldoffset(type, i)) for i in 1:fieldcount(type)] == collect(offsets)
        # The default constructor of an extensible struct sets its size; all other bytes are zero.
        first(fieldnames(type)) === :size && @test type().size == size
    end
    @test Dsopt.version() == VersionNumber(Dsopt.ABI.VERSION)
end
