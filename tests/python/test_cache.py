"""Caches: paged, quantised, appended to, against attention and quantisation written out in fp64."""
from __future__ import annotations

import cuflash
import numpy as np
import pytest
from arrays import poisoned, random
from test_arrays import OnlyDlpack, OnlyInterface
from test_features import SCALE, Plain, near

BATCH, HEADS, HEADS_KV, LEN_Q, DIM, DIM_V, PAGE, MAX_LEN = 3, 4, 2, 3, 40, 48, 4, 12
LENGTHS = np.array([11, 0, 7], np.int32)
UNUSED = 2**31 - 1  # what entries of a table that are not used hold


@pytest.fixture
def rng():
    return np.random.default_rng(31)


# ---- what caches hold -------------------------------------------------------------------------------------


def of_fp8(codes, exponent_bits):
    """The values of fp8 codes: E4M3 without infinities, or E5M2."""
    codes = codes.astype(np.int64)
    mantissa_bits = 7 - exponent_bits
    bias = (1 << exponent_bits - 1) - 1
    exponent, mantissa = codes >> mantissa_bits & (1 << exponent_bits) - 1, codes & (1 << mantissa_bits) - 1
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.where(codes & 0x80, -values, values)


def packed(codes):
    """int4 [..., D] as bytes, the even channels in the low halves."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return (codes[..., ::2] & 15 | (codes[..., 1::2] & 15) << 4).astype(np.uint8)


FORMATS = ["float32", "float16", "int8", "int4", "float8_e4m3fn", "float8_e5m2"]


def stored(rng, shape, kind):
    """(array, k_dtype, values) of random codes."""
    if kind.startswith("float8"):
        codes = rng.integers(0, 0x70, shape) | rng.integers(0, 2, shape) << 7
        return codes.astype(np.uint8), kind, of_fp8(codes, 4 if "e4" in kind else 5)
    if kind == "int8":
        codes = rng.integers(-128, 128, shape)
        return codes.astype(np.int8), None, codes.astype(np.float64)
    if kind == "int4":
        codes = rng.integers(-8, 8, shape)
        return packed(codes), kind, codes.astype(np.float64)
    array = random(rng, shape, kind)
    return array, None, array.astype(np.float64)


def hidden_beyond(lengths, array):
    """[B, H, S, D] with what no call may read past the lengths."""
    array = array.copy()
    for entry, length in zip(array, lengths):
        entry[:, length:] = np.nan if array.dtype.kind == "f" else 0x7F  # NaN as E4M3 too
    return array


def paged(rng, arrays, lengths, page=PAGE, extra=2):
    """Contiguous [B, H, S, D] arrays as pools of pages in random order, and the table."""
    batch, _, max_len, _ = arrays[0].shape
    columns = -(-max_len // page)
    ids = rng.permutation(batch * columns + extra)[:batch * columns].reshape(batch, columns)
    pools = []
    for array in arrays:
        pool = np.full((batch * columns + extra, array.shape[1], page, array.shape[3]), 0x7F, array.dtype)
        if array.dtype.kind == "f":
            pool[:] = np.nan
        for b, row in enumerate(ids):
            for column, id_ in enumerate(row):
                part = array[b, :, column * page:(column + 1) * page]
                pool[id_, :, :part.shape[1]] = part
        pools.append(pool)
    table = ids.astype(np.int32)
    for row, length in zip(table, lengths):
        row[-(-int(length) // page):] = UNUSED
    return pools, table


def csr(table, lengths, page=PAGE):
    used = [-(-int(length) // page) for length in lengths]
    indptr = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
    return indptr, np.concatenate([row[:n] for row, n in zip(table, used)])


def swapped(array):
    """In the order [B, S, H, D]."""
    return np.ascontiguousarray(array.swapaxes(1, 2))


def laid_out(rng, where, layout, k, v, scales, lengths=LENGTHS, **further):
    """Contiguous arrays as a cache: `where` they lie."""
    names = list(scales)
    arrays = [hidden_beyond(lengths, x) for x in (k, v, *scales.values())]
    order = swapped if layout == "bshd" else lambda x: x
    if where in ("table", "wide table", "csr"):
        arrays, table = paged(rng, arrays, lengths)
        k, v, *of_scales = map(order, arrays)
        further.update(zip(names, of_scales))
        if where == "csr":
            indptr, indices = csr(table, lengths)
            return cuflash.PagedKVCache(k, v, indptr=indptr, indices=indices, max_len=MAX_LEN, lengths=lengths,
                                        layout=layout, **further)
        if where == "wide table":  # int64, with columns of something else between the rows
            table = np.concatenate([table, np.full_like(table, -7)], axis=1).astype(np.int64)[:, :table.shape[1]]
        return cuflash.PagedKVCache(k, v, table, lengths=lengths, layout=layout, **further)
    if where == "entries":
        entries = np.array([4, 0, 2], np.int32)
        for i, array in enumerate(arrays):
            arrays[i] = np.full((5, *array.shape[1:]), 0x7F, array.dtype)
            arrays[i][entries] = array
        further["batch_idx"] = entries
    k, v, *of_scales = map(order, arrays)
    further.update(zip(names, of_scales))
    return cuflash.KVCache(k, v, lengths=lengths, layout=layout, **further)


def exact(q, k, v, lengths=LENGTHS, **options):
    wants = [Plain(q[b], k[b, :, :n], v[b, :, :n], b, **options) for b, n in enumerate(lengths)]
    return np.stack([w.o for w in wants]), np.stack([w.lse for w in wants])


PLACES = ["contiguous", "entries", "table", "wide table", "csr"]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kinds", [(kind, kind) for kind in FORMATS] + [("float8_e4m3fn", "int4"), ("int8", "float16")])
@pytest.mark.parametrize("where", PLACES)
def test_decode(rng, where, kinds, layout):
    """Of every format, wherever the slots are, with scales for each group of channels and zero points."""
    shape = (BATCH, HEADS_KV, MAX_LEN)
    q = random(rng, (BATCH, HEADS, LEN_Q, DIM))
    k, k_dtype, k_values = stored(rng, (*shape, DIM), kinds[0])
    v, v_dtype, v_values = stored(rng, (*shape, DIM_V), kinds[1])
    scales = {}
    for name, kind, values in (("k", kinds[0], k_values), ("v", kinds[1], v_values)):
        if kind in ("float32", "float16"):
            continue
        scale, zero = np.abs(random(rng, (*shape, 2))) / 100, random(rng, (*shape, 2))
        scales[f"{name}_scale"] = scale
        if kind.startswith("int"):
            scales[f"{name}_zero"] = zero
            values -= np.repeat(zero, 32, axis=-1)[..., :values.shape[-1]]
        values *= np.repeat(scale, 32, axis=-1)[..., :values.shape[-1]]
    cache = laid_out(rng, where, layout, k, v, scales, k_dtype=k_dtype, v_dtype=v_dtype)
    causal = kinds[0] == "int8"
    o, lse = cuflash.decode(q, cache, scale=SCALE, causal=causal, return_lse=True)
    wanted, wanted_lse = exact(q, k_values, v_values, causal=causal)
    near(o, wanted, 1e-5)
    near(lse, wanted_lse, 1e-5)


SCALES = {
    "one": lambda x: x[0, 0, 0, :1],
    "heads": lambda x: x[0, :, :1, :1],
    "slots": lambda x: x[..., :1],
    "pages": lambda x: x[:, :1, :1, :1],
    "groups": lambda x: x[:1, :1, :1],
    "strided": lambda x: np.repeat(x, 2, axis=2)[:, :, ::2],
    "in fp16": lambda x: x.astype(np.float16),
}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("where", ["contiguous", "table"])
def test_scales_that_repeat(rng, where, name):
    k = rng.integers(-128, 128, (6, HEADS_KV, PAGE, 80)).astype(np.int8)
    scale = SCALES[name](np.abs(random(rng, (6, HEADS_KV, PAGE, 3))) / 100)
    whole = np.broadcast_to(scale.astype(np.float64), (6, HEADS_KV, PAGE, scale.shape[-1]))
    values = k * (np.repeat(whole, 32, axis=-1)[..., :80] if scale.shape[-1] == 3 else whole)
    q = random(rng, (2, HEADS, 1, 80))
    if where == "contiguous":
        cache = cuflash.KVCache(k, k, k_scale=scale, v_scale=scale)
        wanted = values[:2]
    else:
        table = np.array([[4, 1], [0, 5]])
        cache = cuflash.PagedKVCache(k, k, table, k_scale=scale, v_scale=scale)
        wanted = values[table].swapaxes(1, 2).reshape(2, HEADS_KV, 2 * PAGE, 80)
    near(cuflash.decode(q, cache, scale=SCALE), exact(q, wanted, wanted, [wanted.shape[2]] * 2)[0], 1e-5)


def test_odd_channels_of_int4(rng):
    k, k_dtype, k_values = stored(rng, (2, 2, 5, 7), "int4")
    v, _, v_values = stored(rng, (2, 2, 5, 9), "int4")
    q = random(rng, (2, 4, 1, 7))
    cache = cuflash.KVCache(k, v, k_dtype="int4", v_dtype="int4", head_dim_v=9)
    near(cuflash.decode(q, cache, scale=SCALE), exact(q, k_values, v_values, [5, 5])[0])
    cache.head_dim_v = None  # as many as there is room for
    assert cuflash.decode(q, cache).shape == (2, 4, 1, 10)


def test_values_within_keys(rng):
    k, q = random(rng, (2, 1, 6, 24)), random(rng, (2, 4, 1, 24))
    got = cuflash.decode(q, cuflash.KVCache(k, head_dim_v=16), scale=SCALE)
    near(got, exact(q, k, k[..., :16], [6, 6])[0])
    near(cuflash.decode(q, cuflash.KVCache(k), scale=SCALE), exact(q, k, k, [6, 6])[0])


def test_dtypes_of_arrays_tell(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes, name, values = stored(rng, (1, 1, 6, 8), "float8_e4m3fn")
    q = random(rng, (1, 2, 1, 8))
    told = cuflash.decode(q, cuflash.KVCache(codes, codes, k_dtype=name, v_dtype=name), scale=SCALE)
    typed = codes.view(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(told, cuflash.decode(q, cuflash.KVCache(typed, typed), scale=SCALE))
    near(told, exact(q, values, values, [6])[0], 1e-5)


@pytest.mark.parametrize("wrap", [OnlyInterface, lambda x: OnlyDlpack(x, True), lambda x: OnlyDlpack(x, False)])
def test_protocols_of_the_host(rng, wrap):
    """Bytes, small integers, tables and words of arrays that are not NumPy's."""
    q, out = random(rng, (2, 4, 3, 8)), poisoned((2, 4, 3, 8))
    k, v = rng.integers(-128, 128, (5, 2, 4, 8)).astype(np.int8), stored(rng, (5, 2, 4, 8), "int4")[0]
    table, scale = np.array([[4, 0], [2, 3]]), np.full((1,), 0.1, np.float32)
    words = np.array([[1], [3], [5]], np.uint32)

    def call(wrap, out):
        cache = cuflash.PagedKVCache(wrap(k), wrap(v), wrap(table), k_scale=wrap(scale), v_scale=wrap(scale),
                                     v_dtype="int4", lengths=wrap(np.array([8, 5], np.int32)))
        return cuflash.decode(wrap(q), cache, tree_mask=wrap(words), out=out)

    call(wrap, wrap(out))
    assert np.array_equal(out, call(lambda x: x, None))
    new, written = random(rng, (1, 2, 1, 8)), np.zeros((1, 2, 4, 8), np.int8)
    cuflash.KVCache(wrap(written), wrap(written.copy()), k_scale=wrap(scale), v_scale=wrap(scale)).append(
        wrap(new), wrap(new), positions=wrap(np.array([[2]], np.int32)))
    assert written[:, :, 2].any() and not written[:, :, [0, 1, 3]].any()


