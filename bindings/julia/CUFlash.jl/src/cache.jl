# Caches of keys and values: what decode attends to, and where new tokens go.

"""
    KVCache(k, v = nothing; keywords...)

Keys and values of sequences. It only names arrays, which all its fields are and may be replaced by others; nothing
is copied, and sizes and types are looked at by the calls.

`k` is (D, slots, Hkv, entries) and `v` (Dv, slots, Hkv, entries), by any strides with contiguous channels, entry b
for sequence b. Without `v` the first `head_dim_v` channels of `k`, or all, are the values.

- `lengths`: a vector of `Int32`, the slots in use of each sequence; without it all. No call changes them.
- `entries`: a vector of `Int32`, the entry of each sequence instead. One that is not in the cache has no keys.
- `block_table`: (columns, B) of `Int32` or `Int64`. `k` and `v` hold pages then, (D, page_size, Hkv, pages), and
  column b of the table names those of sequence b in order.
- `indptr`, `indices`: likewise with the pages of sequence b at `indices[indptr[b] + 1]` to
  `indices[indptr[b + 1]]`, which nobody can check; `indptr` is a vector of `Int32`, `max_len` the longest sequence.
- `max_len`: what is longer is cut; with a `block_table` it is all that there are columns for unless it is given.
- `k_format`, `v_format`: what an array of `UInt8` holds: `:int4`, two channels in each, the first of them in the low
  half, `:float8_e4m3fn` or `:float8_e5m2`. `Int8` and the types of calls without a cache need none. `head_dim_v`
  tells an odd number of channels of `:int4`.
- `k_scale`, `v_scale`, `k_zero`, `v_zero`: an element stands for `(stored - zero) * scale`. (G, slots, Hkv, entries or
  pages), any of the last three may be 1 or left out, for all; G is 1, or the number of groups of 32, 64 or 128
  channels. All have the same type and strides.

Entries, pages, positions and slots are counted from 0 as the library reads them; a number of what is not there is
no error, but names nothing.
"""
mutable struct KVCache
    k::Any
    v::Any
    lengths::Any
    entries::Any
    block_table::Any
    indptr::Any
    indices::Any
    max_len::Any
    k_format::Any
    v_format::Any
    k_scale::Any
    v_scale::Any
    k_zero::Any
    v_zero::Any
    head_dim_v::Any
end

function KVCache(k, v = nothing; lengths = nothing, entries = nothing, block_table = nothing,
                 indptr = nothing, indices = nothing, max_len = nothing, k_format = nothing,
                 v_format = nothing, k_scale = nothing, v_scale = nothing, k_zero = nothing,
                 v_zero = nothing, head_dim_v = nothing)
    return KVCache(k, v, lengths, entries, block_table, indptr, indices, max_len, k_format, v_format,
                   k_scale, v_scale, k_zero, v_zero, head_dim_v)
end

"What must stay alive in a call."
arrays(cache::KVCache) =
    (cache.k, cache.v, cache.lengths, cache.entries, cache.block_table, cache.indptr, cache.indices,
     cache.k_scale, cache.v_scale, cache.k_zero, cache.v_zero)

const FORMATS = (int4 = Raw.CUFLASH_INT4, float8_e4m3fn = Raw.CUFLASH_FP8_E4M3,
                 float8_e5m2 = Raw.CUFLASH_FP8_E5M2)

"The dtype of what an array of a cache holds, and how many channels an item is."
function stored_code(name, array, format)
    if eltype(array) === UInt8
        format in keys(FORMATS) ||
            throw(ArgumentError("$(name)_format: $format; of UInt8 one of $(join(keys(FORMATS), ", "))"))
        return FORMATS[format], format === :int4 ? 2 : 1
    end
    format === nothing ||
        throw(ArgumentError("$(name)_format: $format, but $name is of $(eltype(array)); only of UInt8"))
    return eltype(array) === Int8 ? Raw.CUFLASH_INT8 : float_code(name, array), 1
end

"Refuses an array of a cache that has not so many channels."
function check_channels(name, array, format, channels)
    _, items = stored_code(name, array, format)
    return check_size(name, array, (cld(channels, items), size(array)[2:4]...))
end

