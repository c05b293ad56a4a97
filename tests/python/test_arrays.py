"""The operations on arrays: every library that is installed, every way to hand over memory, on the CPU
device, and on a GPU where there is one."""
from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import importlib
import pickle
import types

import cuflash
import numpy as np
import pytest
from arrays import backward, bottom_right, forward, poisoned, probabilities, random, run_python
from cuflash import _arrays, _dlpack, cuda, raw

TOLERANCE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 4e-2}
ON_GPU = cuda.available() and any(kernel.built and not kernel.on_cpu for kernel in cuflash.kernels())


def assert_near(got, wanted, dtype="float32") -> None:
    got = np.asarray(got).astype(np.float64)
    tolerance = TOLERANCE[str(dtype)]
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * max(1.0, np.abs(wanted).max()))


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def qkv(rng):
    return random(rng, (2, 6, 17, 40)), random(rng, (2, 2, 33, 40)), random(rng, (2, 2, 33, 40))


def everything(len_q, len_k):
    return np.ones((len_q, len_k), bool)


def seen_by(centre, len_k, left=None, right=None):
    """Rows of keys within a window around each row's centre."""
    j = np.arange(len_k)[None, :]
    seen = np.ones((len(centre), len_k), bool)
    if left is not None:
        seen &= j >= centre[:, None] - left
    if right is not None:
        seen &= j <= centre[:, None] + right
    return seen


# ---- forward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_forward(rng, dtype, layout):
    q = random(rng, (2, 6, 17, 40), dtype)
    k, v = (random(rng, (2, 2, 33, 40), dtype) for _ in range(2))
    given = [x if layout == "bhsd" else np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    o, lse = cuflash.attention(*given, causal=True, return_lse=True, layout=layout)
    assert type(o) is np.ndarray and o.dtype == dtype and o.flags.c_contiguous
    assert lse.dtype == np.float32
    wanted, wanted_lse = forward(q, k, v, 40**-0.5, bottom_right(17, 33))
    assert_near(o if layout == "bhsd" else o.swapaxes(1, 2), wanted, np.dtype(dtype))
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)


def test_bfloat16(rng):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (random(rng, (1, 2, 9, 16)).astype(bfloat16) for _ in range(3))
    o = cuflash.attention(q, k, v)
    assert o.dtype == bfloat16
    assert_near(o, forward(q, k, v, 0.25, everything(9, 9))[0], "bfloat16")


@pytest.mark.parametrize("options, centre, left, right", [
    ({}, lambda i: i + 16, None, None),
    ({"causal": True}, lambda i: i + 16, None, 0),
    ({"causal": True, "align": "top-left"}, lambda i: i, None, 0),
    ({"causal": True, "align": -3}, lambda i: i - 3, None, 0),
    ({"window": (4, 2)}, lambda i: i + 16, 4, 2),
    ({"window": (None, 2), "align": "top-left"}, lambda i: i, None, 2),
    ({"window": (0, None)}, lambda i: i + 16, 0, None),
    ({"window": (3, 5), "causal": True}, lambda i: i + 16, 3, 0),
])
def test_masks(qkv, options, centre, left, right):
    q, k, v = qkv
    o = cuflash.attention(q, k, v, scale=0.3, **options)
    seen = seen_by(centre(np.arange(17)), 33, left, right)
    assert_near(o, forward(q, k, v, 0.3, seen)[0])


def test_offsets_of_each_sequence(qkv):
    q, k, v = qkv
    offsets = np.array([3, -40], np.int32)
    o, lse = cuflash.attention(q, k, v, causal=True, align=offsets, return_lse=True)
    assert_near(o[:1], forward(q[:1], k[:1], v[:1], 40**-0.5, seen_by(np.arange(17) + 3, 33, None, 0))[0])
    assert not o[1].any() and np.all(lse[1] == -np.inf)


def test_scale_of_zero(qkv):
    q, k, v = qkv
    assert_near(cuflash.attention(q, k, v, scale=0.0), forward(q, k, v, 0.0, everything(17, 33))[0])


