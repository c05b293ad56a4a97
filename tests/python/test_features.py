"""Every option of the operations on arrays against attention written out in fp64, on the CPU device."""
from __future__ import annotations

import inspect

import cuflash
import numpy as np
import pytest
from arrays import poisoned, random

BATCH, HEADS, HEADS_KV, LEN_Q, LEN_K, DIM, DIM_V = 2, 4, 2, 7, 13, 16, 24
SCALE = 0.3


# ---- the same in fp64 -----------------------------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10 of arrays: four counters, two keys."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, np.uint64) for x in counter]
    k = [int(x) for x in key]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), b & mask, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
             a & mask]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def kept(p, seed, offset, heads, len_q, len_k):
    """The factors of dropout, [len(heads), len_q, len_k]; heads are counted through the whole batch."""
    head, row, key = np.meshgrid(heads, np.arange(len_q), np.arange(len_k), indexing="ij")
    block = key // 4 + offset
    words = philox((block & 0xFFFFFFFF, block >> 32, row, head), (seed & 0xFFFFFFFF, seed >> 32))
    word = np.choose(key % 4, words)
    threshold = int(float(np.float32(p)) * 2**32)
    return np.where(word < threshold, 0.0, 1 / (1 - float(np.float32(p))) if p < 1 else 0.0)


class Plain:
    """One sequence: q [Hq, S, D], k [Hkv, Sk, D], v [Hkv, Sk, Dv]; b is its place in the batch."""

    def __init__(self, q, k, v, b=0, *, causal=False, softcap=0.0, alibi_slopes=None, bias=None, sinks=None,
                 dropout_p=0.0, dropout_seed=0, dropout_offset=0):
        self.q = q.astype(np.float64)
        self.group = len(q) // len(k)
        self.k, self.v = (np.repeat(x.astype(np.float64), self.group, axis=0) for x in (k, v))
        heads, len_q, len_k = len(q), q.shape[1], k.shape[1]
        distance = np.arange(len_q)[:, None] + len_k - len_q - np.arange(len_k)
        scores = SCALE * self.q @ self.k.swapaxes(1, 2)
        self.slope = 1.0
        if softcap:
            bent = np.tanh(scores / softcap)
            scores, self.slope = softcap * bent, 1 - bent**2
        if bias is not None:
            of_all = bias.reshape((1,) * (4 - bias.ndim) + bias.shape).astype(np.float64)
            scores = scores + of_all[b % len(of_all), :, :len_q, :len_k]
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.ndim == 1 else alibi_slopes[b]
            scores = scores - slopes.astype(np.float64)[:, None, None] * np.abs(distance)
        if causal:
            scores = np.where(distance >= 0, scores, -np.inf)
        sink = np.full((heads, 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None, None]
        top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(np.isfinite(top), top, 0)
        e = np.exp(scores - top)
        total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        self.p = e / np.where(total > 0, total, 1)
        self.p_sink = (np.exp(sink - top) / np.where(total > 0, total, 1))[..., 0]
        with np.errstate(divide="ignore"):
            self.lse = (np.log(total) + top)[..., 0]
        self.keep = 1.0
        if dropout_p:
            self.keep = kept(dropout_p, dropout_seed, dropout_offset, b * heads + np.arange(heads), len_q, len_k)
        self.o = (self.p * self.keep) @ self.v

    def backward(self, d_o, d_lse=0.0):
        d_o = d_o.astype(np.float64)
        d_p = self.keep * (d_o @ self.v.swapaxes(1, 2))
        delta = (self.p * d_p).sum(axis=-1)
        self.delta = delta
        self.d_bias = self.p * (d_p - (delta - d_lse)[..., None])
        self.d_sinks = (self.p_sink * (d_lse - delta)).sum(axis=-1)
        d_s = SCALE * self.slope * self.d_bias
        self.dq = d_s @ self.k
        heads_kv = len(self.k) // self.group
        self.dk, self.dv = (x.reshape(heads_kv, self.group, *x.shape[1:]).sum(axis=1) for x in (
            d_s.swapaxes(1, 2) @ self.q, (self.p * self.keep).swapaxes(1, 2) @ d_o))
        return self


def summed_to(whole, shape):
    """A gradient of what was repeated."""
    whole = whole.reshape(-1, *whole.shape[whole.ndim - len(shape):]).sum(axis=0)
    axes = tuple(i for i, (n, w) in enumerate(zip(shape, whole.shape)) if n != w)
    return whole.sum(axis=axes, keepdims=True)


def near(got, wanted, tolerance=5e-6):
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * max(1.0, np.abs(
        wanted[np.isfinite(wanted)]).max(initial=0)))


