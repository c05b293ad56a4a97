"""
    attention!(o, q, k, v; lse = nothing, keywords...) -> o

Writes the attention of queries `q`, (D, Sq, Hq, B), over keys and values `k` and `v`, (D, Sk, Hkv, B), into
`o`, of the size of `q`. Query head `h` (from 0) reads head `h ÷ (Hq ÷ Hkv)`. `lse`, (Sq, Hq, B) in
Float32, gets the natural logarithm of each row's sum of exponentials. Any strides will do as long as
the channels, the first axis, are contiguous.

$KEYWORDS
"""
function attention!(o, q, k, v; lse = nothing, keywords...)
    with_options((q, k, v, o, lse), q; keywords...) do handle, fields, stream
        check(Raw.cuflash_attention_forward(
            handle, problem(fields, key_fields(q, k, v), output_fields(q, o, lse)), stream))
    end
    return o
end

"""
    attention(q, k, v; keywords...) -> o, lse

As [`attention!`](@ref), into new arrays.
"""
function attention(q, k, v; keywords...)
    o, lse = like(q), rows_like(q)
    attention!(o, q, k, v; lse = lse, keywords...)
    return o, lse
end

"""
    attention_backward!(dq, dk, dv, d_o, q, k, v, o, lse; keywords...) -> dq, dk, dv

Writes the gradients of `q`, `k` and `v` from `d_o`, the gradient of `o`, and from what the forward pass
wrote, with its keywords.
"""
function attention_backward!(dq, dk, dv, d_o, q, k, v, o, lse; keywords...)
    for (name, array, wanted) in (("d_o", d_o, q), ("dq", dq, q), ("dk", dk, k), ("dv", dv, v))
        check_size(name, array, size(wanted))
    end
    with_options((q, k, v, o, lse, d_o, dq, dk, dv), q; keywords...) do handle, fields, stream
        check(Raw.cuflash_attention_backward(
            handle, problem(fields, key_fields(q, k, v), output_fields(q, o, lse)),
            gradients(d_o, dq, dk, dv), stream))
    end
    return dq, dk, dv
end

"""
    attention_backward(d_o, q, k, v, o, lse; keywords...) -> dq, dk, dv

As [`attention_backward!`](@ref), into new arrays.
"""
attention_backward(d_o, q, k, v, o, lse; keywords...) =
    attention_backward!(like(q), like(k), like(v), d_o, q, k, v, o, lse; keywords...)

"""
    decode!(o, q, k, v; lengths = nothing, lse = nothing, num_splits = 0, keywords...) -> o

Attention of new tokens `q`, (D, Sq, Hq, B), over a cache `k` and `v`, (D, slots, Hkv, entries), entry b for
sequence b. `lengths`, a vector of `Int32`, tells how many slots of each are valid: with the default
alignment the last row of `q` sits at the last of them. `num_splits` forces parts along the keys.

$KEYWORDS
"""
function decode!(o, q, k, v; lengths = nothing, lse = nothing, keywords...)
    with_options((q, k, v, o, lse, lengths), q; keywords...) do handle, fields, stream
        check(Raw.cuflash_attention_decode(
            handle, problem(fields, (heads_kv = size(k, 3),), output_fields(q, o, lse)),
            cache(q, k, v, lengths), stream))
    end
    return o
end

"""
    decode(q, k, v; lengths = nothing, keywords...) -> o, lse

As [`decode!`](@ref), into new arrays.
"""
function decode(q, k, v; keywords...)
    o, lse = like(q), rows_like(q)
    decode!(o, q, k, v; lse = lse, keywords...)
    return o, lse
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

Which kernel `:forward`, `:backward` or `:decode` takes for these arrays, and why not the others, in JSON. With
`target_arch = 90` the answer is for that GPU, which need not be there.
"""
function explain(operation::Symbol, q, k, v; keywords...)
    operation in (:forward, :backward, :decode) ||
        throw(ArgumentError("operation: :$operation; :forward, :backward or :decode"))
    with_options((q, k, v), q; keywords...) do handle, fields, _
        outputs = output_fields(q, q, nothing)  # pointers are not read
        operation === :decode && return json(
            (rest...) -> Raw.cuflash_decode_explain(
                handle, problem(fields, (heads_kv = size(k, 3),), outputs),
                cache(q, k, v, nothing), rest...))
        raw = problem(fields, key_fields(q, k, v), outputs)
        operation === :forward &&
            return json((rest...) -> Raw.cuflash_forward_explain(handle, raw, rest...))
        return json((rest...) -> Raw.cuflash_backward_explain(handle, raw, gradients(q, q, k, v),
                                                              rest...))
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
