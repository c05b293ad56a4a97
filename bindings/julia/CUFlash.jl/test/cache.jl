# Caches in pages, quantised and appended to, and tree masks, on the CPU against Float64.

"Sequence b of pools (D, page, H, pages) by the column of a table, as (D, length, H, 1)."
function of_pages(pool, ids, length)
    page = size(pool, 2)
    slots = [pool[:, s % page + 1, :, ids[s ÷ page + 1] + 1] for s in 0:(length - 1)]
    values = zeros(size(pool, 1), length, size(pool, 3), 1)
    foreach(s -> values[:, s, :, 1] = slots[s], 1:length)
    return values
end

"Each sequence by itself."
function close_to_sequences(o, lse, q, sequences; options...)
    return all(enumerate(sequences)) do (b, (k, v))
        close_to((o[:, :, :, b:b], lse[:, :, b:b]), reference(q[:, :, :, b:b], k, v; options...))
    end
end

"E4M3 without infinities, or E5M2."
function of_fp8(code::UInt8, mantissa)
    exponent, fraction = (code & 0x7f) >> mantissa, (code & (2^mantissa - 1)) / 2^mantissa
    bias = 2^(6 - mantissa) - 1
    value = exponent == 0 ? fraction * 2.0^(1 - bias) : (1 + fraction) * 2.0^(exponent - bias)
    return code & 0x80 == 0 ? value : -value
end

"Nibbles as Int4, the first of each byte in the low half."
of_int4(bytes) = [Float64(reinterpret(Int8, bytes[cld(c, 2), I] << (isodd(c) ? 4 : 0)) >> 4)
                  for c in 1:(2 * size(bytes, 1)), I in CartesianIndices(size(bytes)[2:4])]

const PAGES, UNUSED = 7, typemax(Int32)
const CACHE_LENGTHS = Int32[9, 0, 6]
const CACHE_TABLE = Int32[6 4 3; 0 UNUSED 1; 5 2 UNUSED]
CACHE_TABLE[:, 2] .= UNUSED

@testset "caches in pages" begin
    q = numbers(Float32, 40, 2, 4, 3)
    bytes = rand(MersenneTwister(1), UInt8, 40, 4, 2, PAGES)
    finite = bytes .& 0xbf  # no NaN of either fp8
    scale, zero_point = abs.(numbers(Float32, 2, 4, 2, PAGES)) ./ 30, numbers(Float32, 2, 4, 2, PAGES)
    scales = (k_scale = scale, v_scale = scale)
    zeros_too = merge(scales, (k_zero = zero_point, v_zero = zero_point))
    of_groups(x) = x[[cld(c, 32) for c in 1:40], :, :, :]
    rescaled(x, zero_point = 0 .* scale) = (x .- of_groups(zero_point)) .* of_groups(scale)
    indptr, indices = Int32[0, 3, 3, 5], Int32[6, 0, 5, 3, 1]
    floats = numbers(Float16, 40, 4, 2, PAGES)
    for (array, format, further, values) in (
            (Float32.(floats), nothing, NamedTuple(), Float64.(floats)),
            (floats, nothing, NamedTuple(), Float64.(floats)),
            (reinterpret(Int8, bytes), nothing, zeros_too, rescaled(reinterpret(Int8, bytes), zero_point)),
            (bytes[1:20, :, :, :], :int4, zeros_too, rescaled(of_int4(bytes[1:20, :, :, :]), zero_point)),
            (finite, :float8_e4m3fn, scales, rescaled(of_fp8.(finite, 3))),
            (finite, :float8_e5m2, scales, rescaled(of_fp8.(finite, 2))))
        cache = KVCache(collect(array), collect(array); block_table = CACHE_TABLE, lengths = CACHE_LENGTHS,
                        k_format = format, v_format = format, further...)
        tables = (CACHE_TABLE, view(Int64.(vcat(CACHE_TABLE, CACHE_TABLE)), 1:3, :))
        sequences = [(of_pages(values, CACHE_TABLE[:, b], n), of_pages(values, CACHE_TABLE[:, b], n))
                     for (b, n) in enumerate(CACHE_LENGTHS)]
        for table in tables
            cache.block_table = table
            @test close_to_sequences(decode(q, cache; causal = true)..., q, sequences; causal = true)
        end
        cache.block_table, cache.indptr, cache.indices, cache.max_len = nothing, indptr, indices, 12
        @test close_to_sequences(decode(q, cache; causal = true)..., q, sequences; causal = true)
    end
    k, v = collect(reinterpret(Int8, bytes)), floats  # each of its own type
    cache = KVCache(k, v; block_table = CACHE_TABLE, lengths = CACHE_LENGTHS, k_scale = scale[1:1, :, :, :])
    values = k .* Float64.(scale[1:1, :, :, :])
    o, lse = decode(q, cache; batch_invariant = true, deterministic = true, sm_margin = 3)
    @test close_to_sequences(o, lse, q, [
        (of_pages(values, CACHE_TABLE[:, b], n), of_pages(v, CACHE_TABLE[:, b], n))
        for (b, n) in enumerate(CACHE_LENGTHS)])
    for b in (1, 3)  # alone, bit for bit
        cache.block_table, cache.lengths = CACHE_TABLE[:, b:b], CACHE_LENGTHS[b:b]
        @test first(decode(q[:, :, :, b:b], cache; batch_invariant = true)) == o[:, :, :, b:b]
    end
    @test occursin("\"decode\"", CUFlash.explain(:decode, q[:, :, :, 1:1], cache))