def test_strides(rng):
    """Views of a packed projection, slices and repeated heads: no copy, and the gaps stay as they are."""
    packed = random(rng, (2, 20, 3, 4, 24))  # [B, S, (q, k, v), H, D]
    q, k, v = (packed[:, 1:18, i, :, 3:19].transpose(0, 2, 1, 3) for i in range(3))
    k = np.broadcast_to(k[:, :1], k.shape)
    memory = poisoned((2, 17, 4, 40))
    out = memory[..., 5:21].transpose(0, 2, 1, 3)
    before = packed.copy()
    assert cuflash.attention(q, k, v, out=out) is out
    assert_near(out, forward(q, k, v, 0.25, everything(17, 17))[0])
    assert np.array_equal(packed, before)
    assert np.isnan(memory[..., :5]).all() and np.isnan(memory[..., 21:]).all()


def test_outputs_of_the_caller(qkv):
    q, k, v = qkv
    out, lse = poisoned(q.shape), poisoned((2, 6, 34))[:, :, ::2]
    result = cuflash.attention(q, k, v, out=out, lse=lse)
    assert result is out and not np.isnan(lse).any()
    both = cuflash.attention(q, k, v, out=out, lse=lse, return_lse=True)
    assert both[0] is out and both[1] is lse
    np.testing.assert_allclose(lse, forward(q, k, v, 40**-0.5, everything(17, 33))[1], rtol=1e-5)


@pytest.mark.parametrize("shape_q, shape_k", [
    ((0, 2, 3, 8), (0, 2, 3, 8)), ((1, 2, 0, 8), (1, 2, 3, 8)), ((1, 2, 3, 8), (1, 2, 0, 8)),
    ((1, 1, 1, 1), (1, 1, 1, 1))])
def test_small_extents(shape_q, shape_k):
    q, k = np.ones(shape_q, np.float32), np.ones(shape_k, np.float32)
    o, lse = cuflash.attention(q, k, k, return_lse=True)
    assert o.shape == shape_q and lse.shape == shape_q[:3]
    assert np.all(o == (1 if shape_k[2] else 0)) and (shape_k[2] or np.all(lse == -np.inf))


# ---- the other operations ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_backward(qkv, rng, layout):
    q, k, v = qkv
    d_o = random(rng, q.shape)
    seen = bottom_right(17, 33)
    flip = (lambda x: x) if layout == "bhsd" else (lambda x: x.swapaxes(1, 2))
    options = {"causal": True, "scale": 0.2, "layout": layout}
    o, lse = cuflash.attention(*map(flip, (q, k, v)), return_lse=True, **options)
    got = cuflash.attention_backward(flip(d_o), *map(flip, (q, k, v)), o, lse, **options)
    for gradient, wanted in zip(got, backward(q, k, v, d_o, 0.2, seen)):
        assert_near(flip(gradient), wanted)
    out = tuple(np.full_like(flip(x), np.nan) for x in (q, k, v))
    again = cuflash.attention_backward(flip(d_o), *map(flip, (q, k, v)), o, lse, out=out, **options)
    assert all(a is b for a, b in zip(again, out))
    assert all(np.array_equal(a, b) for a, b in zip(again, got))


def test_backward_of_a_repeated_gradient(qkv):
    q, k, v = qkv
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    d_o = np.broadcast_to(np.ones(40, np.float32), q.shape)
    got = cuflash.attention_backward(d_o, q, k, v, o, lse)
    for gradient, wanted in zip(got, backward(q, k, v, np.ones(q.shape), 40**-0.5, everything(17, 33))):
        assert_near(gradient, wanted)


