# Attention written out in Float64, and arrays to try it on.

"Whether query row i sees key j, from 1; `centre` is the key that row 1 is centred on."
function sees(i, j; causal, window, centre)
    c = centre + i - 1
    left, right = window
    return (!causal || j <= c) && (left === nothing || j >= c - left) &&
           (right === nothing || j <= c + right)
end

"""
Probabilities (Sk, Sq, Hq, B), before dropout, the scores' derivatives by the scaled products, and LSE (Sq, Hq, B).
`slopes` is (Hq, B), `bias` (Sk, Sq, Hq, B).
"""
function probabilities(q, k; scale = 1 / sqrt(size(q, 1)), causal = false,
                       window = (nothing, nothing), centre = 1 + size(k, 2) - size(q, 2),
                       softcap = nothing, slopes = nothing, bias = nothing, sinks = nothing)
    _, len_q, heads, batch = size(q)
    group = heads ÷ max(size(k, 3), 1)
    p, slope = zeros(size(k, 2), len_q, heads, batch), ones(size(k, 2), len_q, heads, batch)
    lse = fill(-Inf, len_q, heads, batch)
    for b in 1:batch, h in 1:heads, i in 1:len_q
        scores = fill(-Inf, size(k, 2))
        for j in 1:size(k, 2)
            sees(i, j; causal = causal, window = window, centre = centre) || continue
            s = scale * sum(Float64.(q[:, i, h, b]) .* Float64.(k[:, j, cld(h, group), b]))
            if softcap !== nothing
                slope[j, i, h, b] = 1 - tanh(s / softcap)^2
                s = softcap * tanh(s / softcap)
            end
            slopes === nothing || (s -= slopes[h, b] * abs(centre + i - 1 - j))
            bias === nothing || (s += bias[j, i, h, b])
            scores[j] = s
        end
        sink = sinks === nothing ? -Inf : Float64(sinks[h])
        top = maximum([scores; sink])
        top == -Inf && continue
        lse[i, h, b] = top + log(sum(exp.(scores .- top)) + exp(sink - top))
        p[:, i, h, b] = exp.(scores .- lse[i, h, b])
    end
    return p, slope, lse
end

"`kept` is what dropout multiplies the probabilities by."
function reference(q, k, v; kept = 1, options...)
    p, _, lse = probabilities(q, k; options...)
    p = p .* kept
    o = zeros(size(v, 1), size(q)[2:4]...)
    group = size(q, 3) ÷ max(size(k, 3), 1)
    for b in 1:size(q, 4), h in 1:size(q, 3)
        o[:, :, h, b] = Float64.(v[:, :, cld(h, group), b]) * p[:, :, h, b]
    end
    return o, lse
end

"dq, dk and dv; then those of a bias, for each score, and of the sinks, and the sums of o .* d_o."
function reference_further(d_o, q, k, v; d_lse = zeros(size(q)[2:4]), kept = 1, sinks = nothing,
                           scale = 1 / sqrt(size(q, 1)), options...)
    p, slope, lse = probabilities(q, k; scale = scale, sinks = sinks, options...)
    dq, dk, dv, d_bias = zeros(size(q)), zeros(size(k)), zeros(size(v)), zero(p)
    d_sinks, delta = zeros(size(q, 3)), zeros(size(q)[2:4])
    group = size(q, 3) ÷ size(k, 3)
    kept = kept .* ones(size(p))
    for b in 1:size(q, 4), h in 1:size(q, 3)
        g = cld(h, group)
        q1, k1, v1, d1 = (Float64.(x) for x in
                          (q[:, :, h, b], k[:, :, g, b], v[:, :, g, b], d_o[:, :, h, b]))
        p1, kept1 = p[:, :, h, b], kept[:, :, h, b]
        dp = v1' * d1 .* kept1
        sums = sum(p1 .* dp; dims = 1)
        onto_lse = Float64.(d_lse[:, h, b])'
        d_bias[:, :, h, b] = p1 .* (dp .- sums .+ onto_lse)
        ds = scale .* slope[:, :, h, b] .* d_bias[:, :, h, b]
        dq[:, :, h, b] = k1 * ds
        dk[:, :, g, b] += q1 * ds'
        dv[:, :, g, b] += d1 * (p1 .* kept1)'
        delta[:, h, b] = sums
        sinks === nothing ||
            (d_sinks[h] += sum(exp.(sinks[h] .- lse[:, h, b])' .* (onto_lse .- sums)))
    end
    return dq, dk, dv, d_bias, d_sinks, delta
end

reference_backward(arguments...; options...) = reference_further(arguments...; options...)[1:3]

"The largest difference, where the same infinity on both sides is none."
function difference(got, expected)
    @assert size(got) == size(expected)
    worst = 0.0
    for (a, b) in zip(Float64.(got), expected)
        a == b && continue
        isfinite(a - b) || return Inf
        worst = max(worst, abs(a - b))
    end
    return worst
end

numbers(T, dims...) = T.(2 .* rand(Float32, dims...) .- 1)
