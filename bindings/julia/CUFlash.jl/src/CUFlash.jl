"""
Exact attention: forward, backward and decode, through the C library libcuflash.

A Julia array `(D, S, H, B)` is the C library's tensor `[B, H, S, D]`: the same memory, named from the
other end. Nothing is permuted or copied.

    using CUFlash
    q = randn(Float32, 64, 100, 8, 2)      # head_dim, length, heads, batch
    k = randn(Float32, 64, 100, 2, 2)      # four query heads share a head of keys
    v = randn(Float32, 64, 100, 2, 2)
    o, lse = attention(q, k, v; causal = true)

`CUFlash.Raw` holds the C API as it is.
"""
module CUFlash

using Libdl

export attention, attention!, attention_backward, attention_backward!
export attention_varlen, attention_varlen!, attention_varlen_backward, attention_varlen_backward!
export attention_weights, attention_weights!
export KVCache, decode, decode!, merge_states, merge_states!

include("library.jl")

"The C API as it is; cuflash.h is its manual. Structs take their fields as keywords, zero by default."
module Raw
using ..CUFlash: symbol, zeroed
include("raw.jl")
end

include("errors.jl")
include("handle.jl")
include("arrays.jl")
include("problem.jl")
include("cache.jl")
include("operations.jl")

"The file that adds CuArrays, to include on Julia before 1.9; later ones load it by themselves."
cuda_support() = joinpath(dirname(@__DIR__), "ext", "CUFlashCUDAExt.jl")

end
