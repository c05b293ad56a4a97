# julia --project=bindings/julia/CUFlash.jl bindings/julia/CUFlash.jl/test/runtests.jl

using CUFlash, Random, Test
using CUFlash: Raw

include("reference.jl")

@testset "CUFlash" begin
    include("raw.jl")
    include("numerics.jl")
    include("features.jl")
    include("cache.jl")
    include("errors.jl")
    include("bad_input.jl")
    include("handles.jl")
    include("library.jl")
    include("cuda.jl")
end