end

@testset "entries of a cache" begin
    q, k = numbers(Float32, 16, 1, 4, 2), numbers(Float32, 16, 6, 1, 3)
    o, lse = decode(q, KVCache(k; entries = Int32[2, 0], head_dim_v = 8))
    chosen = k[:, :, :, [3, 1]]
    @test close_to((o, lse), reference(q, chosen, chosen[1:8, :, :, :]))
    @test close_to(decode(q, KVCache(k; entries = Int32[2, 0])), reference(q, chosen, chosen))
    # An odd number of channels of int4.
    bytes = rand(MersenneTwister(2), UInt8, 4, 6, 1, 2)
    q7 = numbers(Float32, 7, 1, 2, 2)
    values = of_int4(bytes)[1:7, :, :, :]
    cache = KVCache(bytes, bytes; k_format = :int4, v_format = :int4, head_dim_v = 7)
    @test close_to(decode(q7, cache), reference(q7, values, values))
end

@testset "tree masks" begin
    q, k, v = numbers(Float32, 16, 3, 4, 2), numbers(Float32, 16, 40, 2, 2), numbers(Float32, 16, 40, 2, 2)
    for (words, len) in ((UInt32[0b001 0b011 0b101], nothing), (rand(MersenneTwister(3), UInt32, 2, 3, 2), 36))
        count = len === nothing ? 3 : len
        seen(t, i, b) = words[t ÷ 32 + 1, i, min(b, size(words, 3))] >> (t % 32) & 1 == 1
        bias = [j > 40 - count && !seen(j - 41 + count, i, b) ? -Inf : 0.0
                for j in 1:40, i in 1:3, h in 1:4, b in 1:2]
        wanted = reference(q, k, v; bias = bias)
        @test close_to(attention(q, k, v; tree_mask = words, tree_mask_len = len), wanted)
        @test close_to(decode(q, k, v; tree_mask = reinterpret(Int32, words), tree_mask_len = len), wanted)
    end
    @test first(decode(q, k, v; tree_mask = UInt32[0 0 0], tree_mask_len = 0)) == first(decode(q, k, v))
end

"Rows (D, T, H, B) normed and rotated in Float64."
function changed(x, weight, epsilon, positions, cos, sin, interleaved)
    x = Float64.(x)
    x = x ./ sqrt.(sum(abs2, x; dims = 1) ./ size(x, 1) .+ epsilon) .* weight
    half = size(cos, 1)
    for b in 1:size(x, 4), t in 1:size(x, 2), pair in 1:half
        i, j = interleaved ? (2pair - 1, 2pair) : (pair, pair + half)
        c, s = Float64(cos[pair, positions[t, b] + 1]), Float64(sin[pair, positions[t, b] + 1])
        first_ones, others = x[i, t, :, b], x[j, t, :, b]
        x[i, t, :, b], x[j, t, :, b] = first_ones .* c .- others .* s, first_ones .* s .+ others .* c
    end
    return x
end

