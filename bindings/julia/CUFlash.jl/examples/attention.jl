# Attention in a sliding window with grouped heads, its gradients, by strides, of packed sequences, and one
# token more over a cache, plain and in pages of Int8; checked against plain Julia.
#
#     julia --project=bindings/julia/CUFlash.jl bindings/julia/CUFlash.jl/examples/attention.jl
#
# The arrays are on the CPU. With CuArrays the calls are the same.

# [attention]
using CUFlash

# Six query heads read two heads of keys and values; a row sees itself and the 15 keys before it.
q = randn(Float32, 64, 100, 6, 1)    # head_dim, length, heads, batch
k = randn(Float32, 64, 100, 2, 1)
v = randn(Float32, 64, 100, 2, 1)
o, lse = attention(q, k, v; causal = true, window = (15, nothing))
# [attention]

# [backward]
d_o = randn(Float32, size(o))
dq, dk, dv = attention_backward(d_o, q, k, v, o, lse; causal = true, window = (15, nothing))
# [backward]

# [strides]
# What a projection makes: (D, head, token). Nothing is copied; the axes only change their names.
packed = randn(Float32, 64, 6, 100)
tokens = PermutedDimsArray(reshape(packed, 64, 6, 100, 1), (1, 3, 2, 4))    # (D, S, H, B)
from_tokens, _ = attention(tokens, k, v; causal = true)
# [strides]

# [packed]
# The same tokens as two sequences, one after the other: none sees a token of the other one.
first_tokens = Int32[0, 40, 100]
of_two, _ = attention_varlen(packed, packed, packed, first_tokens, first_tokens;
                             max_len_q = 60, max_len_k = 60, causal = true)    # (D, head, token)
# [packed]

# [decode]
# The newest token over a cache with room for 128, of which 100 are there.
cache_k, cache_v = zeros(Float32, 64, 128, 2, 1), zeros(Float32, 64, 128, 2, 1)
cache_k[:, 1:100, :, :] = k
cache_v[:, 1:100, :, :] = v
newest, _ = decode(view(q, :, 100:100, :, :), cache_k, cache_v; lengths = Int32[100])
# [decode]

# [cache]
# The same cache in pages of 16 slots and in Int8, with one scale for each head: block_table names the pages of a
# sequence, numbered from 0. All but the newest token first, then that one, rotated by its position.
pages = zeros(Int8, 64, 16, 2, 8), zeros(Int8, 64, 16, 2, 8)
scale = fill(5f0 / 127, 1, 1, 2)
paged = KVCache(pages...; block_table = reshape(Int32[3, 7, 0, 5, 1, 6, 2, 4], 8, 1), lengths = Int32[0],
                k_scale = scale, v_scale = scale)
append!(paged, k[:, 1:99, :, :], v[:, 1:99, :, :])
paged.lengths = Int32[99]            # append! leaves them to its caller
angles = zeros(Float32, 32, 128)     # of no rotation
rotated = similar(q, 64, 1, 6, 1)
append!(paged, k[:, 100:100, :, :], v[:, 100:100, :, :]; q = q[:, 100:100, :, :], q_out = rotated,
        cos = cos.(angles), sin = sin.(angles))
paged.lengths = Int32[100]
from_pages, _ = decode(rotated, paged)
# [cache]

"One row with a loop over the keys that it sees."
function expected(q, k, v, row, head, keys)
    head_kv = cld(head * size(k, 3), size(q, 3))
    weights = [exp(sum(q[:, row, head, 1] .* k[:, j, head_kv, 1]) / 8) for j in keys]
    return sum(weights[n] * v[:, j, head_kv, 1] for (n, j) in enumerate(keys)) / sum(weights)
end

worst = maximum(
    maximum(abs.(got - expected(inputs..., row, head, keys)))
    for head in 1:6, row in (1, 50, 100)
    for (got, inputs, keys) in (
        (o[:, row, head, 1], (q, k, v), max(1, row - 15):row),
        (from_tokens[:, row, head, 1], (tokens, k, v), 1:row),
        (of_two[:, head, row], (tokens, tokens, tokens), (row > 40 ? 41 : 1):row),
        (newest[:, 1, head, 1], (view(q, :, fill(100, 100), :, :), k, v), 1:100),
    )
)

# The gradient of sum(o .* d_o) along one element of k, by a difference.
step = zeros(Float32, size(k))
step[7, 42, 2, 1] = 1e-2
loss(k) = sum(Float64.(first(attention(q, k, v; causal = true, window = (15, nothing))) .* d_o))
slope = (loss(k + step) - loss(k - step)) / 2e-2

println(CUFlash.build_info())
println("largest error ", worst, ", gradient ", dk[7, 42, 2, 1], " and by a difference ", slope)
maximum(abs.(from_pages - newest)) < 0.1 || error("Int8 is too far off")
worst < 1e-4 && abs(slope - dk[7, 42, 2, 1]) < 1e-2 || error("attention is wrong")
