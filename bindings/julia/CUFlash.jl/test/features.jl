# What scores, batches and gradients can have beyond the plain call, on the CPU against Float64.

"Whether results are the expected ones, in Float32."
close_to(found, expected, tolerance = 1e-5) = all(map(difference, found, expected) .< tolerance)

@testset "modifiers" begin
    q, d_o = numbers(Float32, 40, 9, 4, 2), numbers(Float32, 24, 9, 4, 2)
    k, v = numbers(Float32, 40, 13, 2, 2), numbers(Float32, 24, 13, 2, 2)
    slopes, sinks = numbers(Float32, 4, 2), Float32[0.5, -1, -Inf, 2]
    bias, d_lse = numbers(Float32, 13, 9, 4, 2), numbers(Float32, 9, 4, 2)
    bias[4, 1, 1, 1] = -Inf32
    all_of_them = (softcap = 0.7, alibi_slopes = slopes, bias = bias, sinks = sinks)
    for given in ((softcap = 0.7,), (alibi_slopes = slopes,), (bias = bias,), (sinks = sinks,), all_of_them)
        options = merge(given, (causal = true,))
        if haskey(options, :alibi_slopes)
            names = map(name -> name === :alibi_slopes ? :slopes : name, keys(options))
            options = NamedTuple{names}(values(options))
        end
        o, lse = attention(q, k, v; causal = true, given...)
        @test size(o) == (24, 9, 4, 2)
        @test close_to((o, lse), reference(q, k, v; options...))

        delta, d_bias, d_sinks = fill(NaN32, 9, 4, 2), fill(NaN32, size(bias)), fill(NaN32, 4)
        further = merge(haskey(given, :bias) ? (d_bias = d_bias,) : NamedTuple(),
                        haskey(given, :sinks) ? (d_sinks = d_sinks,) : NamedTuple())
        found = attention_backward(d_o, q, k, v, o, lse; causal = true, d_lse = d_lse, delta = delta,
                                   further..., given...)
        wanted = reference_further(d_o, q, k, v; d_lse = d_lse, options...)
        @test close_to(found, wanted[1:3])
        @test !haskey(given, :bias) || difference(d_bias, wanted[4]) < 1e-5
        @test !haskey(given, :sinks) || difference(d_sinks, wanted[5]) < 1e-5
        @test difference(delta, wanted[6]) < 1e-5
        # The sums of o .* d_o, given, stand for o.
        found = attention_backward(d_o, q, k, v, fill(NaN32, size(o)), lse; causal = true, d_lse = d_lse,
                                   known_delta = delta, given...)
        @test close_to(found, wanted[1:3])
    end
end

@testset "modifiers that repeat" begin
    q, k = numbers(Float32, 16, 5, 3, 2), numbers(Float32, 16, 7, 3, 2)
    slopes, bias = numbers(Float16, 3), numbers(Float16, 7, 1, 3)
    everywhere = bias .+ zeros(7, 5, 3, 2)
    options = (slopes = slopes .+ zeros(3, 2), bias = everywhere)
    o, lse = attention(q, k, k; alibi_slopes = slopes, bias = bias)
    @test close_to((o, lse), reference(q, k, k; options...))
    d_bias = fill(Float16(NaN), size(bias))
    attention_backward(o, q, k, k, o, lse; alibi_slopes = slopes, bias = bias, d_bias = d_bias)
    wanted = reference_further(o, q, k, k; options...)[4]
    @test difference(d_bias, dropdims(sum(wanted; dims = (2, 4)); dims = 4)) < 2e-3
    # Of no rows and no sequences.
    none = zeros(Float32, 16, 0, 3, 2)
    @test isempty(first(attention(none, k, k; bias = zeros(Float32, 7, 0, 3, 2))))
    d_bias = zeros(Float32, 7, 0, 3, 2)
    _, dk, _ = attention_backward(none, none, k, k, none, zeros(Float32, 0, 3, 2);
                                  bias = zeros(Float32, 7, 0, 3, 2), d_bias = d_bias)
    @test all(iszero, dk)
end

@testset "dropout" begin
    # With the identity as values o shows what is kept; the backward pass drops the same.
    q, k = numbers(Float32, 16, 50, 2, 2), numbers(Float32, 16, 64, 2, 2)
    v = zeros(Float32, 64, 64, 2, 2)
    foreach(j -> v[j, j, :, :] .= 1, 1:64)
    d_o = numbers(Float32, 64, 50, 2, 2)
    options = (dropout_p = 0.25, dropout_seed = 11, dropout_offset = 3)
    o, lse = attention(q, k, v; options...)
    kept = (o .!= 0) ./ 0.75
    @test 0.23 < sum(iszero, kept) / length(kept) < 0.27
    @test close_to((o, lse), reference(q, k, v; kept = kept))
    @test close_to(attention_backward(d_o, q, k, v, o, lse; options...),
                   reference_backward(d_o, q, k, v; kept = kept))
    @test o == first(attention(q, k, v; dropout_p = 0.25, dropout_seed = UInt64[11],
                               dropout_offset = UInt64[3]))
    @test o != first(attention(q, k, v; dropout_p = 0.25, dropout_seed = 12, dropout_offset = 3))
    @test o != first(attention(q, k, v; dropout_p = 0.25, dropout_seed = 11, dropout_offset = 19))
end

