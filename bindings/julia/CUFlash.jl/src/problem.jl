# Keywords of the operations as fields of the C API's struct.

const KEYWORDS = """
- `causal = false`: a row sees no key after its centre.
- `window = nothing`: `(left, right)`, so many keys before and after the centre, `nothing` in it is
  without a limit.
- `align = :bottom_right`: the centre of query row `i` (from 0) is at `i + Sk - Sq`; `:top_left`: at `i`;
  an integer: at `i` plus it; a vector of `Int32`: the same for each sequence.
- `scale = 1 / sqrt(D)`: the factor of the scores. Then, in this order,
- `softcap = 0`: scores become `softcap * tanh(score / softcap)`; 0 is without a cap.
- `alibi_slopes`: `(Hq,)` or `(Hq, B)`, a slope times the key's distance from the centre is subtracted.
- `bias`: `(Sk, Sq, Hq, B)` is added, any extent but the first may be 1 or left out, for all; `-Inf` masks.
- `sinks`: `(Hq,)`, a score without a value, which joins each row's sum of exponentials.
- `tree_mask`: `(words, Sq, B)` of `UInt32` or `Int32`, rows and sequences may be 1 or left out, for all: bit `t % 32`
  of word `t ÷ 32` (from 0) tells whether the row sees key `t` of the last `tree_mask_len = Sq` ones. Mask and
  window hold too. Not in the backward pass.
- `dropout_p = 0`: drops probabilities with this probability and divides the others by `1 - dropout_p`. The
  same `dropout_seed` and `dropout_offset` drop the same; calls drop independently if each adds `Sk / 4`,
  rounded up, to the offset. Both may be arrays of one `UInt64`, read where the call runs.
- `seqused_q`, `seqused_k`: vectors of `Int32`, how many rows of each sequence are in use; `leftpad_k`: how
  many of those of `k` and `v` come before the first key. Other rows are neither read nor written.
- `deterministic = false`: the same bits from run to run.
- `batch_invariant = false`: a row's bits do not depend on its batch.
- `sm_margin = 0`: multiprocessors of the GPU to leave to others.
- `kernel = ""`: forces a kernel or a family by name.
- `handle`: a `CUFlash.Handle`; by default the device where the arrays are.
"""

"""
How many sequences there are, their longest lengths and, where rows are packed, where they begin.
"""
function padded_sequences(q, k)
    check_axes("q", q, "(D, S, H, B)")
    check_size("k", k, (size(q, 1), size(k, 2), size(k, 3), size(k, 4)))
    return (batch = size(q, 4), len_q = size(q, 2), len_k = size(k, 2), cu_seqlens_q = nothing,
            cu_seqlens_k = nothing)
end

function packed_sequences(cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k)
    isempty(cu_seqlens_q) &&
        throw(DimensionMismatch("cu_seqlens_q: empty; one more than there are sequences"))
    return (batch = length(cu_seqlens_q) - 1, len_q = max_len_q, len_k = max_len_k,
            cu_seqlens_q = cu_seqlens_q, cu_seqlens_k = cu_seqlens_k)
end

