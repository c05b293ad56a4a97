# The file for CuArrays with a stand-in for CUDA.jl: which memory, which stream, which handle. What
# CUDA.jl does with a GPU is not tested here.

module CUDA
export CuArray
struct CuArray{T, N} <: AbstractArray{T, N}
    memory::Array{T, N}
end
Base.size(array::CuArray) = size(array.memory)
Base.strides(array::CuArray) = strides(array.memory)
Base.pointer(array::CuArray) = pointer(array.memory)
Base.similar(array::CuArray, ::Type{T}, dims::Dims) where {T} = CuArray(similar(array.memory, T, dims))
stream() = (handle = Ptr{Nothing}(UInt(0x1234)),)
end

@testset "CuArray, without CUDA.jl" begin
    # `using CUDA` of the file finds the stand-in.
    source = replace(read(CUFlash.cuda_support(), String), "using CUDA, CUFlash" =>
                                                           "using ..CUDA, CUFlash")
    include_string(@__MODULE__, source)
    q = CUDA.CuArray(zeros(Float32, 8, 4, 2, 1))
    @test CUFlash.place(q) === CUFlash.place(view(q, :, 1:2, :, :)) === :cuda
    @test CUFlash.stream(Val(:cuda)) == Ptr{Cvoid}(UInt(0x1234))
    tensor = CUFlash.tensor("q", q)
    @test tensor.data == Ptr{Cvoid}(pointer(q.memory))
    @test (tensor.batch_stride, tensor.head_stride, tensor.row_stride) == (64, 32, 8)
    packed = CUFlash.Packed("q", CUDA.CuArray(zeros(Float32, 8, 2, 4)))    # (D, H, T)
    @test CUFlash.place(packed) === :cuda
    tensor = CUFlash.tensor("q", packed)
    @test tensor.data == Ptr{Cvoid}(pointer(packed.array.memory))
    @test (tensor.batch_stride, tensor.head_stride, tensor.row_stride) == (0, 8, 16)
    host = zeros(Float32, 8, 4, 2, 1)
    @test_throws ArgumentError attention(q, host, host)
    @test_throws ArgumentError attention(q, q, q; handle = CUFlash.Handle(:cpu))
    # Without a GPU the default handle cannot be made; with one it refuses the stand-in's memory.
    @test_throws CUFlash.CUFlashError attention(q, q, q)
end