@testset "append, then decode" begin
    before, len = Int32[5, 0, 2], 3
    for interleaved in (false, true), by_slots in (false, true)
        k_pool, v_pool = numbers(Float32, 40, 4, 2, PAGES), numbers(Float32, 24, 4, 2, PAGES)
        table = Int32[6 4 3; 0 UNUSED 1]
        cache = KVCache(k_pool, v_pool; block_table = table, lengths = before)
        k, v, q = numbers(Float32, 40, len, 2, 3), numbers(Float32, 24, len, 2, 3), numbers(Float32, 40, len, 4, 3)
        positions = Int32[before[b] + t - 1 for t in 1:len, b in 1:3]
        angles = numbers(Float32, 6, 16)
        weights = numbers(Float32, 40), numbers(Float32, 40)
        further = (cos = cos.(angles), sin = sin.(angles), interleaved = interleaved, norm_epsilon = 1e-3)
        arguments = (1e-3, positions, further.cos, further.sin, interleaved)
        k_wanted, v_wanted = Float64.(k_pool), Float64.(v_pool)
        changed_k = changed(k, weights[1], arguments...)
        for b in 1:3, t in 1:len
            slot = positions[t, b]
            at = slot % 4 + 1, table[slot ÷ 4 + 1, b] + 1
            k_wanted[:, at[1], :, at[2]], v_wanted[:, at[1], :, at[2]] = changed_k[:, t, :, b], v[:, t, :, b]
        end
        q_wanted = changed(q, weights[2], arguments...)
        q_out = fill(NaN32, size(q))
        norms = (k_norm_weight = weights[1], q_norm_weight = weights[2])
        if by_slots
            slot(p, b) = Int64(4 * table[p ÷ 4 + 1, b] + p % 4)
            slots = [slot(positions[t, b], b) for t in 1:len, b in 1:3]
            further = merge(further, (slot_mapping = slots, positions = positions))
            cache.lengths = nothing
        end
        @test append!(cache, k, v; q = q, q_out = q_out, norms..., further...) === cache
        @test difference(k_pool, k_wanted) < 1e-5 && v_pool == v_wanted
        @test difference(q_out, q_wanted) < 1e-5
        append!(cache, k; q = q, q_out = q, norms..., further...)
        @test q == q_out
        @test before == Int32[5, 0, 2]
        cache.lengths = before .+ Int32(len)
        after(pool, b) = of_pages(pool, table[:, b], before[b] + len)
        sequences = [(after(k_wanted, b), after(v_wanted, b)) for b in 1:3]
        @test close_to_sequences(decode(q, cache; causal = true)..., q, sequences; causal = true)
    end
    # Quantised, saturated; what is negative is skipped.
    codes = ones(Int8, 8, 4, 1, 2)
    cache = KVCache(codes, copy(codes); k_scale = fill(0.5f0, 1), k_zero = fill(1f0, 1))
    new = fill(2f0, 8, 3, 1, 1)
    new[:, 3, :, :] .= 1000
    slots = reshape(Int64[2, -1, 7], 3, 1)
    @test occursin("\"append\"", CUFlash.explain(:append, cache, new; slot_mapping = slots))
    append!(cache, new; slot_mapping = slots)
    @test codes[:, 3, 1, 1] == fill(5, 8) && codes[:, 4, 1, 2] == fill(127, 8) && sum(codes) == 8 * (6 + 5 + 127)
end