@pytest.fixture
def rng():
    return np.random.default_rng(23)


@pytest.fixture
def given(rng):
    return (random(rng, (BATCH, HEADS, LEN_Q, DIM)), random(rng, (BATCH, HEADS_KV, LEN_K, DIM)),
            random(rng, (BATCH, HEADS_KV, LEN_K, DIM_V)))


def masking_bias(rng):
    bias = random(rng, (BATCH, HEADS, LEN_Q, LEN_K))
    bias[:, 1, 2:4, ::2] = -np.inf
    bias[0, 0, 5] = -np.inf
    return bias


OPTIONS = {
    "plain": lambda rng: {},
    "softcap": lambda rng: {"softcap": 1.5},
    "slopes": lambda rng: {"alibi_slopes": np.abs(random(rng, (HEADS,)))},
    "slopes of each sequence": lambda rng: {"alibi_slopes": np.abs(random(rng, (BATCH, HEADS)))},
    "bias": lambda rng: {"bias": random(rng, (BATCH, HEADS, LEN_Q, LEN_K))},
    "bias that masks": lambda rng: {"bias": masking_bias(rng)},
    "bias of all heads": lambda rng: {"bias": random(rng, (BATCH, 1, LEN_Q, LEN_K))},
    "bias of all sequences": lambda rng: {"bias": random(rng, (HEADS, LEN_Q, LEN_K))},
    "bias of keys": lambda rng: {"bias": random(rng, (LEN_K,))},
    "bias in fp16": lambda rng: {"bias": random(rng, (HEADS, 1, LEN_K), np.float16)},
    "sinks": lambda rng: {"sinks": random(rng, (HEADS,))},
    "dropout": lambda rng: {"dropout_p": 0.3, "dropout_seed": 2**40 + 17, "dropout_offset": 2**33},
    "all is dropped": lambda rng: {"dropout_p": 1.0},
    "everything": lambda rng: {
        "causal": True, "softcap": 2.0, "alibi_slopes": random(rng, (BATCH, HEADS)), "dropout_p": 0.5,
        "bias": random(rng, (BATCH, 1, LEN_Q, LEN_K)), "sinks": random(rng, (HEADS,), np.float16), "dropout_seed": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(given, rng, name):
    """Forward and all gradients, with channels of v of their own."""
    options = OPTIONS[name](rng)
    wants = [Plain(*(x[b] for x in given), b, **options) for b in range(BATCH)]
    o, lse = cuflash.attention(*given, scale=SCALE, return_lse=True, **options)
    near(o, np.stack([w.o for w in wants]))
    near(lse, np.stack([w.lse for w in wants]))

    d_o, d_lse = random(rng, o.shape), random(rng, lse.shape)
    for w, row, row_lse in zip(wants, d_o, d_lse):
        w.backward(row, np.where(np.isfinite(w.lse), row_lse, 0))
    has_bias, has_sinks = "bias" in options, "sinks" in options
    got = cuflash.attention_backward(
        d_o, *given, o, lse, d_lse=d_lse, return_d_bias=has_bias, return_d_sinks=has_sinks, return_delta=True,
        scale=SCALE, **options)
    names = ["dq", "dk", "dv", *["d_bias"] * has_bias, *["d_sinks"] * has_sinks, "delta"]
    assert len(got) == len(names)
    for field, gradient in zip(names, got):
        wanted = np.stack([getattr(w, field) for w in wants])
        if field == "d_sinks":
            wanted = wanted.sum(axis=0)
        if field == "d_bias":
            wanted = summed_to(wanted, options["bias"].shape)
        if field in ("d_bias", "d_sinks"):
            assert gradient.dtype == options[field[2:]].dtype
        near(gradient, wanted, 2e-3 if gradient.dtype == np.float16 else 1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_channels_of_values(given, layout):
    given = given if layout == "bhsd" else [np.ascontiguousarray(x.swapaxes(1, 2)) for x in given]
    o = cuflash.attention(*given, layout=layout)
    assert o.shape == (*given[0].shape[:3], DIM_V)
    assert cuflash.decode(given[0], given[1], given[2], layout=layout).shape == o.shape


@pytest.mark.parametrize("batch, heads, len_q, len_k", [(0, 4, 7, 13), (2, 0, 7, 13), (2, 4, 0, 13), (2, 4, 7, 0)])
def test_nothing(rng, batch, heads, len_q, len_k):
    """Extents of 0, with every option; without keys the sinks alone are left."""
    q, k, v = (random(rng, (batch, *shape)) for shape in ((heads, len_q, 8), (heads, len_k, 8), (heads, len_k, 16)))
    options = {"softcap": 2.0, "alibi_slopes": random(rng, (batch, heads)),
               "bias": random(rng, (batch, 1, len_q, len_k)), "sinks": random(rng, (heads,)), "dropout_p": 0.3,
               "seqused_q": np.full(batch, len_q, np.int32)}
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert o.shape == (batch, heads, len_q, 16) and not o.any()
    assert np.array_equal(lse, np.broadcast_to(options["sinks"][:, None], lse.shape))
    results = cuflash.attention_backward(o, q, k, v, o, lse, return_d_bias=True, return_d_sinks=True, **options)
    assert [x.shape for x in results] == [x.shape for x in (q, k, v, options["bias"], options["sinks"])]
    assert not any(x.any() for x in results)


def test_dropout_from_the_device(given):
    """The seed and the offset by address, as CUDA graphs need them."""
    by_value = cuflash.attention(*given, dropout_p=0.4, dropout_seed=7, dropout_offset=9)
    for seed, offset in ((np.array(7, np.uint64), np.array([9], np.int64)), (7, np.array(9)),
                         (np.array([7]), 9)):
        assert np.array_equal(
            by_value, cuflash.attention(*given, dropout_p=0.4, dropout_seed=seed, dropout_offset=offset))
    assert not np.array_equal(by_value, cuflash.attention(*given, dropout_p=0.4, dropout_seed=8, dropout_offset=9))


# ---- outputs -----------------------------------------------------------------------------------------------


def test_fp32_results_of_fp16(given, rng):
    half = [x.astype(np.float16) for x in given]
    o, lse = cuflash.attention(*half, scale=SCALE, out_dtype="float32", return_lse=True)
    wants = [Plain(*(x[b] for x in half)) for b in range(BATCH)]
    assert o.dtype == np.float32
    near(o, np.stack([w.o for w in wants]), 1e-3)
    d_o = random(rng, o.shape, np.float16)
    got = cuflash.attention_backward(d_o, *half, o, lse, scale=SCALE, out_dtype="float32")
    for field, gradient in zip(("dq", "dk", "dv"), got):
        assert gradient.dtype == np.float32
        near(gradient, np.stack([getattr(w.backward(row), field) for w, row in zip(wants, d_o)]), 2e-3)
    assert cuflash.decode(*half, out_dtype="float32").dtype == np.float32


def test_accumulate(given, rng):
    """Keys in two calls are as keys in one; gradients are added to."""
    q, k, v = given
    wanted, wanted_lse = cuflash.attention(q, k, v, return_lse=True)
    out, lse = cuflash.attention(q, k[:, :, :5], v[:, :, :5], return_lse=True)
    assert cuflash.attention(q, k[:, :, 5:], v[:, :, 5:], out=out, lse=lse, accumulate=True) is out
    near(out, wanted)
    near(lse, wanted_lse)
    out, lse = cuflash.decode(q, k[:, :, :5], v[:, :, :5], return_lse=True)
    cuflash.decode(q, k[:, :, 5:].copy(), v[:, :, 5:].copy(), out=out, lse=lse, accumulate=True)
    near(out, wanted)

    d_o = random(rng, wanted.shape)
    once = cuflash.attention_backward(d_o, q, k, v, wanted, wanted_lse)
    sums = tuple(np.full_like(x, 2) for x in once)
    cuflash.attention_backward(d_o, q, k, v, wanted, wanted_lse, out=sums, accumulate=True)
    for total, gradient in zip(sums, once):
        near(total, gradient + 2.0)


def test_delta_that_is_known(given, rng):
    q, k, v = given
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    d_o = random(rng, o.shape)
    wanted = cuflash.attention_backward(d_o, q, k, v, o, lse)
    delta = (o.astype(np.float64) * d_o).sum(axis=-1).astype(np.float32)
    got = cuflash.attention_backward(d_o, q, k, v, np.full_like(o, np.nan), lse, delta=delta)
    for a, b in zip(got, wanted):
        near(a, b)


def test_gradients_into_memory(given, rng):
    q, k, v = given
    bias, sinks = random(rng, (LEN_Q, LEN_K)), random(rng, (HEADS,))
    o, lse = cuflash.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    options = {"bias": bias, "sinks": sinks, "return_d_bias": True, "return_d_sinks": True}
    wanted = cuflash.attention_backward(o, q, k, v, o, lse, **options)
    out = [poisoned(x.shape) for x in wanted]
    got = cuflash.attention_backward(o, q, k, v, o, lse, out=out, **options)
    assert all(a is b and np.array_equal(a, c) for a, b, c in zip(got, out, wanted))


# ---- lengths -----------------------------------------------------------------------------------------------

LENGTHS = [(3, 5), (0, 4), (6, 0), (0, 0), (4, 9), (1, 1)]


def packed(rng, heads, lengths, dim, before=2, after=3):
    """Sequences one after the other, with NaN where there are none, and where each begins."""
    array = poisoned((before + sum(lengths) + after, heads, dim))
    array[before:before + sum(lengths)] = random(rng, (sum(lengths), heads, dim))
    return array, (before + np.cumsum([0, *lengths])).astype(np.int32)


@pytest.mark.parametrize("name", ["plain", "causal", "everything"])
def test_varlen(rng, name):
    lens_q, lens_k = zip(*LENGTHS)
    q, cu_q = packed(rng, HEADS, lens_q, DIM)
    k, cu_k = packed(rng, HEADS_KV, lens_k, DIM)
    v, _ = packed(rng, HEADS_KV, lens_k, DIM_V)
    batch, max_q, max_k = len(LENGTHS), max(lens_q), max(lens_k)
    options = {"causal": name != "plain"}
    if name == "everything":
        options.update(softcap=2.0, alibi_slopes=random(rng, (batch, HEADS)), sinks=random(rng, (HEADS,)),
                       bias=random(rng, (batch, HEADS, max_q, max_k)), dropout_p=0.3, dropout_seed=3)
    lengths = {"max_len_q": max_q, "max_len_k": max_k}
    d_o = packed(rng, HEADS, lens_q, DIM_V)[0]
    out, lse = poisoned((len(q), HEADS, DIM_V)), poisoned((HEADS, len(q)))
    o, lse = cuflash.attention_varlen(q, k, v, cu_q, cu_k, **lengths, out=out, lse=lse, return_lse=True, scale=SCALE,
                                      **options)
    further = name == "everything"
    models = [q, k, v, *([options["bias"], options["sinks"]] if further else [])]
    result = [poisoned(x.shape) for x in models]
    result = cuflash.attention_varlen_backward(
        d_o, q, k, v, o, lse, cu_q, cu_k, **lengths, out=result, scale=SCALE, return_d_bias=further,
        return_d_sinks=further, **options)

    wanted_d_sinks = np.zeros(HEADS)
    wanted_d_bias = np.zeros((batch, HEADS, max_q, max_k))
    for b, (len_q, len_k) in enumerate(LENGTHS):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        sequence = [x.swapaxes(0, 1) for x in (q[rows], k[keys], v[keys], d_o[rows])]
        want = Plain(*sequence[:3], b, **options).backward(sequence[3])
        near(o[rows].swapaxes(0, 1), want.o)
        near(lse[:, rows], want.lse)
        for gradient, wanted, part in zip(result, (want.dq, want.dk, want.dv), (rows, keys, keys)):
            near(gradient[part].swapaxes(0, 1), wanted, 1e-5)
        wanted_d_bias[b, :, :len_q, :len_k] = want.d_bias
        wanted_d_sinks += want.d_sinks
    if further:
        near(result[3], wanted_d_bias, 1e-5)
        near(result[4], wanted_d_sinks, 1e-5)
    for array in (o, lse.T, result[0]):
        assert np.isnan(array[:cu_q[0]]).all() and np.isnan(array[cu_q[-1]:]).all()
    for array in result[1:3]:
        assert np.isnan(array[:cu_k[0]]).all() and np.isnan(array[cu_k[-1]:]).all()

    new, new_lse = cuflash.attention_varlen(q, k, v, cu_q, cu_k, **lengths, return_lse=True, scale=SCALE, **options)
    used = slice(cu_q[0], cu_q[-1])
    assert np.array_equal(new[used], o[used]) and np.array_equal(new_lse[:, used], lse[:, used])


def test_varlen_with_rows_in_use(rng):
    """seqused and left padding within packed sequences."""
    q, cu = packed(rng, HEADS, (6, 6), DIM)
    used, pad = np.array([4, 6], np.int32), np.array([1, 3], np.int32)
    o = cuflash.attention_varlen(q, q, q, cu, cu, max_len_q=6, max_len_k=6, seqused_q=used, seqused_k=used,
                                 leftpad_k=pad, scale=SCALE, causal=True, out=poisoned(q.shape))
    for b in range(2):
        rows, keys = slice(cu[b], cu[b] + used[b]), slice(cu[b] + pad[b], cu[b] + used[b])
        near(o[rows].swapaxes(0, 1), Plain(*(x.swapaxes(0, 1) for x in (q[rows], q[keys], q[keys])), causal=True).o)
    assert np.isnan(o[cu[0] + 4:cu[1]]).all()


def test_padded_sequences(given, rng):
    q, k, v = (x.copy() for x in given)
    used_q, used_k = np.array([LEN_Q, 3], np.int32), np.array([9, LEN_K], np.int32)
    pad = np.array([2, 0], np.int32)
    q[1, :, 3:] = k[0, :, 9:] = v[0, :, 9:] = k[0, :, :2] = v[0, :, :2] = np.nan
    lengths = {"seqused_q": used_q, "seqused_k": used_k, "leftpad_k": pad, "scale": SCALE, "causal": True}
    out, lse = poisoned((BATCH, HEADS, LEN_Q, DIM_V)), poisoned((BATCH, HEADS, LEN_Q))
    cuflash.attention(q, k, v, out=out, lse=lse, **lengths)
    d_o = random(rng, out.shape)
    result = cuflash.attention_backward(d_o, q, k, v, out, lse, out=[poisoned(x.shape) for x in (q, k, v)], **lengths)
    for b in range(BATCH):
        rows, keys = slice(used_q[b]), slice(pad[b], used_k[b])
        want = Plain(q[b, :, rows], k[b, :, keys], v[b, :, keys], causal=True).backward(d_o[b, :, rows])
        near(out[b, :, rows], want.o)
        near(lse[b, :, rows], want.lse)
        for gradient, wanted, part in zip(result, (want.dq, want.dk, want.dv), (rows, keys, keys)):
            near(gradient[b, :, part], wanted, 1e-5)
            untouched = gradient[b].copy()
            untouched[:, part] = np.nan
            assert np.isnan(untouched).all()
    assert np.isnan(out[1, :, 3:]).all() and np.isnan(lse[1, :, 3:]).all()


# ---- the other operations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [None, [0, 6, 3, 3, 9]])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_weights(given, rng, rows, layout):
    q, k, v = given
    options = {"softcap": 1.0, "bias": random(rng, (1, LEN_K)), "sinks": random(rng, (HEADS,)), "causal": True}
    _, lse = cuflash.attention(*given, scale=SCALE, return_lse=True, dropout_p=0.5, **options)
    if layout == "bshd":
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    index = None if rows is None else np.array(rows, np.int32)
    got = cuflash.attention_weights(q, k, lse, rows=index, scale=SCALE, dropout_p=0.5, layout=layout, **options)
    whole = np.stack([Plain(*(x[b] for x in given), b, **options).p for b in range(BATCH)])
    whole = np.concatenate([whole, np.zeros_like(whole)], axis=2)  # row 9 is none of the 7
    near(got, whole[:, :, range(LEN_Q) if rows is None else rows])
    again = cuflash.attention_weights(q, k, lse, rows=index, scale=SCALE, layout=layout, out=(out := poisoned(
        got.shape)), **options)
    assert again is out and np.array_equal(again, got)


def test_weights_of_no_rows(given):
    q, k, v = given
    _, lse = cuflash.attention(q, k, v, return_lse=True)
    assert cuflash.attention_weights(q, k, lse, rows=np.zeros(0, np.int32)).shape == (BATCH, HEADS, 0, LEN_K)


@pytest.mark.parametrize("name", OPTIONS)
def test_decode(given, rng, name):
    q, k, v = given
    options = OPTIONS[name](rng)
    lengths = np.array([LEN_K, 9], np.int32)
    o, lse = cuflash.decode(q, k, v, lengths=lengths, scale=SCALE, return_lse=True, **options)
    for b, length in enumerate(lengths):
        want = Plain(q[b], k[b, :, :length], v[b, :, :length], b, **options)
        near(o[b], want.o)
        near(lse[b], want.lse)


def test_explain(given):
    q, k, v = given
    assert cuflash.explain("forward", q, k, v, softcap=2.0, bias=np.ones(LEN_K, "f4"))["kernel"]
    rows, cu = q[0].swapaxes(0, 1), np.array([0, 3, LEN_Q], np.int32)
    answer = cuflash.explain("forward", rows, rows, rows, cu_seqlens_q=cu, cu_seqlens_k=cu, max_len_q=4, max_len_k=4)
    assert answer["kernel"]


# ---- what is refused -----------------------------------------------------------------------------------------

Q, K = np.ones((2, 4, 5, 8), np.float32), np.ones((2, 2, 7, 8), np.float32)
LSE = np.ones((2, 4, 5), np.float32)
PACKED, CU = np.ones((5, 4, 8), np.float32), np.array([0, 2, 5], np.int32)


def attend(**options):
    return lambda: cuflash.attention(Q, K, K, **options)


def differentiate(**options):
    return lambda: cuflash.attention_backward(Q, Q, K, K, Q, LSE, **options)


def attend_packed(cu_q=CU, cu_k=CU, array=PACKED, max_len_q=3, **options):
    return lambda: cuflash.attention_varlen(array, PACKED, PACKED, cu_q, cu_k, max_len_q=max_len_q, max_len_k=3,
                                            **options)


def ones(*shape, dtype="f4"):
    return np.ones(shape, dtype)


BAD_CALLS = {
    "softcap negative": (attend(softcap=-1.0), 8, "softcap: -1"),
    "softcap NaN": (attend(softcap=float("nan")), 8, "softcap: nan"),
    "slopes": (attend(alibi_slopes=ones(3)), 2, r"alibi_slopes: shape \(3,\); must be \(4\)"),
    "slopes of sequences": (attend(alibi_slopes=ones(3, 4)), 2, r"alibi_slopes: .*must be \(2, 4\)"),
    "slopes' dtype": (attend(alibi_slopes=ones(4, dtype="f8")), 7, "alibi_slopes: float64"),
    "slopes' strides": (attend(alibi_slopes=ones(8)[::2]), 8, "alibi_slopes: strides"),
    "bias": (attend(bias=ones(5, 6)), 2, r"bias: shape \(5, 6\); \(2, 4, 5, 7\), or 1 in place"),
    "bias of one key": (attend(bias=ones(5, 1)), 2, r"bias: shape \(5, 1\)"),
    "bias's rank": (attend(bias=ones(1, 2, 4, 5, 7)), 2, "bias: shape"),
    "bias, a number": (attend(bias=np.array(1, "f4")), 2, r"bias: shape \(\)"),
    "bias of booleans": (attend(bias=ones(5, 7, dtype=bool)), 7, "bias: bool; float32"),
    "bias's strides": (attend(bias=ones(7, 5).T), 8, "bias: strides .*last dimension must be contiguous"),
    "sinks": (attend(sinks=ones(2)), 2, r"sinks: shape \(2,\); must be \(4\)"),
    "sinks' dtype": (attend(sinks=ones(4, dtype="i4")), 7, "sinks: int32"),
    "dropout": (attend(dropout_p=1.5), 8, "dropout_p: 1.5; 0 to 1"),
    "dropout NaN": (attend(dropout_p=float("nan")), 8, "dropout_p: nan"),
    "seed": (attend(dropout_p=0.5, dropout_seed=-1), 8, r"dropout_seed: -1; 0 to 2\^64 - 1"),
    "offset": (attend(dropout_p=0.5, dropout_offset=2**64), 8, "dropout_offset: 18446744073709551616"),
    "seeds": (attend(dropout_p=0.5, dropout_seed=ones(2, dtype="u8")), 2, r"dropout_seed: shape \(2,\); one"),
    "seed's dtype": (attend(dropout_p=0.5, dropout_seed=ones(1, dtype="i4")), 7, "dropout_seed: int32; uint64"),
    "seqused": (attend(seqused_q=ones(3, dtype="i4")), 2, "seqused_q: shape"),
    "seqused's dtype": (attend(seqused_k=ones(2, dtype="i8")), 7, "seqused_k: int64 .*int32"),
    "leftpad": (attend(leftpad_k=ones(2)), 7, "leftpad_k: float32 .*int32"),
    "out_dtype": (attend(out_dtype="float64"), 7, "out_dtype: 'float64'"),
    "out's channels": (attend(out=ones(2, 4, 5, 7)), 2, r"out: shape .*must be \(2, 4, 5, 8\)"),
    "accumulate": (attend(accumulate=True), 3, "accumulate: needs out and lse"),
    "accumulate fp16": (lambda: cuflash.attention(
        *(x.astype("f2") for x in (Q, K, K)), out=Q.astype("f2"), lse=LSE, accumulate=True), 7, "o.dtype: .*F32"),
    "accumulate gradients": (differentiate(accumulate=True), 3, "accumulate: needs out"),
    "d_bias": (differentiate(return_d_bias=True), 8, "return_d_bias: without bias"),
    "d_bias of what repeats": (differentiate(return_d_bias=True, bias=np.broadcast_to(ones(7), (5, 7))), 8,
                               "d_bias: strides .*those of bias"),
    "d_sinks": (differentiate(return_d_sinks=True), 8, "return_d_sinks: without sinks"),
    "d_lse": (differentiate(d_lse=ones(2, 4, 6)), 2, "d_lse: shape"),
    "d_lse's dtype": (differentiate(d_lse=ones(2, 4, 5, dtype="f2")), 7, "d_lse: float16; that of lse"),
    "d_lse's strides": (differentiate(d_lse=ones(2, 4, 10)[..., ::2]), 8, "d_lse: strides .*those of lse"),
    "delta": (differentiate(delta=LSE, return_delta=True), 8, "return_delta"),
    "out of gradients": (differentiate(out=(Q, K)), 2, "out: 2 arrays; dq, dk, dv"),
    "packed rank": (attend_packed(array=Q), 2, r"q: 4 dimensions .*3: \[T, H, D\]"),
    "no offsets": (attend_packed(cu_q=None), 3, "cu_seqlens_q: None"),
    "offsets": (attend_packed(cu_k=CU[:2]), 2, "cu_seqlens_k: shape"),
    "offsets' rank": (attend_packed(cu_q=CU[None]), 2, "cu_seqlens_q: shape"),
    "offsets of nothing": (attend_packed(cu_q=CU[:0]), 2, "cu_seqlens_q: shape"),
    "offsets' dtype": (attend_packed(cu_q=CU.astype("i8")), 7, "cu_seqlens_q: int64"),
    "max_len": (attend_packed(max_len_q=-1), 1, "len_q: -1"),
    "max_len's bits": (attend_packed(max_len_q=2**70), 8, "max_len_q: "),
    "packed lse": (attend_packed(lse=ones(5, 4)), 2, r"lse: shape \(5, 4\); must be \(4, 5\)"),
    "weights' rows": (lambda: cuflash.attention_weights(Q, K, LSE, rows=ones(2, dtype="i8")), 7, "rows: int64"),
    "weights' rank": (lambda: cuflash.attention_weights(Q, K, LSE, rows=ones(2, 2, dtype="i4")), 2, "rows: shape"),
    "weights' out": (lambda: cuflash.attention_weights(Q, K, LSE, out=ones(2, 4, 5, 6)), 2, "out: shape"),
    "weights' dtype": (lambda: cuflash.attention_weights(Q, K, LSE, out=ones(2, 4, 5, 7, dtype="f2")), 7,
                       "out: float16"),
    "weights' keys": (lambda: cuflash.attention_weights(Q, K[..., :4], LSE), 2, "k: shape"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    call, status, message = BAD_CALLS[name]
    before = Q.copy(), K.copy(), LSE.copy()
    with pytest.raises(cuflash.ArgumentError, match=message) as error:
        call()
    assert error.value.status == status
    assert all(np.array_equal(a, b) for a, b in zip(before, (Q, K, LSE)))


def test_options_are_known_once():
    """What editors are told and what is read."""
    from cuflash import _problem

    read = set(inspect.signature(_problem.options).parameters)
    assert set(_problem.Options.__annotations__) == read - {"extents", "cu_seqlens_q", "cu_seqlens_k", "accumulate"}
    assert set(_problem.ARRAYS) < read


def test_unknown_options():
    with pytest.raises(TypeError, match="casual"):
        cuflash.attention(Q, K, K, casual=True)
    with pytest.raises(TypeError, match="dropout_seed: float is no array"):
        cuflash.attention(Q, K, K, dropout_seed=1.5)


@pytest.mark.parametrize("shape, what", [((1, 0, 6, 8), "k: no heads, but q has 2"), ((1, 2, 6, 0), "v: no channels, but q has 8")])
def test_empty_extents_are_no_defaults(shape, what):
    """In the C API they are: k would be read as if it had q's heads."""
    q, some, none = np.ones((1, 2, 6, 8), np.float32), np.ones((1, 2, 6, 8), np.float32), np.ones(shape, np.float32)
    k, v = (none, none) if what.startswith("k") else (some, none)
    with pytest.raises(cuflash.ArgumentError, match=what):
        cuflash.attention(q, k, v)


def test_a_cache_of_no_entries():
    q, cache = np.ones((1, 2, 1, 8), np.float32), np.ones((0, 2, 6, 8), np.float32)
    with pytest.raises(cuflash.ArgumentError, match="k_cache: no entries, but q has 1"):
        cuflash.decode(q, cache, cache)
    with pytest.raises(cuflash.ArgumentError, match="k_cache: no heads, but q has 2"):
        cuflash.decode(q, np.ones((1, 0, 6, 8), np.float32), np.ones((1, 0, 6, 8), np.float32))
