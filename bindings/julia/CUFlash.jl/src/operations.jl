"""
    attention!(o, q, k, v; lse = nothing, accumulate = false, keywords...) -> o

Writes the attention of queries `q`, (D, Sq, Hq, B), over keys `k`, (D, Sk, Hkv, B), and values `v`,
(Dv, Sk, Hkv, B), into `o`, (Dv, Sq, Hq, B), of the type of `q` or in Float32. Query head `h` (from 0) reads
head `h ÷ (Hq ÷ Hkv)`. `lse`, (Sq, Hq, B) in Float32, gets the natural logarithm of each row's sum of
exponentials. Any strides will do as long as the channels, the first axis, are contiguous. `accumulate` folds
into the `o`, Float32, and `lse` that are there, as [`merge_states!`](@ref).

$KEYWORDS
"""
function attention!(o, q, k, v; lse = nothing, accumulate = false, keywords...)
    forward!(o, lse, q, k, v, padded_sequences(q, k), accumulate; keywords...)
    return o
end

function forward!(o, lse, q, k, v, sequences, accumulate; keywords...)
    flags = accumulate ? UInt32(Raw.CUFLASH_PROBLEM_ACCUMULATE) : UInt32(0)
    with_options((q, k, v, o, lse), q, sequences, flags; keywords...) do handle, fields, stream
        check(Raw.cuflash_attention_forward(
            handle, problem(fields, key_fields(q, k, v, sequences), output_fields(q, size(v, 1), o, lse)),
            stream))
    end
end

"""
    attention(q, k, v; out_type = eltype(q), keywords...) -> o, lse

As [`attention!`](@ref), into new arrays, `o` of `out_type`, which may be Float32.
"""
function attention(q, k, v; out_type = eltype(q), keywords...)
    sequences = padded_sequences(q, k)
    o, lse = like(q, (size(v, 1), size(q)[2:4]...), out_type), rows_like(q)
    forward!(o, lse, q, k, v, sequences, false; keywords...)
    return o, lse
end

"""
    attention_varlen!(o, q, k, v, cu_seqlens_q, cu_seqlens_k; max_len_q, max_len_k, keywords...) -> o

[`attention!`](@ref) of sequences of any lengths, packed one after the other: `q` is (D, Hq, total), `k` and `v`
are (D, Hkv, total) of their own total, `o` is (Dv, Hq, total) and `lse` (total, Hq). Sequence b has the rows
after `cu_seqlens[b]` up to `cu_seqlens[b + 1]`, vectors of `Int32` with one element more than there are
sequences; it may have none. `max_len_q` and `max_len_k` are the longest lengths: what is longer is cut, and they
are the `Sq` and `Sk` of a bias. Rows of no sequence are not written.
"""
function attention_varlen!(o, q, k, v, cu_seqlens_q, cu_seqlens_k; max_len_q, max_len_k,
                           lse = nothing, accumulate = false, keywords...)
    sequences = packed_sequences(cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k)
    forward!(Packed("o", o), packed_rows("lse", lse), Packed("q", q), Packed("k", k), Packed("v", v),
             sequences, accumulate; keywords...)
    return o
end

"""
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k; max_len_q, max_len_k, keywords...) -> o, lse

As [`attention_varlen!`](@ref), into new arrays; rows of no sequence are 0.
"""
function attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k; max_len_q, max_len_k,
                          out_type = eltype(q), keywords...)
    check_axes("q", q, "(D, H, T)")
    o = like(q, (size(v, 1), size(q, 2), size(q, 3)), out_type)
    lse = similar(q, Float32, (size(q, 3), size(q, 2)))
    fill!(o, zero(out_type))
    fill!(lse, -Inf32)
    sequences = packed_sequences(cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k)
    forward!(Packed("o", o), packed_rows("lse", lse), Packed("q", q), Packed("k", k), Packed("v", v),
             sequences, false; keywords...)
    return o, lse
end