@testset "bad caches" begin
    q, pool, new = numbers(Float32, 8, 1, 4, 2), numbers(Float32, 8, 4, 2, 5), numbers(Float32, 8, 1, 2, 2)
    table, lengths = zeros(Int32, 3, 2), Int32[3, 5]
    over(; given...) = decode(q, KVCache(pool, pool; given...))
    in_pages(; given...) = over(; block_table = table, lengths = lengths, given...)
    to(k, v = nothing; given...) =
        append!(KVCache(copy(pool), copy(pool); block_table = table, lengths = lengths), k, v; given...)
    bytes = zeros(UInt8, 4, 4, 2, 5)
    angles = zeros(Float32, 4, 9)
    calls = [
        (() -> in_pages(block_table = table[:, 1:1]), DimensionMismatch),
        (() -> in_pages(block_table = Int16.(table)), ArgumentError),
        (() -> in_pages(block_table = view(zeros(Int32, 6, 2), 1:2:6, :)), ArgumentError),
        (() -> in_pages(max_len = 13), DimensionMismatch),
        (() -> in_pages(entries = lengths), ArgumentError),
        (() -> in_pages(indptr = Int32[0, 1, 2]), ArgumentError),
        (() -> over(indptr = Int32[0, 1, 2], indices = Int32[0, 1]), ArgumentError),
        (() -> over(indptr = Int32[0, 1, 2], max_len = 4), ArgumentError),
        (() -> over(indptr = Int32[0, 1], indices = Int32[0, 1], max_len = 4), DimensionMismatch),
        (() -> over(max_len = 4), ArgumentError),
        (() -> over(lengths = Int64.(lengths)), ArgumentError),
        (() -> over(entries = Int32[1]), DimensionMismatch),
        (() -> over(k_format = :int4), ArgumentError),
        (() -> over(head_dim_v = 7), DimensionMismatch),
        (() -> decode(q, KVCache(bytes, bytes)), ArgumentError),
        (() -> decode(q, KVCache(bytes, bytes; k_format = :int4, v_format = :float8_e4m3)), ArgumentError),
        (() -> decode(q, KVCache(bytes, pool; k_format = :float8_e5m2)), DimensionMismatch),
        (() -> decode(q, KVCache(pool[:, :, :, 1:1], pool[:, :, :, 1:1])), DimensionMismatch),
        (() -> decode(q, KVCache(pool; head_dim_v = 9)), CUFlash.CUFlashError),
        (() -> over(k_scale = ones(Float32, 2)), DimensionMismatch),
        (() -> over(k_scale = ones(Float32, 1, 3)), DimensionMismatch),
        (() -> over(k_scale = ones(Float64, 1)), ArgumentError),
        (() -> over(k_scale = ones(Float32, 1, 4), v_scale = ones(Float32, 1)), ArgumentError),
        (() -> over(v_zero = ones(Float32, 1)), CUFlash.CUFlashError),
        (() -> decode(q, pool, pool; tree_mask = ones(UInt64, 1)), ArgumentError),
        (() -> decode(q, pool, pool; tree_mask = ones(UInt32, 1, 2)), DimensionMismatch),
        (() -> decode(q, pool, pool; tree_mask = ones(UInt32, 1), tree_mask_len = 33), DimensionMismatch),
        (() -> attention_backward(q, q, q, q, q, zeros(Float32, 1, 4, 2); tree_mask = ones(UInt32, 1)),
         CUFlash.CUFlashError),
        (() -> append!(KVCache(copy(pool), copy(pool)), new, new), CUFlash.CUFlashError),
        (() -> to(new[:, :, 1:1, :]), DimensionMismatch),
        (() -> to(new[1:4, :, :, :]), DimensionMismatch),
        (() -> to(new, new[:, [1, 1], :, :]), DimensionMismatch),
        (() -> to(new, Float16.(new)), CUFlash.CUFlashError),
        (() -> to(new; q = q), ArgumentError),
        (() -> to(new; q = q, q_out = q[:, :, :, 1:1]), DimensionMismatch),
        (() -> to(new; positions = Int32[1, 2]), DimensionMismatch),
        (() -> to(new; positions = [1 2]), ArgumentError),
        (() -> to(new; slot_mapping = Int32[1 2]), ArgumentError),
        (() -> to(new; cos = angles), CUFlash.CUFlashError),
        (() -> to(new; cos = angles, sin = angles[:, 1:8]), DimensionMismatch),
        (() -> to(new; cos = angles[1:0, :], sin = angles[1:0, :]), DimensionMismatch),
        (() -> to(new; cos = vcat(angles, angles), sin = vcat(angles, angles)), CUFlash.CUFlashError),
        (() -> to(new; interleaved = true), CUFlash.CUFlashError),
        (() -> to(new; k_norm_weight = ones(Float32, 7)), DimensionMismatch),
        (() -> to(new; norm_epsilon = 1), CUFlash.CUFlashError),
        (() -> append!(KVCache(copy(pool); lengths = lengths), new, new), ArgumentError),
    ]
    for (index, (call, exception)) in enumerate(calls)
        @testset "call $index" begin
            @test_throws exception call()
        end
    end
    in_pages()
    to(new, new)
end