@pytest.mark.parametrize("len_q", [1, 3])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_decode(rng, len_q, layout):
    q = random(rng, (2, 6, len_q, 32))
    k, v = (random(rng, (4, 2, 50, 32)) for _ in range(2))  # more entries than sequences
    k[:, :, 45:] = v[:, :, 45:] = np.nan
    lengths = np.array([45, 7], np.int32)
    flip = (lambda x: x) if layout == "bhsd" else (lambda x: x.swapaxes(1, 2))
    o, lse = cuflash.decode(*map(flip, (q, k, v)), lengths=lengths, causal=True, return_lse=True, layout=layout)
    for b, length in enumerate(lengths):
        wanted, wanted_lse = forward(q[b:b + 1], k[b:b + 1, :, :length], v[b:b + 1, :, :length], 32**-0.5,
                                     bottom_right(len_q, length))
        assert_near(flip(o)[b:b + 1], wanted)
        np.testing.assert_allclose(lse[b:b + 1], wanted_lse, rtol=1e-5)
    again = cuflash.decode(*map(flip, (q, k, v)), lengths=lengths, causal=True, num_splits=3, layout=layout,
                           out=np.empty_like(o))
    assert_near(flip(again), np.asarray(flip(o), np.float64))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_merge(qkv, layout):
    q, k, v = qkv
    wanted, wanted_lse = cuflash.attention(q, k, v, return_lse=True)
    pieces = [cuflash.attention(q, k[:, :, keys], v[:, :, keys], return_lse=True)
              for keys in (slice(0, 5), slice(5, 5), slice(5, 33))]
    parts, lse_parts = (np.stack(x) for x in zip(*pieces))
    if layout == "bshd":
        parts = np.ascontiguousarray(parts.swapaxes(2, 3))
    o, lse = cuflash.merge_states(parts, lse_parts, layout=layout)
    assert_near(o if layout == "bhsd" else o.swapaxes(1, 2), wanted.astype(np.float64))
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5)
    _, lse2 = cuflash.merge_states(parts, lse_parts / np.float32(np.log(2)), base2=True, layout=layout)
    np.testing.assert_allclose(lse2 * np.log(2), wanted_lse, rtol=1e-5)
    in_place = cuflash.merge_states(parts, lse_parts, out=parts[0], lse=lse_parts[0], layout=layout)
    assert np.array_equal(in_place[0], o) and np.array_equal(lse_parts[0], lse)


def test_explain(qkv):
    q, k, v = qkv
    assert cuflash.explain("forward", q, k, v)["device"] == "cpu"
    answer = cuflash.explain("forward", *(x.astype(np.float16) for x in qkv), causal=True, target_arch=90)
    assert answer["device"] != "cpu" and answer["kernels"]
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    assert cuflash.explain("backward", o, q, k, v, o, lse)["operation"] == "backward"
    assert cuflash.explain("decode", q[:, :, :1], k, v, num_splits=2)["num_splits"] == 2
    assert cuflash.explain("forward", q, k, v, kernel="reference")["family"] == "reference"


def test_handle_and_options(qkv):
    with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as handle:
        handle.set_kernel("reference")
        assert cuflash.explain("forward", *qkv, handle=handle)["family"] == "reference"
        one = cuflash.attention(*qkv, handle=handle, deterministic=True, batch_invariant=True)
    assert np.array_equal(one, cuflash.attention(*qkv, kernel="reference"))
    with pytest.raises(ctypes.ArgumentError):
        cuflash.attention(*qkv, handle=handle)


def test_threads(qkv):
    wanted = cuflash.attention(*qkv, causal=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cuflash.attention(*qkv, causal=True), range(64)))
    assert all(np.array_equal(result, wanted) for result in results)