"""
    attention_backward!(dq, dk, dv, d_o, q, k, v, o, lse; keywords...) -> dq, dk, dv

Writes the gradients of `q`, `k` and `v`, of their type or in Float32, from `d_o`, the gradient of `o`, and from
what the forward pass wrote, with its keywords. Further ones:

- `d_lse`: the gradient of `lse`.
- `delta`: gets each row's sum of `o .* d_o`. `known_delta`: has it; the values of `o` are then not read.
- `d_bias`, `d_sinks`: get these gradients, summed where the bias repeats.
- `accumulate = false`: adds to `dq`, `dk` and `dv`, which are Float32.

`d_lse`, `delta` and `known_delta` have the size and strides of `lse`, `d_bias` and `d_sinks` those of `bias` and
`sinks`, and their type.
"""
function attention_backward!(dq, dk, dv, d_o, q, k, v, o, lse; accumulate = false, keywords...)
    backward!(dq, dk, dv, d_o, q, k, v, o, lse, padded_sequences(q, k), accumulate; keywords...)
    return dq, dk, dv
end

function backward!(dq, dk, dv, d_o, q, k, v, o, lse, sequences, accumulate; d_lse = nothing,
                   delta = nothing, known_delta = nothing, bias = nothing, d_bias = nothing,
                   sinks = nothing, d_sinks = nothing, keywords...)
    for (name, array, wanted) in (("d_o", d_o, o), ("dq", dq, q), ("dk", dk, k), ("dv", dv, v))
        check_size(name, array, size(wanted))
    end
    arrays = (q, k, v, o, lse, d_o, dq, dk, dv, d_lse, delta, known_delta, d_bias, d_sinks)
    with_options(arrays, q, sequences; bias = bias, sinks = sinks, keywords...) do handle, fields, stream
        further = further_fields(lse, d_lse, delta, known_delta, bias, d_bias, sinks, d_sinks)
        accumulate && (further = merge(further, (flags = further.flags | Raw.CUFLASH_GRADIENTS_ACCUMULATE,)))
        gradients = Raw.cuflash_gradients_t(; further..., d_o = tensor("d_o", d_o), dq = tensor("dq", dq),
                                            dk = tensor("dk", dk), dv = tensor("dv", dv))
        check(Raw.cuflash_attention_backward(
            handle, problem(fields, key_fields(q, k, v, sequences), output_fields(q, size(v, 1), o, lse)),
            Ref(gradients), stream))
    end
end

"""
    attention_backward(d_o, q, k, v, o, lse; out_type = eltype(q), keywords...) -> dq, dk, dv

As [`attention_backward!`](@ref), into new arrays of `out_type`, which may be Float32.
"""
function attention_backward(d_o, q, k, v, o, lse; out_type = eltype(q), keywords...)
    dq, dk, dv = map(x -> like(x, size(x), out_type), (q, k, v))
    backward!(dq, dk, dv, d_o, q, k, v, o, lse, padded_sequences(q, k), false; keywords...)
    return dq, dk, dv
end

"""
    attention_varlen_backward!(dq, dk, dv, d_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k; max_len_q,
                               max_len_k, keywords...) -> dq, dk, dv

[`attention_backward!`](@ref) of [`attention_varlen!`](@ref).
"""
function attention_varlen_backward!(dq, dk, dv, d_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k; max_len_q,
                                    max_len_k, accumulate = false, d_lse = nothing, delta = nothing,
                                    known_delta = nothing, keywords...)
    names = ("dq", "dk", "dv", "d_o", "q", "k", "v", "o")
    sequences = packed_sequences(cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k)
    backward!(map(Packed, names, (dq, dk, dv, d_o, q, k, v, o))..., packed_rows("lse", lse), sequences,
              accumulate; d_lse = packed_rows("d_lse", d_lse), delta = packed_rows("delta", delta),
              known_delta = packed_rows("known_delta", known_delta), keywords...)
    return dq, dk, dv
end

