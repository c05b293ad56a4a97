"""The operations on arrays, here of NumPy on the CPU device: forward, backward, sequences of different
lengths, caches, parts merged.

python examples/python/arrays.py    with the package installed, or PYTHONPATH=bindings/python
"""

import sys

import numpy as np

import cuflash


def attend(q, k, v):
    """q [B, Hq, S, D], k and v [B, Hkv, Sk, D], of any strides with contiguous channels."""
    return cuflash.attention(q, k, v, causal=True)


def attend_within(q, k, v, out):
    """The same in the order [B, S, H, D], each row sees 128 keys, into memory of the caller."""
    return cuflash.attention(q, k, v, causal=True, window=(127, 0), layout="bshd", out=out)


def train(q, k, v, d_o):
    o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = cuflash.attention_backward(d_o, q, k, v, o, lse, causal=True)
    return o, dq, dk, dv


def train_bias(q, k, v, bias, d_o):
    """A bias for each head and distance, [Hq, S, Sk], that is learnt; scores are capped at 30."""
    options = {"causal": True, "softcap": 30.0, "bias": bias}
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv, d_bias = cuflash.attention_backward(d_o, q, k, v, o, lse, return_d_bias=True, **options)
    return o, d_bias


def attend_packed(q, k, v, lengths):
    """Sequences one after the other, without padding: q [T, Hq, D], k and v [T, Hkv, D]."""
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    longest = max(lengths)
    return cuflash.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_len_q=longest, max_len_k=longest,
                                    causal=True)


def generate(q, k_cache, v_cache, lengths):
    """One new token of each sequence, already appended to its cache; lengths int32 [B] count it."""
    return cuflash.decode(q, k_cache, v_cache, lengths=lengths)


def int8_pages(block_table, pages, heads, page_size, head_dim):
    """An empty cache of int8 with a scale for each page and head, in pages that block_table names."""
    shape = (pages, heads, page_size, head_dim)
    scale = np.full((pages, heads, 1, 1), 4 / 127, np.float32)
    return cuflash.PagedKVCache(np.zeros(shape, np.int8), np.zeros(shape, np.int8), block_table, k_scale=scale,
                                v_scale=scale, lengths=np.zeros(len(block_table), np.int32))


def serve(q, k, v, cache, cos, sin):
    """The next token of each sequence into a cache in pages, rotated by its position; then it attends."""
    q = cache.append(k, v, q=q, cos=cos, sin=sin)
    cache.lengths += 1  # append() leaves them to the caller
    return cuflash.decode(q, cache)


def verify(q, cache, sees):
    """Drafted tokens, the newest S of the cache: token i sees those before them and, of them, sees[i]."""
    words = np.packbits(np.pad(sees, ((0, 0), (0, -sees.shape[1] % 32))), axis=1, bitorder="little").view(np.uint32)
    return cuflash.decode(q, cache, tree_mask=words)


def attend_in_parts(q, k, v):
    """Disjoint sets of keys, as several devices or a shared prefix would have them."""
    half = k.shape[2] // 2
    parts = [cuflash.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True)
             for keys in (slice(0, half), slice(half, None))]
    o, lse = cuflash.merge_states(*(np.stack(x) for x in zip(*parts)))
    return o


def main() -> int:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 60, 64), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 2, 100, 64), dtype=np.float32)  # 4 query heads share each
    o = attend(q, k, v)

    flip = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    within = attend_within(*flip, out=np.empty((2, 60, 8, 64), np.float32))
    errors = [np.abs(within.transpose(0, 2, 1, 3) - o).max()]  # a window of 128 hides none of 100 keys
    d_o = np.ones_like(o)
    again, dq, dk, dv = train(q, k, v, d_o)
    errors += [np.abs(again - o).max()]
    biased, d_bias = train_bias(q, k, v, np.zeros((8, 60, 100), np.float32), d_o)
    errors += [np.abs(biased - cuflash.attention(q, k, v, causal=True, softcap=30.0)).max()]
    rows = [x[:, :, :60].transpose(0, 2, 1, 3).reshape(120, -1, 64) for x in (q, k, v)]
    packed = attend_packed(*rows, lengths=[60, 60]).reshape(2, 60, 8, 64).transpose(0, 2, 1, 3)
    errors += [np.abs(packed - attend(q, k[:, :, :60], v[:, :, :60])).max()]
    token = generate(q[:, :, -1:], k, v, np.array([100, 100], np.int32))
    errors += [np.abs(token - o[:, :, -1:]).max()]
    errors += [np.abs(verify(q, cuflash.KVCache(k, v), np.tri(60, dtype=bool)) - o).max()]  # a tree without branches
    cache = int8_pages(rng.permutation(14).astype(np.int32).reshape(2, 7), pages=14, heads=2, page_size=16, head_dim=64)
    cache.append(k[:, :, :99], v[:, :, :99])
    cache.lengths += 99
    no_turns = np.ones((100, 32), np.float32), np.zeros((100, 32), np.float32)
    served = serve(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], cache, *no_turns)
    close = np.abs(served - token).max() < 0.02  # int8 keeps two digits
    whole = cuflash.attention(q, k, v)
    errors += [np.abs(attend_in_parts(q, k, v) - whole).max()]

    try:
        cuflash.attention(q, k[:, :, :, :32], v)
    except ValueError as error:  # cuflash.ArgumentError, with .status and .name
        print(error)
    print(f"kernel {cuflash.explain('forward', q, k, v, causal=True)['kernel']}: "
          f"largest difference between the ways {max(errors):.1e}")
    shapes = (dq.shape, dk.shape, dv.shape, d_bias.shape) == (q.shape, k.shape, v.shape, (8, 60, 100))
    return 0 if max(errors) < 1e-5 and close and shapes else 1


if __name__ == "__main__":
    sys.exit(main())