def test_forked_child():
    """The handle that calls share has threads; a child has none of them and works all the same."""
    done = run_python("""
import os, cuflash, numpy as np
q = np.ones((4, 8, 300, 64), np.float32)
wanted = cuflash.attention(q, q, q)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(cuflash.attention(q, q, q), wanted) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert done.stdout == "0\n", done.stderr


# ---- what is refused ----------------------------------------------------------------------------------


def strided_by_bytes(shape):
    """A field of records of 6 bytes: its rows are no whole number of elements apart."""
    records = np.zeros(shape[:3], np.dtype([("x", np.float32, shape[3]), ("y", np.int16)]))
    return records["x"]


Q, K = np.ones((2, 4, 5, 8), np.float32), np.ones((2, 2, 7, 8), np.float32)
LSE = np.ones((2, 4, 5), np.float32)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# Beside those of tests/bad_input/table.tsv: what only arrays can have, and what messages tell of them.
BAD_CALLS = {
    "rank": (lambda: cuflash.attention(Q[0], K, K), 2, r"q: 3 dimensions .*4: \[B, H, S, D\]"),
    "rank bshd": (lambda: cuflash.attention(Q, K[0], K, layout="bshd"), 2, r"k: .*\[B, S, H, D\]"),
    "batch": (lambda: cuflash.attention(Q, K[:1], K),
        2, r"k: shape \(1, 2, 7, 8\); must be \(2, Hkv, Sk, 8\)"),
    "head_dim": (lambda: cuflash.attention(Q, K[..., :4], K), 2, "k: shape"),
    "v": (lambda: cuflash.attention(Q, K, K[:, :, :3]), 2, r"v: shape .*must be \(2, 2, 7, Dv\)"),
    "v bshd": (lambda: cuflash.attention(Q, K[:, :1], K, layout="bshd"), 2, r"v: .*must be \(2, 1, 7, Dv\)"),
    "float64": (lambda: cuflash.attention(Q.astype("f8"), K, K), 7, "q: float64; float32, float16"),
    "integers": (lambda: cuflash.attention(Q, K.astype("i4"), K), 7, "k: int32;"),
    "byte order": (lambda: cuflash.attention(Q.astype(">f4"), K, K), 7, "q: >f4"),
    "channels": (lambda: cuflash.attention(Q.swapaxes(2, 3), K, K), 8, "q: .*contiguous"),
    "negative": (lambda: cuflash.attention(Q, K[:, :, ::-1], K), 8, "k: .*negative strides"),
    "bytes": (lambda: cuflash.attention(strided_by_bytes(Q.shape), K, K), 8, "q: strides of .* bytes"),
    "masked": (lambda: cuflash.attention(np.ma.masked_array(Q), K, K), 8, "q: a masked array"),
    "align": (lambda: cuflash.attention(Q, K, K, align="middle"), 8, "align: 'middle'; 'bottom-right'"),
    "offsets": (lambda: cuflash.attention(Q, K, K, align=np.zeros(3, "i4")),
        2, r"align: shape \(3,\); must be \(2\)"),
    "layout": (lambda: cuflash.attention(Q, K, K, layout="sbhd"), 8, "layout: 'sbhd'; one of bhsd, bshd"),
    "out read-only": (lambda: cuflash.attention(Q, K, K, out=read_only(Q)), 8, "out: cannot be written"),
    "lse's dtype": (lambda: cuflash.attention(Q, K, K, lse=LSE.astype("f8")), 7, "lse: float64; float32"),
    "lse repeats": (lambda: cuflash.attention_backward(Q, Q, K, K, Q, np.broadcast_to(np.float32(0), LSE.shape)),
                    8, "lse: one value repeated"),
    "lengths' dtype": (lambda: cuflash.decode(Q, K, K, lengths=np.array([1, 2])),
        7, "lengths: int64 .*int32"),
    "lengths' strides": (lambda: cuflash.decode(Q, K, K, lengths=np.zeros(4, "i4")[::2]),
        7, "lengths: .*contiguous"),
    "entries": (lambda: cuflash.decode(Q, K[:1], K[:1]), None, "1 entries for a batch of 2"),
    "parts": (lambda: cuflash.merge_states(Q, LSE), 2, r"parts: .*5: \[P, B, H, S, D\]"),
    "lse of parts": (lambda: cuflash.merge_states(Q[None], LSE[None], lse=np.ones((2, 4, 10), "f4")[..., ::2]),
                     8, "lse: strides"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    call, status, message = BAD_CALLS[name]
    before = Q.copy(), K.copy(), LSE.copy()
    with pytest.raises(cuflash.ArgumentError, match=message) as error:
        call()
    assert status in (None, error.value.status)
    assert all(np.array_equal(a, b) for a, b in zip(before, (Q, K, LSE)))
    cuflash.attention(Q, K, K)  # the next good call works


def test_kernel_that_cannot():
    with pytest.raises(cuflash.UnsupportedError):  # it refuses the CPU, or is not in this build
        cuflash.attention(Q, K, K, kernel="fwd_wmma_f16_d64")


def test_no_array():
    with pytest.raises(TypeError, match="k: list is no array"):
        cuflash.attention(Q, [1.0], K)
    with pytest.raises(TypeError, match="cache: ndarray is no cuflash.KVCache"):
        cuflash.explain("append", K, K, K)
    with pytest.raises(cuflash.ArgumentError, match="operation: 'sort'; one of forward, backward, decode, append$"):
        cuflash.explain("sort", Q, K, K)


def test_classes_of_errors():
    """Every status has one, and the built-in exceptions that users expect catch them."""
    from cuflash._errors import error

    for status in raw.cuflash_status:
        kind = type(error(status, "text"))
        assert status == raw.CUFLASH_SUCCESS or kind is not cuflash.Error or status == raw.CUFLASH_ERROR_INTERNAL
    assert isinstance(error(raw.CUFLASH_ERROR_INVALID_VALUE, ""), ValueError)
    assert isinstance(error(raw.CUFLASH_ERROR_UNSUPPORTED, ""), NotImplementedError)
    assert isinstance(error(raw.CUFLASH_ERROR_OUT_OF_MEMORY, ""), MemoryError)
    assert isinstance(error(raw.CUFLASH_ERROR_NO_DEVICE, ""), RuntimeError)
    copy = pickle.loads(pickle.dumps(error(raw.CUFLASH_ERROR_UNSUPPORTED, "text")))
    assert (type(copy), copy.status, copy.message) == (cuflash.UnsupportedError, 10, "text")


# ---- protocols ----------------------------------------------------------------------------------------


class OnlyInterface:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.dtype = array.dtype
        self.array = array


class OnlyDlpack:
    """As libraries that know versions of DLPack, and as those from before."""

    def __init__(self, array, versioned):
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        if options and not self.versioned:
            raise TypeError("unexpected keyword")
        return self.array.__dlpack__(**options)


class ArrayApi(OnlyDlpack):
    """A library whose results come by from_dlpack()."""

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=np.from_dlpack)


@pytest.mark.parametrize("wrap", [OnlyInterface, lambda x: OnlyDlpack(x, True), lambda x: OnlyDlpack(x, False)])
def test_protocols_of_the_host(qkv, wrap):
    q, k, v = qkv
    k = k.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    out = poisoned(q.shape)
    result = cuflash.attention(*map(wrap, (q, k, v)), out=(target := wrap(out)))
    assert result is target
    assert np.array_equal(out, cuflash.attention(q, k, v))
    with pytest.raises(cuflash.ArgumentError, match="cannot make a new Only"):
        cuflash.attention(*map(wrap, (q, k, v)))


def test_read_only_dlpack(qkv):
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy exports no read-only array")
    with pytest.raises(cuflash.ArgumentError, match="out: cannot be written"):
        cuflash.attention(*qkv, out=OnlyDlpack(read_only(qkv[0]), True))


def test_results_by_from_dlpack(qkv):
    """The new owner gets the memory, and gives it back."""
    o, lse = cuflash.attention(*(ArrayApi(x, False) for x in qkv), return_lse=True)
    wanted = cuflash.attention(*qkv, return_lse=True)
    assert np.array_equal(o, wanted[0]) and np.array_equal(lse, wanted[1])
    gc.collect()
    assert len(_dlpack._given) == 2
    del o, lse
    gc.collect()
    assert not _dlpack._given


def test_dlpack_capsule_that_nobody_takes():
    memory = _dlpack.Memory(_arrays.CPU, (2, 0, 3), "f16")
    capsule = memory.__dlpack__()
    assert _dlpack.strides(_dlpack.read(capsule)[0]) == (0, 3, 1)
    assert len(_dlpack._given) == 1
    del capsule
    assert not _dlpack._given


def test_dlpack_of_a_later_major_version(monkeypatch, qkv):
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy exports no versions")
    monkeypatch.setattr(_dlpack, "VERSION", (0, 0))
    capsule = qkv[0].__dlpack__(max_version=(1, 0))
    with pytest.raises(BufferError, match="DLPack 1"):
        _dlpack.read(capsule)


class Cuda:
    """__cuda_array_interface__ of memory that is not there."""

    def __init__(self, shape=(1, 2, 3, 8), typestr="<f4", pointer=4096, strides=None, **more):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (pointer, False),
                                         "strides": strides, "version": 3, **more}


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "device_of", lambda pointer: 0)


def test_cuda_interface(one_gpu):
    read = _arrays.Arrays(None, q=Cuda(), k=Cuda(strides=(4096, 32, 64, 4)), v=Cuda(typestr="<f2"))
    assert read.device == 0 and read.stream is None
    assert (read["q"].pointer, read["q"].strides, read["q"].dtype) == (4096, (0, 24, 8, 1), "f32")
    assert read["k"].strides == (0, 8, 16, 1) and read["v"].dtype == "f16"
    bfloat16 = Cuda(typestr="|V2")
    assert _arrays.Arrays(None, q=bfloat16)["q"].dtype == "|V2"
    bfloat16.dtype = types.SimpleNamespace(name="bfloat16")
    assert _arrays.Arrays(None, q=bfloat16)["q"].dtype == "bf16"
    empty = _arrays.Arrays(None, q=Cuda(pointer=0, shape=(0, 2, 3, 8)), k=Cuda())
    assert empty.device == 0 and empty["q"].pointer == 0
    assert _arrays.Arrays(None, q=Cuda(pointer=0)).device == raw.CUFLASH_DEVICE_CURRENT
    with pytest.raises(cuflash.ArgumentError, match="q: a masked array"):
        _arrays.Arrays(None, q=Cuda(mask=Cuda()))
    with pytest.raises(cuflash.ArgumentError, match="cannot make a new Cuda: pass the outputs"):
        cuflash.attention(Cuda(), Cuda(), Cuda())


def test_cuda_streams(one_gpu):
    def stream_of(*streams, given=None):
        return _arrays.Arrays(given, **{f"x{i}": Cuda(stream=s) for i, s in enumerate(streams)}).stream

    assert stream_of(None, None) is None
    assert stream_of(1, None) == 0  # the legacy default stream
    assert stream_of(2, 2) == 2
    assert stream_of(None, 0xABC0) == 0xABC0
    with pytest.raises(cuflash.ArgumentError, match="x0 on 0x2, x1 on 0xabc0.*stream="):
        stream_of(2, 0xABC0)
    assert stream_of(2, 0xABC0, given=7) == 7
    assert stream_of(2, given=types.SimpleNamespace(cuda_stream=9)) == 9  # torch
    assert stream_of(2, given=types.SimpleNamespace(ptr=9)) == 9  # CuPy
    assert stream_of(2, given=types.SimpleNamespace(handle=ctypes.c_void_p(9))) == 9  # Numba
    assert stream_of(2, given=types.SimpleNamespace(__cuda_stream__=lambda: (0, 9))) == 9


def test_devices_differ(one_gpu):
    with pytest.raises(cuflash.ArgumentError, match="k: on the CPU, but q is on CUDA device 0") as error:
        cuflash.attention(Cuda(), K, K)
    assert error.value.status == raw.CUFLASH_ERROR_WRONG_DEVICE


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_no_fallback_to_the_cpu(one_gpu):
    with pytest.raises((cuflash.DeviceError, cuflash.UnsupportedError)):
        cuflash.attention(Cuda(), Cuda(), Cuda(), out=Cuda(pointer=1 << 20))


# ---- the libraries themselves -------------------------------------------------------------------------


def host(array) -> np.ndarray:
    """A NumPy copy in float64."""
    if hasattr(array, "cpu"):
        return array.detach().cpu().double().numpy()
    array = array.get() if hasattr(array, "get") else array.copy_to_host() if hasattr(array, "copy_to_host") else array
    return np.asarray(array).astype(np.float64)


def torch_on(device):
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return lambda x: torch.from_numpy(x.copy()).to(device), torch.Tensor


def jax_on(device):
    jax = pytest.importorskip("jax")
    try:
        target = jax.devices(device)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {device}")
    return lambda x: jax.device_put(x, target), jax.Array


def cupy_arrays():
    cupy = pytest.importorskip("cupy")
    return cupy.asarray, cupy.ndarray


def numba_arrays():
    pytest.importorskip("numba.cuda")
    numba_cuda = importlib.import_module("numba.cuda")
    return numba_cuda.to_device, None


LIBRARIES = {"torch": lambda: torch_on("cpu"), "jax": lambda: jax_on("cpu"), "torch cuda": lambda: torch_on("cuda"),
             "jax cuda": lambda: jax_on("cuda"), "cupy": cupy_arrays, "numba": numba_arrays}


@pytest.fixture(params=LIBRARIES)
def library(request):
    if request.param not in ("torch", "jax") and not ON_GPU:
        pytest.skip("no GPU, or a library without CUDA")
    return LIBRARIES[request.param]()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_library(library, rng, dtype):
    """All operations; results are the library's own arrays."""
    make, kind = library
    q, d_o = (random(rng, (2, 4, 17, 64), dtype) for _ in range(2))
    k, v = (random(rng, (2, 2, 33, 64), dtype) for _ in range(2))
    seen = bottom_right(17, 33)
    arrays = [make(x) for x in (q, k, v)]
    o, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
    kind = kind or type(arrays[0])
    assert isinstance(o, kind) and isinstance(lse, kind)
    wanted, wanted_lse = forward(q, k, v, 0.125, seen)
    assert_near(host(o), wanted, dtype)
    np.testing.assert_allclose(host(lse), wanted_lse, rtol=1e-5, atol=1e-3 if dtype == "float16" else 1e-5)
    gradients = cuflash.attention_backward(make(d_o), *arrays, o, lse, causal=True)
    for got, exact in zip(gradients, backward(q, k, v, d_o, 0.125, seen)):
        error = np.abs(host(got) - exact).max()
        assert error <= 4 * TOLERANCE[dtype] * max(1.0, np.abs(exact).max())
    decoded = cuflash.decode(make(q[:, :, :1].copy()), *arrays[1:], lengths=make(np.array([33, 5], np.int32)))
    p, _ = probabilities(q[1:, :, :1], k[1:, :, :5], 0.125, everything(1, 5))
    assert_near(host(decoded)[1:], p @ np.repeat(v[1:, :, :5].astype(np.float64), 2, axis=1), dtype)


def test_torch_views(rng):
    torch = pytest.importorskip("torch")
    packed = torch.from_numpy(random(rng, (2, 17, 3, 4, 16)))
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    o = cuflash.attention(q, k, v)
    assert_near(o, forward(q.numpy(), k.numpy(), v.numpy(), 0.25, everything(17, 17))[0])
    bfloat16 = [x.to(torch.bfloat16) for x in (q, k, v)]
    assert cuflash.attention(*bfloat16).dtype == torch.bfloat16
    q.requires_grad_()
    with pytest.raises(cuflash.ArgumentError, match="q: requires grad; use cuflash.torch"):
        cuflash.attention(q, k, v)
    with torch.no_grad():
        assert torch.equal(cuflash.attention(q, k, v), o)
    with pytest.raises(cuflash.ArgumentError, match="meta"):
        cuflash.attention(*[torch.empty(1, 1, 1, 8, device="meta")] * 3)


def test_jax_arrays_are_never_written(rng):
    jnp = pytest.importorskip("jax.numpy")
    q = jnp.ones((1, 1, 4, 8))
    with pytest.raises(cuflash.ArgumentError, match="out: cannot be written"):
        cuflash.attention(q, q, q, out=jnp.zeros_like(q))
    bfloat16 = q.astype(jnp.bfloat16)
    assert cuflash.attention(bfloat16, bfloat16, bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_current_stream(name, rng):
    """Work goes to the stream that the library has made current."""
    if not ON_GPU:
        pytest.skip("no GPU, or a library without CUDA")
    module = pytest.importorskip(name)
    if name == "torch":
        make = lambda x: module.from_numpy(x).cuda()  # noqa: E731
        stream = module.cuda.Stream()
        current = module.cuda.stream(stream)
        address = stream.cuda_stream
    else:
        make = module.asarray
        stream = module.cuda.Stream(non_blocking=True)
        current = stream
        address = stream.ptr
    arrays = {name: make(random(rng, (1, 1, 4, 16))) for name in ("q", "k", "v")}
    assert not _arrays.Arrays(None, **arrays).stream
    with current:
        assert _arrays.Arrays(None, **arrays).stream == address
        o = cuflash.attention(*arrays.values())
    assert _arrays.Arrays(stream, **arrays).stream == address
    stream.synchronize()
    assert_near(host(o), forward(*map(host, arrays.values()), 0.25, everything(4, 4))[0])