# ---- trees ------------------------------------------------------------------------------------------------


def bits(seen):
    """A boolean [..., keys] as words."""
    seen = np.concatenate([seen, np.zeros((*seen.shape[:-1], -seen.shape[-1] % 32), bool)], axis=-1)
    return np.packbits(seen, axis=-1, bitorder="little").view(np.uint32)


def as_bias(seen, len_k):
    """What hides the same: all keys before those of the bits are seen."""
    seen = seen[..., -len_k:]
    seen = np.concatenate([np.ones((*seen.shape[:-1], len_k - seen.shape[-1]), bool), seen], axis=-1)
    return np.where(seen, 0.0, -np.inf)[:, None].astype(np.float32)


@pytest.mark.parametrize("drafted", [None, 5, 12, 40, 70])
def test_tree_mask(rng, drafted):
    """In forward and in decode, of sequences of different lengths, with bits for keys that there are not."""
    count = LEN_Q if drafted is None else drafted
    seen = rng.random((BATCH, LEN_Q, count)) < 0.6
    q, k, v = (random(rng, (BATCH, h, n, DIM)) for h, n in ((HEADS, LEN_Q), (HEADS_KV, 50), (HEADS_KV, 50)))
    options = {"scale": SCALE, "tree_mask": bits(seen), "tree_mask_len": drafted, "return_lse": True}
    o, lse = cuflash.attention(q, k, v, **options)
    wanted, wanted_lse = exact(q, k, v, [50] * 3, bias=as_bias(seen, 50))
    near(o, wanted)
    near(lse, wanted_lse)

    lengths = np.array([50, 30, 9], np.int32)
    pools, table = paged(rng, (k, v), lengths, page=7)
    cache = cuflash.PagedKVCache(*pools, table, lengths=lengths)
    o, lse = cuflash.decode(q, cache, **options)
    for b, length in enumerate(lengths):
        want = Plain(q[b], k[b, :, :length], v[b, :, :length], bias=as_bias(seen[b:b + 1], length))
        near(o[b], want.o)
        near(lse[b], want.lse)


