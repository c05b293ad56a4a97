# Arrays as tensors: by strides, from the other end.

"bfloat16, the upper half of a Float32. The type of the package BFloat16s works too, on Julia 1.11."
struct BFloat16
    bits::UInt16
end

Base.Float32(x::BFloat16) = reinterpret(Float32, UInt32(x.bits) << 16)
Base.Float64(x::BFloat16) = Float64(Float32(x))
Base.:(==)(x::BFloat16, y::BFloat16) = Float32(x) == Float32(y)
Base.zero(::Type{BFloat16}) = BFloat16(0x0000)
Base.show(io::IO, x::BFloat16) = print(io, "BFloat16(", Float32(x), ")")

"The nearest value, to even where two are as near."
function BFloat16(x::Real)
    value = Float32(x)
    bits = reinterpret(UInt32, value)
    isnan(value) && return BFloat16(UInt16(bits >> 16) | 0x0040)  # rounding could make it infinite
    return BFloat16(UInt16((bits + 0x7fff + (bits >> 16 & 1)) >> 16))
end

"""
    CUFlash.dtype(T)

The library's dtype for an element type, `nothing` where it has none. A package may add methods for its own.
"""
dtype(::Type) = nothing
dtype(::Type{Float32}) = Raw.CUFLASH_F32
dtype(::Type{Float16}) = Raw.CUFLASH_F16
dtype(::Type{BFloat16}) = Raw.CUFLASH_BF16
if isdefined(Core, :BFloat16)
    dtype(::Type{Core.BFloat16}) = Raw.CUFLASH_BF16
end

"Where an array's memory is: :cpu or, with CUDA.jl, :cuda. Views are where their parents are."
place(::Array) = :cpu
place(other) = throw(ArgumentError("$(typeof(other)) is no array"))
function place(array::AbstractArray)
    inner = parent(array)
    inner === array && throw(ArgumentError("no memory that cuflash knows: $(typeof(array))"))
    return place(inner)
end

"The address of the first element."
address(array::AbstractArray) = address(array, Val(place(array)))
address(array, ::Val{:cpu}) = Ptr{Cvoid}(pointer(array))

"The stream of calls on arrays of a place."
stream(::Val{:cpu}) = C_NULL

"An array (D, S, H, B) as the library's tensor."
function tensor(name, array::AbstractArray{T}) where {T}
    channels = size(array, 1) > 1 ? stride(array, 1) : 1
    channels == 1 ||
        throw(ArgumentError("$name: a stride of $channels along the channels; only 1"))
    code = dtype(T)
    code === nothing &&
        throw(ArgumentError("$name: $T; Float32, Float16 or CUFlash.BFloat16"))
    return Raw.cuflash_tensor_t(data = address(array), batch_stride = stride(array, 4),
                                head_stride = stride(array, 3), row_stride = stride(array, 2),
                                dtype = code)
end

"The strides of values for rows, (S, H, B) of an array, where three zeros would mean a dense one."
function row_strides(name, array)
    eltype(array) === Float32 || throw(ArgumentError("$name: $(eltype(array)); only Float32"))
    strides = (stride(array, 3), stride(array, 2), stride(array, 1))
    any(iszero, strides) && length(array) > 1 &&
        throw(ArgumentError("$name: a stride of 0"))
    return strides
end

function check_axes(name, array, axes)
    ndims(array) == count(==(','), axes) + 1 ||
        throw(DimensionMismatch("$name: $(ndims(array)) axes; $axes"))
    return nothing
end

function check_size(name, array, wanted)
    size(array) == wanted && return nothing
    throw(DimensionMismatch("$name: size $(size(array)); the other arguments need $wanted"))
end

"Values for sequences, contiguous: a pointer to them, or NULL."
sequence_values(name, ::Nothing, batch) = Ptr{Int32}(C_NULL)
function sequence_values(name, values, batch)
    eltype(values) === Int32 || throw(ArgumentError("$name: $(eltype(values)); only Int32"))
    check_size(name, values, (batch,))
    batch > 1 && stride(values, 1) != 1 && throw(ArgumentError("$name: not contiguous"))
    return Ptr{Int32}(address(values))
end