@testset "wide outputs, accumulation" begin
    q, k, v = numbers(Float16, 16, 6, 4, 1), numbers(Float16, 16, 10, 2, 1), numbers(Float16, 16, 10, 2, 1)
    o, lse = attention(q, k, v; out_type = Float32)
    @test eltype(o) === Float32
    @test close_to((o, lse), reference(q, k, v))
    found = attention_backward(q, q, k, v, o, lse; out_type = Float32)
    wanted = reference_backward(q, q, k, v)
    @test close_to(found, wanted)
    @test attention_backward!(found..., q, q, k, v, o, lse; accumulate = true) === found
    @test close_to(found, map(x -> 2x, wanted))
    # One half of the keys and then the other, folded in; of a cache too.
    half(x, keys) = view(x, :, keys, :, :)
    o, lse = attention(q, half(k, 1:5), half(v, 1:5); out_type = Float32)
    in_cache, of_cache = copy(o), copy(lse)
    attention!(o, q, half(k, 6:10), half(v, 6:10); lse = lse, accumulate = true)
    @test close_to((o, lse), reference(q, k, v))
    decode!(in_cache, q, half(k, 6:10), half(v, 6:10); lse = of_cache, accumulate = true)
    @test close_to((in_cache, of_cache), reference(q, k, v))
    @test eltype(first(decode(q, k, v; out_type = Float32))) === Float32
end

@testset "weights" begin
    q, k = numbers(Float32, 16, 9, 4, 2), numbers(Float32, 16, 13, 2, 2)
    o, lse = attention(q, k, k; causal = true)
    wanted = first(probabilities(q, k; causal = true))
    @test difference(attention_weights(q, k, lse; causal = true), wanted) < 1e-5
    chosen = attention_weights(q, k, lse; causal = true, rows = Int32[9, 10, 3, 0])
    @test difference(chosen[:, [1, 3], :, :], wanted[:, [9, 3], :, :]) < 1e-5
    @test all(iszero, chosen[:, [2, 4], :, :])
    @test size(attention_weights(q, k, lse; rows = Int32[])) == (13, 0, 4, 2)
end

@testset "packed sequences" begin
    # Some are empty; rows of k and v before the first, and of all after the last, belong to none.
    offsets_q, offsets_k = Int32[0, 5, 5, 9, 16], Int32[1, 8, 11, 11, 20]
    q, d_o = numbers(Float32, 16, 4, 17), numbers(Float32, 24, 4, 17)
    k, v = numbers(Float32, 16, 2, 22), numbers(Float32, 24, 2, 22)
    k[:, :, [1, 21, 22]] .= NaN32
    v[:, :, [1, 21, 22]] .= NaN32
    lengths = (max_len_q = 7, max_len_k = 9)
    o, lse = attention_varlen(q, k, v, offsets_q, offsets_k; causal = true, lengths...)
    d_lse = numbers(Float32, 17, 4)
    found = attention_varlen_backward(d_o, q, k, v, o, lse, offsets_q, offsets_k; causal = true,
                                      d_lse = d_lse, lengths...)
    heads_first(x, rows) = permutedims(x[:, :, rows], (1, 3, 2))[:, :, :, :]
    for b in 1:4
        of_q, of_k = (offsets[b] + 1:offsets[b + 1] for offsets in (offsets_q, offsets_k))
        one = (heads_first(q, of_q), heads_first(k, of_k), heads_first(v, of_k))
        @test close_to((heads_first(o, of_q), lse[of_q, :, :]), reference(one...; causal = true))
        @test close_to(map(heads_first, found, (of_q, of_k, of_k)), reference_backward(
            heads_first(d_o, of_q), one...; causal = true, d_lse = d_lse[of_q, :, :]))
    end
    @test all(iszero, o[:, :, 17]) && all(==(-Inf32), lse[17, :])
    @test all(iszero, found[1][:, :, 17]) && all(iszero, found[2][:, :, [1, 21, 22]])
    # Into arrays with gaps, which stay as they were.
    memory = fill(NaN32, 30, 4, 17)
    attention_varlen!(view(memory, 1:24, :, :), q, k, v, offsets_q, offsets_k; causal = true, lengths...)
    @test memory[1:24, :, 1:16] == o[:, :, 1:16]
    @test all(isnan, memory[25:30, :, :]) && all(isnan, memory[:, :, 17])
    # Offsets and lengths may hold anything; nothing else is touched.
    for garbage in (Int32[typemin(Int32), typemax(Int32), -5, 2^30, 3], fill(typemax(Int32), 5))
        memory .= NaN32
        attention_varlen!(view(memory, 1:24, :, 2:16), q[:, :, 2:16], k, v, garbage, garbage;
                          seqused_q = garbage[1:4], seqused_k = garbage[2:5], leftpad_k = garbage[1:4],
                          max_len_q = 2^20, max_len_k = 2^20)
        @test all(isnan, memory[25:30, :, :]) && all(isnan, memory[:, :, [1, 17]])
    end
end

@testset "lengths and left padding" begin
    q, k = numbers(Float32, 16, 6, 2, 3), numbers(Float32, 16, 8, 2, 3)
    used_q, used_k, padding = Int32[6, 0, 3], Int32[8, 4, 5], Int32[2, 0, 4]
    for b in 1:3
        k[:, 1:padding[b], :, b] .= NaN32
        k[:, used_k[b]+1:8, :, b] .= NaN32
    end
    o = fill(NaN32, size(q))
    attention!(o, q, k, k; causal = true, seqused_q = used_q, seqused_k = used_k, leftpad_k = padding)
    for b in 1:3
        rows, keys = 1:used_q[b], padding[b]+1:used_k[b]
        wanted, _ = reference(q[:, rows, :, b:b], k[:, keys, :, b:b], k[:, keys, :, b:b]; causal = true)
        @test difference(o[:, rows, :, b:b], wanted) < 1e-5
        @test all(isnan, o[:, used_q[b]+1:6, :, b])
    end
end
