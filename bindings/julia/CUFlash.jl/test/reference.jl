# Attention written out in Float64, and arrays to try it on.

"Whether query row i sees key j, from 1; `centre` is the key that row 1 is centred on."
function sees(i, j; causal, window, centre)
    c = centre + i - 1
    left, right = window
    return (!causal || j <= c) && (left === nothing || j >= c - left) &&
           (right === nothing || j <= c + right)
end

"Probabilities (Sk, Sq, Hq, B) and LSE (Sq, Hq, B)."
function probabilities(q, k; scale = 1 / sqrt(size(q, 1)), causal = false,
                       window = (nothing, nothing), centre = 1 + size(k, 2) - size(q, 2))
    _, len_q, heads, batch = size(q)
    group = heads ÷ max(size(k, 3), 1)
    p = zeros(size(k, 2), len_q, heads, batch)
    lse = fill(-Inf, len_q, heads, batch)
    for b in 1:batch, h in 1:heads, i in 1:len_q
        scores = [sees(i, j; causal = causal, window = window, centre = centre) ?
                  scale * sum(Float64.(q[:, i, h, b]) .* Float64.(k[:, j, cld(h, group), b])) : -Inf
                  for j in 1:size(k, 2)]
        top = isempty(scores) ? -Inf : maximum(scores)
        top == -Inf && continue
        weights = exp.(scores .- top)
        p[:, i, h, b] = weights ./ sum(weights)
        lse[i, h, b] = top + log(sum(weights))
    end
    return p, lse
end

function reference(q, k, v; options...)
    p, lse = probabilities(q, k; options...)
    o = zeros(size(q))
    group = size(q, 3) ÷ max(size(k, 3), 1)
    for b in 1:size(q, 4), h in 1:size(q, 3)
        o[:, :, h, b] = Float64.(v[:, :, cld(h, group), b]) * p[:, :, h, b]
    end
    return o, lse
end

function reference_backward(d_o, q, k, v; scale = 1 / sqrt(size(q, 1)), options...)
    p, _ = probabilities(q, k; scale = scale, options...)
    dq, dk, dv = zeros(size(q)), zeros(size(k)), zeros(size(v))
    group = size(q, 3) ÷ size(k, 3)
    for b in 1:size(q, 4), h in 1:size(q, 3)
        g = cld(h, group)
        q1, k1, v1, d1 = (Float64.(x) for x in
                          (q[:, :, h, b], k[:, :, g, b], v[:, :, g, b], d_o[:, :, h, b]))
        p1 = p[:, :, h, b]
        dp = v1' * d1
        ds = scale .* p1 .* (dp .- sum(p1 .* dp; dims = 1))
        dq[:, :, h, b] = k1 * ds
        dk[:, :, g, b] += q1 * ds'
        dv[:, :, g, b] += d1 * p1'
    end
    return dq, dk, dv
end

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