"""
    attention_varlen_backward(d_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k; max_len_q, max_len_k,
                              out_type = eltype(q), keywords...) -> dq, dk, dv

As [`attention_varlen_backward!`](@ref), into new arrays; rows of no sequence are 0.
"""
function attention_varlen_backward(d_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k; out_type = eltype(q),
                                   keywords...)
    haskey(keywords, :accumulate) &&
        throw(ArgumentError("accumulate: only with arrays to add to"))
    gradients = map(x -> fill!(like(x, size(x), out_type), zero(out_type)), (q, k, v))
    return attention_varlen_backward!(gradients..., d_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k;
                                      keywords...)
end

"""
    attention_weights!(weights, q, k, lse; rows = nothing, keywords...) -> weights

Writes the probabilities, before dropout, of rows of each sequence from the `lse` that the forward pass wrote: for
looking at, simple and slow. `weights` is (Sk, R, Hq, B) in Float32. `rows`, a vector of `Int32`, names the R rows,
from 1; without it they are all. A row that a sequence does not have gets 0. Keywords as in the forward pass.
"""
function attention_weights!(weights, q, k, lse; rows = nothing, keywords...)
    sequences = padded_sequences(q, k)
    count = rows === nothing ? size(q, 2) : length(rows)
    eltype(weights) === Float32 || throw(ArgumentError("weights: $(eltype(weights)); only Float32"))
    check_size("weights", weights, (size(k, 2), count, size(q, 3), size(q, 4)))
    rows === nothing || eltype(rows) === Int32 ||
        throw(ArgumentError("rows: $(eltype(rows)); only Int32"))
    from_0 = rows === nothing ? nothing : rows .- Int32(1)
    with_options((q, k, lse, weights, from_0), q, sequences; keywords...) do handle, fields, stream
        target = tensor("weights", weights)
        raw = Raw.cuflash_weights_t(
            weights = Ptr{Float32}(target.data), batch_stride = target.batch_stride,
            head_stride = target.head_stride, row_stride = target.row_stride,
            rows = sequence_values("rows", from_0, count), num_rows = count)
        inputs = problem(fields, key_fields(q, k, k, sequences), lse_fields(q, lse))
        count == 0 || check(Raw.cuflash_attention_weights(handle, inputs, Ref(raw), stream))  # 0 means all
    end
    return weights
end

"""
    attention_weights(q, k, lse; rows = nothing, keywords...) -> weights

As [`attention_weights!`](@ref), into a new array.
"""
function attention_weights(q, k, lse; rows = nothing, keywords...)
    check_axes("q", q, "(D, S, H, B)")
    count = rows === nothing ? size(q, 2) : length(rows)
    weights = similar(q, Float32, (size(k, 2), count, size(q, 3), size(q, 4)))
    return attention_weights!(weights, q, k, lse; rows = rows, keywords...)
end

"""
    decode!(o, q, k, v; lengths = nothing, keywords...) -> o
    decode!(o, q, cache; lse = nothing, num_splits = 0, accumulate = false, keywords...) -> o

Attention of new tokens `q`, (D, Sq, Hq, B), over a [`KVCache`](@ref), or over the one of `k`, (D, slots, Hkv,
entries), and `v`, (Dv, slots, Hkv, entries), entry b for sequence b. `lengths`, a vector of `Int32`, tells how many
slots of each are valid: with the default alignment the last row of `q` sits at the last of them; there is no
`seqused_k`. `num_splits` forces parts along the keys. `o`, `lse` and `accumulate` are as in [`attention!`](@ref).

$KEYWORDS
"""
decode!(o, q, k, v; lengths = nothing, keywords...) =
    decode!(o, q, KVCache(k, v; lengths = lengths); keywords...)
function decode!(o, q, cache::KVCache; lse = nothing, accumulate = false, keywords...)
    over_cache!(o, lse, q, cache, extents(cache, q), accumulate; keywords...)
    return o
end