"What calls of so many sequences and heads need to know of a cache. An extent of 0 is no default here."
function extents(cache::KVCache, heads, head_dim, batch, len_q; chosen_slots = false)
    k, v = cache.k, cache.v
    check_axes("k", k, "(D, slots, H, entries)")
    check_channels("k", k, cache.k_format, head_dim)
    _, slots, heads_kv, entries = size(k)
    heads_kv == 0 && heads > 0 && throw(DimensionMismatch("k: no heads, but $heads of q"))
    channels = cache.head_dim_v
    if v === nothing
        channels === nothing && (channels = head_dim)
    else
        check_axes("v", v, "(D, slots, H, entries)")
        channels === nothing && (channels = last(stored_code("v", v, cache.v_format)) * size(v, 1))
        check_size("v", v, (size(v, 1), size(k)[2:4]...))
        check_channels("v", v, cache.v_format, channels)
    end
    channels == 0 && throw(DimensionMismatch("v: no channels"))
    paged = cache.block_table !== nothing || cache.indptr !== nothing || cache.indices !== nothing
    if !paged
        needed = cache.entries === nothing && !chosen_slots ? batch : min(batch, 1)
        entries >= needed || throw(DimensionMismatch("k: $entries entries for $batch sequences"))
        cache.max_len === nothing || throw(ArgumentError("max_len: given for a cache without pages"))
    elseif cache.entries !== nothing
        throw(ArgumentError("entries: given for a cache in pages, whose table tells"))
    end
    max_len = paged ? paged_len(cache, slots, batch) : slots
    sequences = (batch = batch, len_q = len_q, len_k = max_len, cu_seqlens_q = nothing,
                 cu_seqlens_k = nothing)
    return (sequences = sequences, fields = (heads_kv = heads_kv, head_dim_v = channels),
            flags = v === nothing ? UInt32(Raw.CUFLASH_PROBLEM_V_IS_K_PREFIX) : UInt32(0),
            head_dim = head_dim, paged = paged)
end
function extents(cache::KVCache, q)
    check_axes("q", q, "(D, S, H, B)")
    return extents(cache, size(q, 3), size(q, 1), size(q, 4), size(q, 2))
end

"The longest sequence of a cache in pages."
function paged_len(cache, page_size, batch)
    if cache.block_table === nothing
        cache.indptr === nothing || cache.indices === nothing &&
            throw(ArgumentError("indices: missing beside indptr"))
        cache.max_len === nothing && throw(ArgumentError("max_len: missing; indices do not tell it"))
        return cache.max_len
    end
    cache.indptr === nothing && cache.indices === nothing ||
        throw(ArgumentError("block_table: beside indptr and indices; one of the two"))
    check_axes("block_table", cache.block_table, "(columns, B)")
    columns = size(cache.block_table, 1)
    check_size("block_table", cache.block_table, (columns, batch))
    cache.max_len === nothing && return columns * page_size
    cache.max_len <= columns * page_size ||
        throw(DimensionMismatch("block_table: $columns columns of pages of $page_size; max_len is $(cache.max_len)"))
    return cache.max_len
end

"The struct, of arrays that are kept alive."
function raw_cache(cache::KVCache, stored)
    batch = stored.sequences.batch
    code, items = stored_code("k", cache.k, cache.k_format)
    fields = (k = tensor("k", cache.k, code, items), max_len = stored.sequences.len_k,
              num_pages = size(cache.k, 4), lengths = sequence_values("lengths", cache.lengths, batch),
              cache_batch_idx = sequence_values("entries", cache.entries, batch))
    if cache.v !== nothing
        code, items = stored_code("v", cache.v, cache.v_format)
        fields = merge(fields, (v = tensor("v", cache.v, code, items),))
    end
    stored.paged && (fields = merge(fields, page_fields(cache, batch)))
    return Ref(Raw.cuflash_kv_cache_t(; fields..., scale_fields(cache, stored)...))
end

function page_fields(cache, batch)
    page_size = size(cache.k, 2)
    if cache.block_table !== nothing
        bits, ids = page_ids("block_table", cache.block_table)
        return (layout = Raw.CUFLASH_CACHE_PAGED, page_size = page_size, id_bits = bits,
                block_table = ids,
                block_table_stride = batch > 1 ? stride(cache.block_table, 2) : size(cache.block_table, 1))
    end
    check_axes("indices", cache.indices, "(pages)")
    bits, ids = page_ids("indices", cache.indices)
    return (layout = Raw.CUFLASH_CACHE_PAGED_CSR, page_size = page_size, id_bits = bits,
            page_indptr = sequence_values("indptr", cache.indptr, batch + 1), page_indices = ids)
end

"Their bits, and where they are."
function page_ids(name, ids)
    eltype(ids) in (Int32, Int64) || throw(ArgumentError("$name: $(eltype(ids)); Int32 or Int64"))
    size(ids, 1) > 1 && stride(ids, 1) != 1 && throw(ArgumentError("$name: not contiguous"))
    return 8 * sizeof(eltype(ids)), address(ids)
end

