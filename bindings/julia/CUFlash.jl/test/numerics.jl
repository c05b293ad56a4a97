# Every operation on the CPU, against Float64.

Random.seed!(1)

# The keywords of a call, and what the reference calls them.
const MASKS = [
    (NamedTuple(), NamedTuple()),
    ((causal = true,), (causal = true,)),
    ((causal = true, align = :top_left), (causal = true, centre = 1)),
    ((causal = true, align = -2), (causal = true, centre = -1)),
    ((window = (3, 0),), (window = (3, 0),)),
    ((window = (nothing, 1), align = :top_left), (window = (nothing, 1), centre = 1)),
    ((scale = 0.5,), (scale = 0.5,)),
]

const TOLERANCES = [(Float32, 1e-5, 1e-5), (Float16, 1e-3, 8e-3), (CUFlash.BFloat16, 8e-3, 6e-2)]

@testset "forward and backward, $T" for (T, tolerance, of_gradients) in TOLERANCES
    for (keywords, options) in MASKS, (len_q, len_k) in ((7, 11), (11, 7))
        q, d_o = numbers(T, 20, len_q, 6, 2), numbers(T, 20, len_q, 6, 2)
        k, v = numbers(T, 20, len_k, 2, 2), numbers(T, 20, len_k, 2, 2)
        o, lse = attention(q, k, v; keywords...)
        expected, expected_lse = reference(q, k, v; options...)
        @test eltype(o) === T && eltype(lse) === Float32
        @test difference(o, expected) < tolerance
        @test difference(lse, expected_lse) < tolerance
        found = attention_backward(d_o, q, k, v, o, lse; keywords...)
        wanted = reference_backward(d_o, q, k, v; options...)
        @test all(map(difference, found, wanted) .< of_gradients)
    end
end

@testset "extents" begin
    for (D, Sq, Sk, Hq, Hkv, B) in
        ((1, 5, 6, 2, 1, 1), (256, 3, 4, 1, 1, 1), (8, 0, 4, 2, 2, 1), (8, 3, 0, 2, 2, 1))
        q, k, v = numbers(Float32, D, Sq, Hq, B), numbers(Float32, D, Sk, Hkv, B),
                  numbers(Float32, D, Sk, Hkv, B)
        o, lse = attention(q, k, v)
        @test difference(o, first(reference(q, k, v))) < 1e-5
        @test difference(lse, last(reference(q, k, v))) < 1e-5
    end
end

@testset "offsets of each sequence" begin
    q, k = numbers(Float32, 16, 5, 2, 3), numbers(Float32, 16, 9, 1, 3)
    offsets = Int32[4, 0, -2]
    o, _ = attention(q, k, k; causal = true, align = offsets)
    for b in 1:3
        one = (x -> x[:, :, :, b:b])
        expected, _ = reference(one(q), one(k), one(k); causal = true, centre = 1 + offsets[b])
        @test difference(one(o), expected) < 1e-5
    end
end

@testset "strides" begin
    # q, k and v in one array (D, head, q k v, row, batch): what a projection of all three gives.
    packed = numbers(Float32, 16, 3, 3, 10, 2)
    part(i) = PermutedDimsArray(view(packed, :, :, i, :, :), (1, 3, 2, 4))
    q, k, v = part(1), part(2), part(3)
    expected, expected_lse = reference(q, k, v; causal = true)
    o, lse = attention(q, k, v; causal = true)
    @test difference(o, expected) < 1e-5
    # Written through strides too, and what lies between is left alone.
    memory = fill(NaN32, 20, 3, 10, 2)
    rows = fill(NaN32, 3, 10, 2)
    target = PermutedDimsArray(view(memory, 1:16, :, :, :), (1, 3, 2, 4))
    target_lse = PermutedDimsArray(rows, (2, 1, 3))
    @test attention!(target, q, k, v; lse = target_lse, causal = true) === target
    @test difference(target, expected) < 1e-5
    @test difference(target_lse, expected_lse) < 1e-5
    @test all(isnan, memory[17:20, :, :, :])
    d_o = numbers(Float32, 16, 10, 3, 2)
    found = attention_backward(d_o, q, k, v, target, target_lse; causal = true)
    @test all(map(difference, found, reference_backward(d_o, q, k, v; causal = true)) .< 1e-5)
end

@testset "decode" begin
    q = numbers(Float32, 16, 4, 4, 3)
    k, v = numbers(Float32, 16, 23, 2, 3), numbers(Float32, 16, 23, 2, 3)
    lengths = Int32[23, 9, 0]
    o, lse = decode(q, k, v; lengths = lengths, causal = true, num_splits = 3)
    for b in 1:3
        valid(x) = x[:, 1:lengths[b], :, b:b]
        expected, expected_lse = reference(q[:, :, :, b:b], valid(k), valid(v); causal = true)
        @test difference(o[:, :, :, b:b], expected) < 1e-5
        @test difference(lse[:, :, b:b], expected_lse) < 1e-5
    end
    @test difference(first(decode(q, k, v)), first(reference(q, k, v))) < 1e-5
end

@testset "merge" begin
    q, k = numbers(Float32, 16, 6, 3, 2), numbers(Float32, 16, 20, 3, 2)
    halves = [attention(q, view(k, :, half, :, :), view(k, :, half, :, :))
              for half in (1:10, 11:20)]
    parts, lse_parts = cat(map(first, halves)...; dims = 5), cat(map(last, halves)...; dims = 4)
    expected, expected_lse = reference(q, k, k)
    o, lse = merge_states(parts, lse_parts)
    @test difference(o, expected) < 1e-5 && difference(lse, expected_lse) < 1e-5
    o, lse = merge_states(parts, lse_parts ./ log(2.0f0); base2 = true)
    @test difference(o, expected) < 1e-5 && difference(lse .* log(2.0f0), expected_lse) < 1e-5
    @test merge_states!(o, parts, lse_parts) === o
    @test difference(o, expected) < 1e-5
end

@testset "explain" begin
    q = zeros(Float16, 64, 128, 4, 1)
    @test occursin("\"device\": \"cpu\"", CUFlash.explain(:forward, q, q, q; causal = true))
    @test occursin("\"operation\": \"backward\"", CUFlash.explain(:backward, q, q, q))
    @test occursin("\"operation\": \"decode\"", CUFlash.explain(:decode, q, q, q))
    @test occursin("\"device\": \"sm_90\"", CUFlash.explain(:forward, q, q, q; target_arch = 90))
    @test occursin("\"family\": \"reference\"",
                   CUFlash.explain(:forward, q, q, q; kernel = "reference"))
end

@testset "BFloat16" begin
    for bits in 0x0000:0x0101:0xffff
        x = CUFlash.BFloat16(UInt16(bits))
        isnan(Float32(x)) && continue
        @test CUFlash.BFloat16(Float32(x)).bits == bits
    end
    middle = reinterpret(Float32, 0x3f808000)  # half-way from 1 to the next
    @test CUFlash.BFloat16(middle).bits == 0x3f80
    @test CUFlash.BFloat16(nextfloat(middle)).bits == 0x3f81
    @test CUFlash.BFloat16(reinterpret(Float32, 0x3f818000)).bits == 0x3f82
    @test isnan(Float32(CUFlash.BFloat16(reinterpret(Float32, 0x7f800001))))
    @test Float32(CUFlash.BFloat16(floatmax(Float32))) == Inf32
    @test sprint(show, CUFlash.BFloat16(1.5)) == "BFloat16(1.5)"
end