function over_cache!(o, lse, q, cache, stored, accumulate; keywords...)
    flags = stored.flags | (accumulate ? UInt32(Raw.CUFLASH_PROBLEM_ACCUMULATE) : UInt32(0))
    with_options((q, o, lse, arrays(cache)...), q, stored.sequences, flags; keywords...) do handle, fields, stream
        check(Raw.cuflash_attention_decode(
            handle, problem(fields, stored.fields, output_fields(q, stored.fields.head_dim_v, o, lse)),
            raw_cache(cache, stored), stream))
    end
end

"""
    decode(q, k, v; lengths = nothing, keywords...) -> o, lse
    decode(q, cache; out_type = eltype(q), keywords...) -> o, lse

As [`decode!`](@ref), into new arrays, `o` of `out_type`, which may be Float32.
"""
decode(q, k, v; lengths = nothing, keywords...) = decode(q, KVCache(k, v; lengths = lengths); keywords...)
function decode(q, cache::KVCache; out_type = eltype(q), keywords...)
    stored = extents(cache, q)
    o, lse = like(q, (stored.fields.head_dim_v, size(q)[2:4]...), out_type), rows_like(q)
    over_cache!(o, lse, q, cache, stored, false; keywords...)
    return o, lse
end

"""
    append!(cache, k, v = nothing; keywords...) -> cache

Writes the keys and values of `T` new tokens of each sequence into a [`KVCache`](@ref), quantised to what it
holds: `k` is (D, T, Hkv, B) and `v` (Dv, T, Hkv, B); without `v` keys alone are written.

- `positions`: (T, B) of `Int32`, from 0; without it they are `lengths[b]` and on. A token goes to the slot of its
  sequence with that number. The lengths stay as they are: add `T` to them before the tokens are attended to.
- `slot_mapping`: (T, B) of `Int64`, slots in the whole cache instead, from 0: slot `n % page_size` of page
  `n ÷ page_size`. A token whose slot is negative, or not in the cache, is skipped.
- `k_norm_weight`, `q_norm_weight`: (D,), rows are divided by the root of their mean square plus
  `norm_epsilon = 0` and multiplied by it.
- `cos`, `sin`: (R ÷ 2, positions) in `Float32`, then the first R channels are rotated, `i` and `i + R ÷ 2`
  together, with `interleaved = true` `2i - 1` and `2i`.
- `q`, `q_out`: (D, T, Hq, B), gets what the rows of `k` do, into `q_out`, which may be `q`.
- `handle`: as in [`decode!`](@ref).
"""
function Base.append!(cache::KVCache, k::AbstractArray, v = nothing; keywords...)
    with_append(cache, k, v; keywords...) do handle, raw, new, stream
        check(Raw.cuflash_kv_cache_append(handle, raw, new, stream))
    end
    return cache
end

"""
    merge_states!(o, parts, lse_parts; lse = nothing, base2 = false, handle = nothing) -> o

Merges results over disjoint sets of keys: `parts` is (D, S, H, B, P), `lse_parts` (S, H, B, P). A part whose
LSE is `-Inf` adds nothing. With `base2` the LSE are base-2 logarithms. `lse` has the strides of a part of
`lse_parts`.
"""
function merge_states!(o, parts, lse_parts; lse = nothing, base2 = false, handle = nothing)
    check_axes("parts", parts, "(D, S, H, B, P)")
    head_dim, len, heads, batch, count = size(parts)
    check_size("lse_parts", lse_parts, (len, heads, batch, count))
    check_size("o", o, (head_dim, len, heads, batch))
    strides = row_strides("lse_parts", lse_parts)
    if lse !== nothing
        check_size("lse", lse, (len, heads, batch))
        row_strides("lse", lse) == strides ||
            throw(ArgumentError("lse: strides that are not those of a part of lse_parts"))
    end
    arrays = (o, parts, lse_parts, lse)
    handle = choose_handle(handle, arrays)
    GC.@preserve arrays begin
        raw = Raw.cuflash_merge_t(
            flags = base2 ? Raw.CUFLASH_MERGE_LSE_BASE2 : 0,
            num_parts = count, batch = batch, heads = heads, len = len, head_dim = head_dim,
            parts = tensor("parts", parts), part_stride = stride(parts, 5),
            lse_parts = Ptr{Float32}(address(lse_parts)), lse_part_stride = stride(lse_parts, 4),
            lse_batch_stride = strides[1], lse_head_stride = strides[2],
            lse_row_stride = strides[3], o = tensor("o", o),
            lse = lse === nothing ? C_NULL : Ptr{Float32}(address(lse)))
        check(Raw.cuflash_merge_states(handle, Ref(raw), stream(Val(place(handle)))))
    end
    return o
