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

"""
Packed rows as a tensor with a batch of 1: (D, H, T) as (D, T, H, 1), (T, H) as (T, H, 1).
"""
struct Packed{T, N, A <: AbstractArray{T}} <: AbstractArray{T, N}
    array::A
    size::NTuple{N, Int}
    strides::NTuple{N, Int}
end
function Packed(name, x::AbstractArray{T, 3}) where {T}
    return Packed{T, 4, typeof(x)}(x, (size(x, 1), size(x, 3), size(x, 2), 1),
                                   (stride(x, 1), stride(x, 3), stride(x, 2), 0))
end
Packed(name, x) = check_axes(name, x, "(D, H, T)")

"Likewise of a value for each row, (T, H)."
packed_rows(name, ::Nothing) = nothing
function packed_rows(name, x::AbstractArray{T}) where {T}
    check_axes(name, x, "(T, H)")
    # The stride of the batch is never used, but 0 would be refused.
    return Packed{T, 3, typeof(x)}(x, (size(x)..., 1), (strides(x)..., 1))
end

Base.size(x::Packed) = x.size
Base.strides(x::Packed) = x.strides
Base.stride(x::Packed, axis::Integer) = x.strides[axis]
Base.parent(x::Packed) = x.array
address(x::Packed) = address(x.array)

"An array (D, S, H, B) as the library's tensor, of elements of which an item of the array holds so many."
function tensor(name, array::AbstractArray, code = float_code(name, array), items = 1)
    channels = size(array, 1) > 1 ? stride(array, 1) : 1
    channels == 1 ||
        throw(ArgumentError("$name: a stride of $channels along the channels; only 1"))
    return Raw.cuflash_tensor_t(data = address(array), batch_stride = items * stride(array, 4),
                                head_stride = items * stride(array, 3),
                                row_stride = items * stride(array, 2), dtype = code)
end

"The dtype of an array to compute with."
function float_code(name, array)
    code = dtype(eltype(array))
    code === nothing &&
        throw(ArgumentError("$name: $(eltype(array)); Float32, Float16 or CUFlash.BFloat16"))
    return code
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

"Of an array whose extents, but the first, may be 1 or left out; the first is contiguous."
function check_repeating(name, array, wanted)
    sizes = ntuple(axis -> size(array, axis), length(wanted))
    fits = ndims(array) <= length(wanted) && first(sizes) == first(wanted) &&
           all(sizes[axis] in (1, wanted[axis]) for axis in 2:length(wanted))
    fits || throw(DimensionMismatch("$name: size $(size(array)); the other arguments need $wanted"))
    first(sizes) > 1 && stride(array, 1) != 1 && throw(ArgumentError("$name: not contiguous"))
    return nothing
end

"The stride along an axis, 0 where one entry stands for all."
repeating_stride(array, axis) = size(array, axis) == 1 ? 0 : stride(array, axis)

function check_size(name, array, wanted)
    size(array) == wanted && return nothing
    throw(DimensionMismatch("$name: size $(size(array)); the other arguments need $wanted"))
end

"Values for sequences, contiguous: a pointer to them, or NULL."
sequence_values(name, ::Nothing, batch) = Ptr{Int32}(C_NULL)
sequence_values(name, values, batch) = dense_values(Int32, name, values, (batch,))

"An array of this type of elements and size without gaps: a pointer to it, or NULL."
dense_values(type, name, ::Nothing, wanted) = Ptr{type}(C_NULL)
function dense_values(type, name, values, wanted)
    eltype(values) === type || throw(ArgumentError("$name: $(eltype(values)); only $type"))
    check_size(name, values, wanted)
    steps = cumprod((1, wanted...))
    all(axis -> wanted[axis] <= 1 || stride(values, axis) == steps[axis], 1:length(wanted)) ||
        isempty(values) || throw(ArgumentError("$name: not contiguous"))
    return Ptr{type}(address(values))
end
