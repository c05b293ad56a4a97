# CuArrays of CUDA.jl, on the task's own stream.
#
# Julia 1.9 and later load this file by themselves where CUFlash and CUDA are both loaded. Before:
#
#     using CUDA, CUFlash
#     include(CUFlash.cuda_support())
#
# The tests run it with a stand-in for CUDA.jl only, never on a GPU.
module CUFlashCUDAExt

using CUDA, CUFlash

CUFlash.place(::CuArray) = :cuda

CUFlash.address(array, ::Val{:cuda}) = reinterpret(Ptr{Cvoid}, UInt(pointer(array)))

CUFlash.stream(::Val{:cuda}) = reinterpret(Ptr{Cvoid}, CUDA.stream().handle)

end
