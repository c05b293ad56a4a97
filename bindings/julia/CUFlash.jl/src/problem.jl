# Keywords of the operations as fields of the C API's struct.

const KEYWORDS = """
- `causal = false`: a row sees no key after its centre.
- `window = nothing`: `(left, right)`, so many keys before and after the centre, `nothing` in it is
  without a limit.
- `align = :bottom_right`: the centre of query row `i` (from 0) is at `i + Sk - Sq`; `:top_left`: at `i`;
  an integer: at `i` plus it; a vector of `Int32`: the same for each sequence.
- `scale = 1 / sqrt(D)`: the factor of the scores.
- `deterministic = false`: the same bits from run to run.
- `batch_invariant = false`: a row's bits do not depend on its batch.
- `kernel = ""`: forces a kernel or a family by name.
- `handle`: a `CUFlash.Handle`; by default the device where the arrays are.
"""

"""
Calls `operate(handle, fields, stream)` with what the keywords mean. All arrays are kept alive and must be
in one place.
"""
function with_options(operate, arrays, q; causal = false, window = nothing,
                      align = :bottom_right, scale = nothing, deterministic = false,
                      batch_invariant = false, kernel = "", num_splits = 0, target_arch = 0,
                      handle = nothing)
    check_axes("q", q, "(D, S, H, B)")
    per_sequence = align isa AbstractVector ? align : nothing
    handle = choose_handle(handle, (arrays..., per_sequence))
    flags = UInt32(0)
    left = right = 0
    if window !== nothing
        length(window) == 2 || throw(ArgumentError("window: $window; (left, right)"))
        flags |= Raw.CUFLASH_PROBLEM_WINDOW
        left, right = map(limit -> limit === nothing ? -1 : limit, window)
    end
    scale === nothing || (flags |= Raw.CUFLASH_PROBLEM_SCALE_SET)
    deterministic && (flags |= Raw.CUFLASH_PROBLEM_DETERMINISTIC)
    batch_invariant && (flags |= Raw.CUFLASH_PROBLEM_BATCH_INVARIANT)
    head_dim, len_q, heads_q, batch = size(q)
    name = Base.cconvert(Cstring, String(kernel))
    GC.@preserve arrays align name begin
        fields = (
            flags = flags, batch = batch, heads_q = heads_q, len_q = len_q, head_dim = head_dim,
            q = tensor("q", q),
            mask = causal ? Raw.CUFLASH_MASK_CAUSAL : Raw.CUFLASH_MASK_NONE,
            mask_align = align_code(align), mask_offset = align isa Integer ? align : 0,
            mask_offsets = sequence_values("align", per_sequence, batch),
            window_left = left, window_right = right,
            scale = scale === nothing ? 0 : scale,
            kernel = isempty(kernel) ? C_NULL : Ptr{UInt8}(Base.unsafe_convert(Cstring, name)),
            num_splits = num_splits, target_arch = target_arch,
        )
        return operate(handle, fields, stream(Val(place(handle))))
    end
end

function align_code(align::Symbol)
    align === :bottom_right && return Raw.CUFLASH_ALIGN_BOTTOM_RIGHT
    align === :top_left && return Raw.CUFLASH_ALIGN_TOP_LEFT
    throw(ArgumentError("align: :$align; :bottom_right, :top_left, an integer or a vector"))
end
align_code(::Integer) = Raw.CUFLASH_ALIGN_OFFSET
align_code(::AbstractVector) = Raw.CUFLASH_ALIGN_DEVICE_OFFSETS

"The handle given, or that of the place where all arrays are."
function choose_handle(handle, arrays)
    handle isa Union{Handle, Nothing} ||
        throw(ArgumentError("handle: $(typeof(handle)) is no CUFlash.Handle"))
    places = unique(place(array) for array in arrays if array !== nothing)
    length(places) == 1 || throw(ArgumentError("arrays in different places: $(join(places, ", "))"))
    handle === nothing && return default_handle(first(places))
    place(handle) == first(places) ||
        throw(ArgumentError("arrays of :$(first(places)) in a call for :$(place(handle))"))
    return handle
end

"The fields of keys and values beside queries."
function key_fields(q, k, v)
    check_size("k", k, (size(q, 1), size(k, 2), size(k, 3), size(q, 4)))
    check_size("v", v, size(k))
    return (heads_kv = size(k, 3), len_k = size(k, 2), k = tensor("k", k), v = tensor("v", v))
end

"The fields of o and lse."
function output_fields(q, o, lse)
    check_size("o", o, size(q))
    lse === nothing && return (o = tensor("o", o),)
    check_size("lse", lse, size(q)[2:4])
    batch, head, row = row_strides("lse", lse)
    return (o = tensor("o", o), lse = Ptr{Float32}(address(lse)), lse_batch_stride = batch,
            lse_head_stride = head, lse_row_stride = row)
end

problem(fields...) = Ref(Raw.cuflash_problem_t(; merge(fields...)...))

function cache(q, k, v, lengths)
    check_size("k", k, (size(q, 1), size(k, 2), size(k, 3), size(k, 4)))
    check_size("v", v, size(k))
    return Ref(Raw.cuflash_kv_cache_t(
        k = tensor("k", k), v = tensor("v", v), max_len = size(k, 2), num_pages = size(k, 4),
        lengths = sequence_values("lengths", lengths, size(q, 4))))
end

gradients(d_o, dq, dk, dv) = Ref(Raw.cuflash_gradients_t(
    d_o = tensor("d_o", d_o), dq = tensor("dq", dq), dk = tensor("dk", dk), dv = tensor("dv", dv)))

"An array like a (D, S, H, B), for its values or for its rows."
like(array, dims = size(array)) = similar(array, eltype(array), dims)
function rows_like(array)
    check_axes("q", array, "(D, S, H, B)")
    return similar(array, Float32, size(array)[2:4])
end