end

"""
    merge_states(parts, lse_parts; keywords...) -> o, lse

As [`merge_states!`](@ref), into new arrays.
"""
function merge_states(parts, lse_parts; keywords...)
    check_axes("parts", parts, "(D, S, H, B, P)")
    o = similar(parts, size(parts)[1:4])
    lse = similar(lse_parts, size(lse_parts)[1:3])
    merge_states!(o, parts, lse_parts; lse = lse, keywords...)
    return o, lse
end

"""
    CUFlash.explain(operation, q, k, v; keywords...) -> String
    CUFlash.explain(:decode, q, cache; keywords...) -> String
    CUFlash.explain(:append, cache, k, v; keywords...) -> String

Which kernel `:forward`, `:backward`, `:decode` or `:append` takes for these arrays, and why not the others, in
JSON. With `target_arch = 90` the answer is for that GPU, which need not be there.
"""
function explain(operation::Symbol, q::AbstractArray, k, v; keywords...)
    operation === :decode && return explain(:decode, q, KVCache(k, v); keywords...)
    operation in (:forward, :backward) ||
        throw(ArgumentError("operation: :$operation; :forward, :backward or :decode, or :append to a cache"))
    sequences = padded_sequences(q, k)
    with_options((q, k, v), q, sequences; keywords...) do handle, fields, _
        output = Raw.cuflash_tensor_t(flags = Raw.CUFLASH_TENSOR_DENSE, dtype = float_code("q", q))
        raw = problem(fields, key_fields(q, k, v, sequences), (o = output,))
        operation === :forward &&
            return json((rest...) -> Raw.cuflash_forward_explain(handle, raw, rest...))
        gradients = Ref(Raw.cuflash_gradients_t(d_o = output, dq = output, dk = output, dv = output))
        return json((rest...) -> Raw.cuflash_backward_explain(handle, raw, gradients, rest...))
    end
end

function explain(operation::Symbol, q::AbstractArray, cache::KVCache; keywords...)
    operation === :decode || throw(ArgumentError("operation: :$operation; :decode over a cache"))
    stored = extents(cache, q)
    with_options((q, arrays(cache)...), q, stored.sequences, stored.flags; keywords...) do handle, fields, _
        output = Raw.cuflash_tensor_t(flags = Raw.CUFLASH_TENSOR_DENSE, dtype = float_code("q", q))
        raw = problem(fields, stored.fields, (o = output,))
        json((rest...) -> Raw.cuflash_decode_explain(handle, raw, raw_cache(cache, stored), rest...))
    end
end

function explain(operation::Symbol, cache::KVCache, k, v = nothing; keywords...)
    operation === :append || throw(ArgumentError("operation: :$operation; :append to a cache"))
    with_append(cache, k, v; keywords...) do handle, raw, new, _
        json((rest...) -> Raw.cuflash_append_explain(handle, raw, new, rest...))
    end
end

"What a query writes into its buffer, capacity, needed."
function json(query)
    needed = Ref{Csize_t}(0)
    check(query(C_NULL, 0, needed))
    buffer = zeros(UInt8, needed[])
    check(query(buffer, length(buffer), C_NULL))
    return String(buffer[1:(findfirst(iszero, buffer) - 1)])
end