"""
Calls `operate(handle, fields, stream)` with what the keywords mean. All arrays are kept alive and must be
in one place.
"""
function with_options(operate, arrays, q, sequences, flags = UInt32(0); causal = false,
                      window = nothing, align = :bottom_right, scale = nothing, softcap = 0,
                      alibi_slopes = nothing, bias = nothing, sinks = nothing,
                      tree_mask = nothing, tree_mask_len = nothing, dropout_p = 0,
                      dropout_seed = 0, dropout_offset = 0, seqused_q = nothing,
                      seqused_k = nothing, leftpad_k = nothing, deterministic = false,
                      batch_invariant = false, sm_margin = 0, kernel = "", num_splits = 0, target_arch = 0,
                      handle = nothing)
    given = (align, alibi_slopes, bias, sinks, tree_mask, dropout_seed, dropout_offset, seqused_q, seqused_k,
             leftpad_k, sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    arrays = (arrays..., filter(value -> value isa AbstractArray, given)...)
    handle = choose_handle(handle, arrays)
    left = right = 0
    if window !== nothing
        length(window) == 2 || throw(ArgumentError("window: $window; (left, right)"))
        flags |= Raw.CUFLASH_PROBLEM_WINDOW
        left, right = map(limit -> limit === nothing ? -1 : limit, window)
    end
    scale === nothing || (flags |= Raw.CUFLASH_PROBLEM_SCALE_SET)
    leftpad_k === nothing || (flags |= Raw.CUFLASH_PROBLEM_LEFT_PADDED)
    deterministic && (flags |= Raw.CUFLASH_PROBLEM_DETERMINISTIC)
    batch_invariant && (flags |= Raw.CUFLASH_PROBLEM_BATCH_INVARIANT)
    head_dim, _, heads_q, _ = size(q)
    batch = sequences.batch
    name = Base.cconvert(Cstring, String(kernel))
    GC.@preserve arrays name begin
        fields = (
            flags = flags, batch = batch, heads_q = heads_q, len_q = sequences.len_q,
            head_dim = head_dim, q = tensor("q", q),
            mask = causal ? Raw.CUFLASH_MASK_CAUSAL : Raw.CUFLASH_MASK_NONE,
            mask_align = align_code(align), mask_offset = align isa Integer ? align : 0,
            mask_offsets = sequence_values("align", align isa AbstractVector ? align : nothing, batch),
            window_left = left, window_right = right,
            scale = scale === nothing ? 0 : scale, softcap = softcap, dropout_p = dropout_p,
            cu_seqlens_q = sequence_values("cu_seqlens_q", sequences.cu_seqlens_q, batch + 1),
            cu_seqlens_k = sequence_values("cu_seqlens_k", sequences.cu_seqlens_k, batch + 1),
            total_q = sequences.cu_seqlens_q === nothing ? 0 : size(q, 2),
            seqused_q = sequence_values("seqused_q", seqused_q, batch),
            seqused_k = sequence_values("seqused_k", seqused_k, batch),
            leftpad_k = sequence_values("leftpad_k", leftpad_k, batch),
            kernel = isempty(kernel) ? C_NULL : Ptr{UInt8}(Base.unsafe_convert(Cstring, name)),
            num_splits = num_splits, sm_margin = sm_margin, target_arch = target_arch,
        )
        modifiers = merge(slope_fields(alibi_slopes, heads_q, batch),
                          bias_fields(bias, (sequences.len_k, sequences.len_q, heads_q, batch)),
                          sink_fields(sinks, heads_q),
                          tree_fields(tree_mask, tree_mask_len, sequences.len_q, batch),
                          random_fields("dropout_seed", dropout_seed),
                          random_fields("dropout_offset", dropout_offset))
        return operate(handle, merge(fields, modifiers), stream(Val(place(handle))))
    end
end

# Arrays that may repeat along all axes but the first. An empty one goes as none: it changes nothing, and its
# strides of 0 would say that it repeats.

function slope_fields(slopes, heads, batch)
    slopes === nothing && return NamedTuple()
    check_repeating("alibi_slopes", slopes, (heads, batch))
    isempty(slopes) && return NamedTuple()
    return (alibi_slopes = address(slopes), alibi_dtype = float_code("alibi_slopes", slopes),
            alibi_batch_stride = repeating_stride(slopes, 2))
end

function bias_fields(bias, wanted)
    bias === nothing && return NamedTuple()
    check_repeating("bias", bias, wanted)
    isempty(bias) && return NamedTuple()
    return (bias = address(bias), bias_dtype = float_code("bias", bias),
            bias_row_stride = repeating_stride(bias, 2), bias_head_stride = repeating_stride(bias, 3),
            bias_batch_stride = repeating_stride(bias, 4))
end

function sink_fields(sinks, heads)
    sinks === nothing && return NamedTuple()
    check_repeating("sinks", sinks, (heads,))
    isempty(sinks) && return NamedTuple()
    return (sinks = address(sinks), sinks_dtype = float_code("sinks", sinks))
end

function tree_fields(words, len, len_q, batch)
    words === nothing && return NamedTuple()
    len === nothing && (len = len_q)
    eltype(words) in (UInt32, Int32) ||
        throw(ArgumentError("tree_mask: $(eltype(words)); UInt32 or Int32"))
    check_repeating("tree_mask", words, (size(words, 1), len_q, batch))
    32 * size(words, 1) >= len ||
        throw(DimensionMismatch("tree_mask: $(size(words, 1)) words for the bits of $len keys"))
    (len == 0 || isempty(words)) && return NamedTuple()  # 0 would mean Sq
    return (tree_mask = Ptr{UInt32}(address(words)), tree_mask_len = len,
            tree_mask_row_stride = repeating_stride(words, 2),
            tree_mask_batch_stride = repeating_stride(words, 3))
end

"A number of 64 bits, or where it is in memory."
random_fields(name, value::Integer) = NamedTuple{(Symbol(name),)}((UInt64(value),))
function random_fields(name, value)
    eltype(value) === UInt64 || throw(ArgumentError("$name: $(eltype(value)); only UInt64"))
    length(value) == 1 || throw(DimensionMismatch("$name: $(length(value)) elements; only 1"))
    return NamedTuple{(Symbol(name, :_ptr),)}((Ptr{UInt64}(address(value)),))
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

# The C API takes some extents of 0 for a default, and would then read what is not there.
function check_keys(q, k, v)
    size(k, 3) == 0 && size(q, 3) > 0 &&
        throw(DimensionMismatch("k: no heads, but $(size(q, 3)) of q"))
    check_size("v", v, (size(v, 1), size(k, 2), size(k, 3), size(k, 4)))
    size(v, 1) == 0 && throw(DimensionMismatch("v: no channels"))
    return nothing
end

"The fields of keys and values beside queries."
function key_fields(q, k, v, sequences)
    check_size("k", k, (size(q, 1), size(k, 2), size(k, 3), size(q, 4)))
    check_keys(q, k, v)
    return (heads_kv = size(k, 3), len_k = sequences.len_k, head_dim_v = size(v, 1),
            total_k = sequences.cu_seqlens_k === nothing ? 0 : size(k, 2),
            k = tensor("k", k), v = tensor("v", v))
end

"The fields of o, with so many channels, and lse."
function output_fields(q, channels, o, lse)
    check_size("o", o, (channels, size(q)[2:4]...))
    lse === nothing && return (o = tensor("o", o),)
    return merge((o = tensor("o", o),), lse_fields(q, lse))
end

function lse_fields(q, lse)
    check_size("lse", lse, size(q)[2:4])
    batch, head, row = row_strides("lse", lse)
    return (lse = Ptr{Float32}(address(lse)), lse_batch_stride = batch, lse_head_stride = head,
            lse_row_stride = row)
end

problem(fields...) = Ref(Raw.cuflash_problem_t(; merge(fields...)...))

"The further inputs and outputs of the backward pass. The C API has one set of strides for values of rows."
function further_fields(lse, d_lse, delta, known_delta, bias, d_bias, sinks, d_sinks)
    delta === nothing || known_delta === nothing ||
        throw(ArgumentError("delta: given beside known_delta; one of them"))
    return (
        flags = known_delta === nothing ? UInt32(0) : UInt32(Raw.CUFLASH_GRADIENTS_DELTA_GIVEN),
        dlse = Ptr{Float32}(address_as("d_lse", d_lse, "lse", lse)),
        delta = Ptr{Float32}(known_delta === nothing ? address_as("delta", delta, "lse", lse) :
                             address_as("known_delta", known_delta, "lse", lse)),
        dbias = address_as("d_bias", d_bias, "bias", bias),
        dsinks = address_as("d_sinks", d_sinks, "sinks", sinks),
    )
end

"The address of an array of the same type of elements, size and strides as another, or NULL."
function address_as(name, array, of, model)
    array === nothing && return C_NULL
    model === nothing && throw(ArgumentError("$name: the call has no $of"))
    eltype(array) === eltype(model) ||
        throw(ArgumentError("$name: $(eltype(array)); $(eltype(model)) as $of"))
    check_size(name, array, size(model))
    all(axis -> size(model, axis) <= 1 || stride(array, axis) == stride(model, axis), 1:ndims(model)) ||
        throw(ArgumentError("$name: strides $(strides(array)); $(strides(model)) as $of"))
    return isempty(array) ? C_NULL : address(array)
end

"Arrays like others in place and type of elements, or of another type."
like(array, dims = size(array), type = eltype(array)) = similar(array, type, dims)
function rows_like(array)
    check_axes("q", array, "(D, S, H, B)")
    return similar(array, Float32, size(array)[2:4])
end