function scale_fields(cache, stored)
    head_dim, head_dim_v = stored.head_dim, stored.fields.head_dim_v
    given = filter(entry -> entry[2] !== nothing, (
        (:k_scale, cache.k_scale, head_dim), (:v_scale, cache.v_scale, head_dim_v),
        (:k_zero, cache.k_zero, head_dim), (:v_zero, cache.v_zero, head_dim_v)))
    isempty(given) && return NamedTuple()
    steps(array) = ntuple(axis -> repeating_stride(array, axis + 1), 3)
    of, model, _ = first(given)
    sizes = [0, 32, 64, 128]
    for (name, array, channels) in given
        check_repeating(name, array, (size(array, 1), size(cache.k)[2:4]...))
        filter!(group -> size(array, 1) == (group == 0 ? 1 : cld(channels, group)), sizes)
        isempty(sizes) && throw(DimensionMismatch(
            "$name: $(size(array, 1)) groups of $channels channels; 1, or as many as there are of 32, 64 or 128, " *
            "for keys and values alike"))
        eltype(array) === eltype(model) && steps(array) == steps(model) ||
            throw(ArgumentError("$name: not of the type and strides of $of"))
    end
    slot, head, page = steps(model)
    return merge((scale_dtype = float_code(of, model), scale_group = first(sizes), scale_slot_stride = slot,
                  scale_head_stride = head, scale_page_stride = page),
                 NamedTuple{map(first, given)}(map(entry -> address(entry[2]), given)))
end

"Calls `operate(handle, cache, append, stream)` with the structs that the keywords of `append!` mean."
function with_append(operate, cache::KVCache, k, v; q = nothing, q_out = nothing, positions = nothing,
                     slot_mapping = nothing, cos = nothing, sin = nothing, interleaved = false,
                     q_norm_weight = nothing, k_norm_weight = nothing, norm_epsilon = 0,
                     target_arch = 0, handle = nothing)
    check_axes("k", k, "(D, T, H, B)")
    head_dim, len, heads_kv, batch = size(k)
    stored = extents(cache, heads_kv, head_dim, batch, len; chosen_slots = slot_mapping !== nothing)
    heads_kv == stored.fields.heads_kv ||
        throw(DimensionMismatch("k: $heads_kv heads; the cache has $(stored.fields.heads_kv)"))
    v === nothing || cache.v !== nothing ||
        throw(ArgumentError("v: given, but the cache has no values besides its keys"))
    (q === nothing) == (q_out === nothing) || throw(ArgumentError("q, q_out: one without the other"))
    all_arrays = (k, v, q, q_out, positions, slot_mapping, cos, sin, q_norm_weight, k_norm_weight,
                  arrays(cache)...)
    handle = choose_handle(handle, all_arrays)
    GC.@preserve all_arrays begin
        fields = (batch = batch, heads_kv = heads_kv, len = len, head_dim = head_dim, k = tensor("k", k),
                  positions = dense_values(Int32, "positions", positions, (len, batch)),
                  slot_mapping = dense_values(Int64, "slot_mapping", slot_mapping, (len, batch)),
                  q_norm_weight = dense_values(eltype(k), "q_norm_weight", q_norm_weight, (head_dim,)),
                  k_norm_weight = dense_values(eltype(k), "k_norm_weight", k_norm_weight, (head_dim,)),
                  norm_epsilon = norm_epsilon, target_arch = target_arch,
                  flags = interleaved ? Raw.CUFLASH_APPEND_INTERLEAVED : 0)
        fields = merge(fields, rotary_fields(cos, sin))
        if v !== nothing
            check_size("v", v, (stored.fields.head_dim_v, len, heads_kv, batch))
            fields = merge(fields, (v = tensor("v", v), head_dim_v = stored.fields.head_dim_v))
        end
        if q !== nothing
            check_axes("q", q, "(D, T, H, B)")
            check_size("q", q, (head_dim, len, size(q, 3), batch))
            check_size("q_out", q_out, size(q))
            fields = merge(fields, (heads_q = size(q, 3), q = tensor("q", q), q_out = tensor("q_out", q_out)))
        end
        return operate(handle, raw_cache(cache, stored), Ref(Raw.cuflash_kv_append_t(; fields...)),
                       stream(Val(place(handle))))
    end
end

function rotary_fields(cos, sin)
    cos === nothing && sin === nothing && return NamedTuple()
    model = cos === nothing ? sin : cos
    check_axes("cos", model, "(R / 2, positions)")
    size(model, 1) == 0 && throw(DimensionMismatch("cos: no channels"))
    return (cos = dense_values(Float32, "cos", cos, size(model)),
            sin = dense_values(Float32, "sin", sin, size(model)), max_position = size(model, 2),
            rotary_dim = 2 * size(model, 1))
end