def test_tree_masks_that_repeat(rng):
    q, k, v = (random(rng, (BATCH, h, n, DIM)) for h, n in ((HEADS, LEN_Q), (HEADS_KV, 9), (HEADS_KV, 9)))
    words = bits(np.tril(np.ones((LEN_Q, LEN_Q), bool)))  # a chain: what causal masks show
    wanted = cuflash.decode(q, k, v, causal=True)
    for mask in (words, words[None], words.view(np.int32), np.broadcast_to(words, (BATCH, LEN_Q, 1)),
                 np.concatenate([words, words], axis=1)[:, :1]):
        near(cuflash.decode(q, k, v, tree_mask=mask), wanted)
    assert np.array_equal(cuflash.decode(q, k, v, tree_mask=words, tree_mask_len=0), cuflash.decode(q, k, v))
    # All rows see the last three keys by one word.
    near(cuflash.attention(q, k, v, tree_mask=np.array([[[3]]], np.uint32), tree_mask_len=3),
         cuflash.attention(q, k[:, :, :8], v[:, :, :8]))


# ---- appending ----------------------------------------------------------------------------------------------


def rotated(x, positions, cos, sin, interleaved):
    """x [B, H, T, D] in fp64."""
    x = x.copy()
    half = cos.shape[1]
    first, second = ((slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved
                     else (slice(0, half), slice(half, 2 * half)))
    c, s = (table.astype(np.float64)[positions][:, None] for table in (cos, sin))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


def normed(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def angles(rotary_dim, positions=64):
    turns = np.arange(positions)[:, None] * 100.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("where", PLACES)
def test_append_then_decode(rng, where, layout):
    """As attention over all keys together."""
    before, new = np.array([5, 0, 8], np.int32), 3
    k, v = (random(rng, (BATCH, HEADS_KV, MAX_LEN, d)) for d in (DIM, DIM_V))
    old = [x.copy() for x in (k, v)]
    tokens = [np.stack([x[b, :, n:n + new] for b, n in enumerate(before)]) for x in old]
    for array in (k, v):
        for b, n in enumerate(before):
            array[b, :, n:n + new] = -1
    cache = laid_out(rng, where, layout, k, v, {}, before + np.int32(new))  # the pages must be there
    cache.lengths = before
    order = swapped if layout == "bshd" else lambda x: x
    assert cache.append(*map(order, tokens), layout=layout) is None
    assert np.array_equal(cache.lengths, [5, 0, 8])  # not touched
    cache.lengths = before + np.int32(new)
    q = random(rng, (BATCH, HEADS, new, DIM))
    o = cuflash.decode(order(q), cache, scale=SCALE, causal=True, layout=layout)
    near(order(o), exact(q, *old, before + new, causal=True)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [DIM, 12])
def test_append_by_positions(rng, rotary_dim, interleaved):
    """Norms, then rotation, of k and of q, to where positions say; into a cache that is a slice of another."""
    pool_k, pool_v = (poisoned((BATCH, HEADS_KV, MAX_LEN + 4, d + 8)) for d in (DIM, DIM_V))
    cache = cuflash.KVCache(pool_k[:, :, 2:-2, :DIM], pool_v[:, :, 2:-2, 4:4 + DIM_V])
    k, v, q = (random(rng, (BATCH, h, 2, d)) for h, d in ((HEADS_KV, DIM), (HEADS_KV, DIM_V), (HEADS, DIM)))
    positions = np.array([[3, 7], [-1, 0], [11, 50]], np.int32)  # one negative, one past the cache
    cos, sin = angles(rotary_dim)
    q_weight, k_weight = random(rng, (DIM,)), random(rng, (DIM,))
    options = {"positions": positions, "cos": cos, "sin": sin, "interleaved": interleaved, "norm_epsilon": 1e-3,
               "q_norm_weight": q_weight, "k_norm_weight": k_weight}
    q_new = cache.append(k, v, q=q, **options)
    k64, q64 = (rotated(normed(x.astype(np.float64), w, 1e-3), positions, cos, sin, interleaved)
                for x, w in ((k, k_weight), (q, q_weight)))
    written = np.zeros((BATCH, MAX_LEN), bool)
    for b, i, position in ((0, 0, 3), (0, 1, 7), (1, 1, 0), (2, 0, 11)):
        near(cache.k[b, :, position], k64[b, :, i])
        assert np.array_equal(cache.v[b, :, position], v[b, :, i])
        written[b, position] = True
    assert np.isnan(cache.k.swapaxes(1, 2)[~written]).all() and np.isfinite(pool_k).sum() == 4 * HEADS_KV * DIM
    q64[1, :, 0] = 0  # cos has no row for it
    near(q_new, q64)
    assert cache.append(k, v, q=q, q_out=(out := poisoned(q.shape)), **options) is out
    assert np.array_equal(out, q_new)
    assert cache.append(k, v, q=q, q_out=q, **options) is q and np.array_equal(q, q_new)


def test_append_by_slots(rng):
    """int64 slots of the whole pool; negative ones and those past it are skipped. Keys alone, too."""
    pool = poisoned((3, PAGE, HEADS_KV, DIM))
    table = np.array([[2, 0]], np.int32)
    cache = cuflash.PagedKVCache(pool, pool.copy(), table, layout="bshd")
    k, v = random(rng, (2, 1, 5, HEADS_KV, DIM))
    slots = np.array([[9, -1, 0, 3 * PAGE, 2**40]], np.int64)
    cache.append(k, v, slot_mapping=slots, layout="bshd")
    flat_k, flat_v = (x.reshape(-1, HEADS_KV, DIM) for x in (cache.k, cache.v))
    assert np.array_equal(flat_k[[9, 0]], k[0, [0, 2]]) and np.array_equal(flat_v[[9, 0]], v[0, [0, 2]])
    assert np.isfinite(flat_k).all(axis=(1, 2)).sum() == 2
    before = flat_v.copy()
    cache.append(2 * k, slot_mapping=slots, layout="bshd")
    assert np.array_equal(flat_k[[9, 0]], 2 * k[0, [0, 2]]) and np.array_equal(flat_v, before, equal_nan=True)


@pytest.mark.parametrize("kind", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_append_quantises(rng, kind):
    """Each code is the nearest one; integers saturate."""
    shape = (2, HEADS_KV, MAX_LEN, DIM if kind != "int4" else DIM // 2)
    codes = np.zeros(shape, np.int8 if kind == "int8" else np.uint8)
    scale = np.abs(random(rng, (2, HEADS_KV, MAX_LEN, 2))) + np.float32(0.05)
    zeros = {}
    if kind.startswith("int"):
        zeros = {name: random(rng, scale.shape) for name in ("k_zero", "v_zero")}
    name = None if kind == "int8" else kind
    cache = cuflash.KVCache(codes, codes.copy(), lengths=np.array([2, 6], np.int32), k_dtype=name, v_dtype=name,
                            k_scale=scale, v_scale=scale, **zeros)
    k, v = 4 * random(rng, (2, 2, HEADS_KV, 3, DIM))
    cache.append(k, v)
    for array, given, zero in ((cache.k, k, zeros.get("k_zero")), (cache.v, v, zeros.get("v_zero"))):
        for b, start in ((0, 2), (1, 6)):
            part = slice(start, start + 3)
            of = np.repeat(scale[b, :, part], 32, axis=-1)[..., :DIM].astype(np.float64)
            of_zero = 0 if zero is None else np.repeat(zero[b, :, part], 32, axis=-1)[..., :DIM].astype(np.float64)
            wanted = given[b] / of + of_zero
            got = array[b, :, part]
            if kind.startswith("int"):
                low, high = (-128, 127) if kind == "int8" else (-8, 7)
                if kind == "int4":
                    got = np.stack([got & 15, got >> 4], axis=-1).reshape(*got.shape[:-1], DIM).astype(np.int64)
                    got = np.where(got > 7, got - 16, got)
                assert np.abs(got - np.clip(wanted, low, high)).max() <= 0.5 + 1e-4
            else:
                every = of_fp8(np.arange(0x7F if "e4" in kind else 0x7C), 4 if "e4" in kind else 5)
                every = np.concatenate([every, -every])
                nearest = np.abs(wanted[..., None] - every).min(axis=-1)
                value = of_fp8(got, 4 if "e4" in kind else 5)
                assert (np.abs(value - wanted) <= nearest + 1e-5 * np.abs(wanted)).all()
        assert not array[0, :, :2].any() and not array[0, :, 5:].any()


def test_append_nothing(rng):
    cache = cuflash.KVCache(poisoned((2, HEADS_KV, 4, 8)), poisoned((2, HEADS_KV, 4, 8)),
                            lengths=np.zeros(2, np.int32))
    none = np.zeros((2, HEADS_KV, 0, 8), np.float32)
    assert cache.append(none, none, q=np.zeros((2, HEADS, 0, 8), np.float32)).shape == (2, HEADS, 0, 8)
    assert np.isnan(cache.k).all()


# ---- modes --------------------------------------------------------------------------------------------------


def test_modes(rng):
    """The bits of a row without its neighbours; a margin is accepted in every call."""
    k, v = random(rng, (2, BATCH, HEADS_KV, 300, DIM), np.float16)
    q = random(rng, (BATCH, HEADS, 1, DIM), np.float16)
    lengths = np.array([300, 17, 250], np.int32)
    pools, table = paged(rng, (k, v), lengths, page=16)

    def of(rows):
        cache = cuflash.PagedKVCache(*pools, table[rows], lengths=lengths[rows])
        return cuflash.decode(q[rows], cache, batch_invariant=True, deterministic=True, sm_margin=4)

    whole = of(slice(0, BATCH))
    assert all(np.array_equal(whole[b:b + 1], of(slice(b, b + 1))) for b in range(BATCH))
    assert np.array_equal(cuflash.attention(q, k, v, sm_margin=4), cuflash.attention(q, k, v))


def test_explain(rng):
    pool = random(rng, (3, HEADS_KV, PAGE, 8), np.float16)
    cache = cuflash.PagedKVCache(pool, pool, np.array([[0, 2]], np.int32), lengths=np.array([3], np.int32))
    q = random(rng, (1, HEADS, 1, 8), np.float16)
    assert cuflash.explain("decode", q, cache)["operation"] == "decode"
    answer = cuflash.explain("append", cache, pool[:1], pool[:1], target_arch=90)
    assert answer["operation"] == "append" and answer["device"] != "cpu"


# ---- what is refused ----------------------------------------------------------------------------------------

POOL, Q = np.ones((6, 2, 4, 8), np.float32), np.ones((2, 4, 1, 8), np.float32)
TABLE, LENS = np.zeros((2, 3), np.int32), np.array([3, 5], np.int32)
NEW = np.ones((2, 2, 1, 8), np.float32)
CODES = np.zeros((6, 2, 4, 8), np.uint8)
COS = np.ones((9, 4), np.float32)


def ones(*shape, dtype="f4"):
    return np.ones(shape, dtype)


def attend(k=POOL, v=POOL, table=TABLE, q=Q, options=None, **further):
    further.setdefault("lengths", LENS)
    return lambda: cuflash.decode(q, cuflash.PagedKVCache(k, v, table, **further), **(options or {}))


def attend_csr(indptr, indices, **further):
    return attend(table=None, indptr=indptr, indices=indices, **further)


def write(k=NEW, v=NEW, pool=POOL, lengths=LENS, **further):
    return lambda: cuflash.PagedKVCache(pool, pool.copy(), TABLE, lengths=lengths).append(k, v, **further)


INDPTR = np.array([0, 1, 3], np.int32)
BAD_CALLS = {
    "no table": (attend(table=None), 8, "block_table, or indptr and indices"),
    "two tables": (attend(indptr=INDPTR, indices=TABLE[0]), 8, "block_table, or indptr and indices"),
    "no indices": (attend(table=None, indptr=INDPTR), 8, "block_table, or indptr and indices"),
    "table's rows": (attend(table=TABLE[:1]), 2, r"block_table: shape \(1, 3\); must be \(2, columns\)"),
    "table's rank": (attend(table=TABLE[0]), 2, "block_table: shape"),
    "table's dtype": (attend(table=TABLE.astype("i2")), 7, "block_table: int16; int32 or int64"),
    "table's strides": (attend(table=np.zeros((3, 2), np.int32).T), 8, "block_table: strides"),
    "max_len": (attend(max_len=13), 2, "block_table: 3 columns of pages of 4; max_len is 13"),
    "max_len negative": (attend(max_len=-1), 1, "cache.max_len: -1"),
    "max_len of indices": (attend_csr(INDPTR, TABLE[0]), 3, "max_len: None"),
    "indptr": (attend_csr(INDPTR[:2], TABLE[0], max_len=8), 2, "indptr: shape"),
    "indptr's dtype": (attend_csr(INDPTR.astype("i8"), TABLE[0], max_len=8), 7, "indptr: int64"),
    "indices": (attend_csr(INDPTR, TABLE, max_len=8), 2, "indices: shape"),
    "indices' dtype": (attend_csr(INDPTR, ones(3), max_len=8), 7, "indices: float32; int32 or int64"),
    "lengths": (attend(lengths=LENS.astype("i8")), 7, "lengths: int64 .*int32"),
    "values' pages": (attend(v=POOL[:5]), 2, "v_cache: shape"),
    "keys' channels": (attend(k=POOL[..., :4]), 2, "k_cache: shape .*must be"),
    "dtype": (attend(k=CODES), 7, "k_cache: uint8; k_dtype, None, must tell"),
    "dtype's name": (attend(k=CODES, k_dtype="int8"), 7, "k_dtype, 'int8', must tell"),
    "dtype of what has one": (attend(v_dtype="int4"), 8, "v_dtype: 'int4', but v_cache is float32"),
    "dtype of no cache": (attend(v=POOL.astype("i4")), 7, "v_cache: int32; float32, .*uint8"),
    "half int4": (attend(k=CODES, k_dtype="int4"), 2, "k_cache: shape .*16.*must be"),
    "cache's strides": (attend(v=np.ones((6, 2, 8, 4), "f4").swapaxes(2, 3)), 8, "v_cache: strides"),
    "cache's rank": (attend(k=POOL[0]), 2, r"k_cache: 3 dimensions .*4: \[B, H, S, D\]"),
    "cache's layout": (attend(layout="hnd"), 8, "layout: 'hnd'"),
    "scale": (attend(k_scale=ones(5, 1, 1, 1)), 2, "k_scale: shape .*or 1 in place"),
    "scale's groups": (attend(v_scale=ones(2)), 2, "v_scale: 2 groups of 8 channels"),
    "scale's dtype": (attend(k_scale=ones(1, dtype="f8")), 7, "k_scale: float64"),
    "scales' strides": (attend(k_scale=ones(2, 1, 1), v_scale=ones(1)), 8, "v_scale: .*as k_scale"),
    "scales' dtypes": (attend(k_scale=ones(1), v_scale=ones(1, dtype="f2")), 8, "v_scale: float16 .*as k_scale"),
    "zero of floats": (attend(k_zero=ones(1)), 8, "cache.k_zero: set"),
    "values besides": (lambda: cuflash.decode(Q, cuflash.KVCache(POOL, POOL), POOL), 8, "v_cache: beside a KVCache"),
    "lengths besides": (lambda: cuflash.decode(Q, cuflash.KVCache(POOL, POOL), lengths=LENS), 8, "lengths: beside"),
    "no values": (lambda: cuflash.decode(Q, POOL), 3, "v_cache: None"),
    "more values than keys": (lambda: cuflash.decode(Q, cuflash.KVCache(POOL, head_dim_v=9)), 2,
                              "problem.head_dim_v: 9"),
    "entries": (lambda: cuflash.decode(Q, cuflash.KVCache(POOL, POOL, batch_idx=ones(2))), 7, "batch_idx: float32"),
    "no entries": (lambda: cuflash.decode(Q, cuflash.KVCache(POOL[:0], POOL[:0], batch_idx=LENS)), 2,
                   "k_cache: no entries"),
    "tree": (attend(options={"tree_mask": ones(3, 1, 1, dtype="u4")}), 2, "tree_mask: shape"),
    "tree's dtype": (attend(options={"tree_mask": ones(2, 1, 1, dtype="u8")}), 7, "tree_mask: uint64; uint32"),
    "tree's words": (attend(options={"tree_mask": ones(2, 1, 1, dtype="u4"), "tree_mask_len": 33}), 2,
                     "tree_mask: 1 words, 32 bits for 33 keys"),
    "tree's length": (attend(options={"tree_mask": ones(2, 1, 1, dtype="u4"), "tree_mask_len": -1}), 8,
                      "problem.tree_mask_len: -1"),
    "tree's strides": (attend(options={"tree_mask": ones(2, 1, 4, dtype="u4")[..., ::2]}), 8, "tree_mask: strides"),
    "tree backward": (lambda: cuflash.attention_backward(Q, Q, Q, Q, Q, np.ones((2, 4, 1), "f4"),
                                                         tree_mask=ones(1, 1, dtype="u4")), 10, "problem.tree_mask"),
    "margin": (attend(options={"sm_margin": 1025}), 8, "sm_margin: 1025"),
    "append where": (write(lengths=None), 3, "cache.lengths: is NULL"),
    "append heads": (write(k=ones(2, 3, 1, 8), v=None), 2, r"k: shape .*must be \(2, 2, 1, 8\)"),
    "append channels": (write(k=ones(2, 2, 1, 6), v=None), 2, "k_cache: shape"),
    "append values": (write(v=ones(2, 2, 2, 8)), 2, "v: shape"),
    "append dtypes": (write(v=ones(2, 2, 1, 8, dtype="f2")), 7, "append.v.dtype"),
    "append codes": (write(k=NEW.astype("i1"), v=None), 7, "k: int8; float32"),
    "append queries": (write(q=ones(2, 4, 2, 8)), 2, "q: shape"),
    "append q_out": (write(q_out=Q), 8, "q_out: given without q"),
    "no channels of values": (lambda: cuflash.decode(Q[:1], cuflash.KVCache(POOL[:1], head_dim_v=0)), 6, "head_dim_v: 0"),
    "append no channels of values": (lambda: cuflash.KVCache(POOL[:2], POOL[:2, ..., :0], lengths=LENS).append(
        NEW, NEW[..., :0]), 2, "v_cache: no channels"),
    "append q's norm": (write(q_norm_weight=ones(8)), 8, "q_norm_weight: given without q"),
    "append positions": (write(positions=np.zeros(2, np.int32)), 2, "positions: shape"),
    "append positions' dtype": (write(positions=np.zeros((2, 1))), 7, "positions: float64 .*int32"),
    "append slots' dtype": (write(slot_mapping=np.zeros((2, 1), "i4")), 7, "slot_mapping: int32 .*int64"),
    "append slots' strides": (write(k=ones(2, 2, 2, 8), v=None, slot_mapping=np.zeros((2, 2), "i8").T), 7,
                              "slot_mapping: .*contiguous"),
    "append cos": (write(cos=COS), 3, "append.sin: is NULL"),
    "append sin": (write(sin=COS), 3, "append.cos: is NULL"),
    "append cos and sin": (write(cos=COS, sin=COS[:8]), 2, "sin: shape"),
    "append cos' dtype": (write(cos=COS.astype("f8"), sin=COS), 7, "cos: float64"),
    "append no cos": (write(cos=COS[:, :0], sin=COS[:, :0]), 2, "cos: no channels"),
    "append too much cos": (write(cos=ones(9, 5), sin=ones(9, 5)), 1, "append.rotary_dim: 10"),
    "append order": (write(interleaved=True), 8, "append.flags"),
    "append norm": (write(k_norm_weight=ones(7)), 2, "k_norm_weight: shape"),
    "append norm's dtype": (write(k_norm_weight=ones(8, dtype="f2")), 7, "k_norm_weight: float16"),
    "append epsilon": (write(norm_epsilon=1e-6), 8, "append.norm_epsilon"),
    "append q onto k": (lambda: cuflash.KVCache(POOL, POOL.copy(), lengths=LENS).append(
        NEW, NEW, q=NEW, q_out=POOL[:2, :, :1]), 15, "overlap"),
    "append values to none": (lambda: cuflash.KVCache(POOL, lengths=LENS).append(NEW, NEW), 8, "v: given, but"),
    "append to what is read": (write(pool=np.broadcast_to(ones(8), POOL.shape)), 8, "k_cache: cannot be written"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    call, status, message = BAD_CALLS[name]
    kept = [x.copy() for x in (POOL, Q, NEW)]
    with pytest.raises(cuflash.Error, match=message) as error:
        call()
    assert error.value.status == status
    assert all(np.array_equal(a, b) for a, b in zip(kept, (POOL, Q, NEW)))
    attend()()  # the next good call works
