"""The operations on the CPU device, called as a Python user calls them, against NumPy."""
from __future__ import annotations

import ctypes

import numpy as np
import pytest
from arrays import backward, bottom_right, forward, poisoned, problem, random, tensor
from cuflash import check, raw

# Far above the rounding of each dtype, far below what a wrong mask, head or row would show; the
# kernel tests have the exact accuracy rule.
TOLERANCE = {np.float32: 2e-6, np.float16: 4e-3}


def assert_near(got, wanted, dtype) -> None:
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=TOLERANCE[dtype],
                               atol=TOLERANCE[dtype] * max(1.0, np.abs(wanted).max()))


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("heads_kv", [6, 2, 1])
def test_forward_causal(cpu, rng, dtype, heads_kv):
    q = random(rng, (2, 6, 17, 40), dtype)
    k, v = (random(rng, (2, heads_kv, 33, 40), dtype) for _ in range(2))
    o, lse = poisoned(q.shape, dtype), poisoned(q.shape[:3])
    check(raw.cuflash_attention_forward(
        cpu, problem(q, k, v, o, lse, mask=raw.CUFLASH_MASK_CAUSAL), None))
    wanted_o, wanted_lse = forward(q, k, v, 40**-0.5, bottom_right(17, 33))
    assert_near(o, wanted_o, dtype)
    assert_near(lse, wanted_lse, np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_backward_causal(cpu, rng, dtype):
    q, d_o = (random(rng, (2, 4, 19, 32), dtype) for _ in range(2))
    k, v = (random(rng, (2, 2, 19, 32), dtype) for _ in range(2))
    o, lse = poisoned(q.shape, dtype), poisoned(q.shape[:3])
    dq, dk, dv = (poisoned(x.shape, dtype) for x in (q, k, v))
    given = problem(q, k, v, o, lse, mask=raw.CUFLASH_MASK_CAUSAL)
    gradients = raw.cuflash_gradients_t.new(d_o=tensor(d_o), dq=tensor(dq), dk=tensor(dk),
                                            dv=tensor(dv))
    check(raw.cuflash_attention_forward(cpu, given, None))
    check(raw.cuflash_attention_backward(cpu, given, gradients, None))
    for got, wanted in zip((dq, dk, dv), backward(q, k, v, d_o, 32**-0.5, bottom_right(19, 19))):
        assert_near(got, wanted, dtype)


def test_transposed_views(cpu, rng):
    """[batch, row, head, channel] arrays go in and out without a copy."""
    q, k, v = (random(rng, (2, 21, 3, 24)).swapaxes(1, 2) for _ in range(3))
    store = poisoned((2, 21, 3, 24))
    o = store.swapaxes(1, 2)
    check(raw.cuflash_attention_forward(cpu, problem(q, k, v, o), None))
    assert_near(store.swapaxes(1, 2), forward(q, k, v, 24**-0.5, True)[0], np.float32)


def test_broadcast_keys(cpu, rng):
    """A stride of 0 repeats a batch entry."""
    q = random(rng, (3, 2, 5, 16))
    k, v = (np.broadcast_to(random(rng, (1, 2, 9, 16)), (3, 2, 9, 16)) for _ in range(2))
    o = poisoned(q.shape)
    check(raw.cuflash_attention_forward(cpu, problem(q, k, v, o), None))
    assert_near(o, forward(q, k, v, 0.25, True)[0], np.float32)


def test_window_and_scale(cpu, rng):
    q, k, v = (random(rng, (1, 2, 30, 16)) for _ in range(3))
    o = poisoned(q.shape)
    flags = raw.CUFLASH_PROBLEM_WINDOW | raw.CUFLASH_PROBLEM_SCALE_SET
    check(raw.cuflash_attention_forward(
        cpu, problem(q, k, v, o, flags=flags, window_left=4, window_right=2, scale=0.7), None))
    row, key = np.mgrid[:30, :30]
    assert_near(o, forward(q, k, v, 0.7, (key >= row - 4) & (key <= row + 2))[0], np.float32)


def test_decode_with_lengths(cpu, rng):
    """Each sequence sees its own keys; what lies past a length is never looked at."""
    lengths = np.array([0, 5, 12, 40], np.int32)
    q = random(rng, (4, 6, 2, 32))
    k, v = (random(rng, (4, 2, 40, 32)) for _ in range(2))
    for array in (k, v):
        for b, length in enumerate(lengths):
            array[b, :, length:] = np.nan
    o, lse = poisoned(q.shape), poisoned(q.shape[:3])
    given = raw.cuflash_problem_t.new(
        batch=4, heads_q=6, heads_kv=2, len_q=2, head_dim=32, mask=raw.CUFLASH_MASK_CAUSAL,
        q=tensor(q), o=tensor(o), lse=lse.ctypes.data)
    cache = raw.cuflash_kv_cache_t.new(k=tensor(k), v=tensor(v), max_len=40,
                                       lengths=lengths.ctypes.data)
    check(raw.cuflash_attention_decode(cpu, given, cache, None))
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        wanted_o, wanted_lse = forward(q[one], k[one, :, :length], v[one, :, :length], 32**-0.5,
                                       bottom_right(2, length))
        assert_near(o[one], wanted_o, np.float32)
        assert_near(lse[one], wanted_lse, np.float32)


def test_merge_of_parts_is_the_whole(cpu, rng):
    q, k, v = (random(rng, (2, 3, 7, 16)) for _ in range(3))
    k, v = (np.concatenate([x, random(rng, (2, 3, 20, 16))], axis=2) for x in (k, v))
    parts, lse_parts = poisoned((3, *q.shape)), poisoned((3, *q.shape[:3]))
    for part, (begin, end) in enumerate([(0, 10), (10, 27)]):
        check(raw.cuflash_attention_forward(
            cpu, problem(q, k[:, :, begin:end], v[:, :, begin:end], parts[part], lse_parts[part]),
            None))
    lse_parts[2] = -np.inf  # an empty part; its O stays NaN
    o, lse = poisoned(q.shape), poisoned(q.shape[:3])
    check(raw.cuflash_merge_states(cpu, raw.cuflash_merge_t.new(
        num_parts=3, batch=2, heads=3, len=7, head_dim=16, parts=tensor(parts[0]),
        part_stride=parts[0].size, lse_parts=lse_parts.ctypes.data,
        lse_part_stride=lse_parts[0].size, o=tensor(o), lse=lse.ctypes.data), None))
    wanted_o, wanted_lse = forward(q, k, v, 0.25, True)
    assert_near(o, wanted_o, np.float32)
    assert_near(lse, wanted_lse, np.float32)


def test_positional_functions(cpu_by_default, rng):
    """Plain pointers and integers, as from a language without the header."""
    q, k, v, d_o = (random(rng, (2, 3, 18, 64), np.float16) for _ in range(4))
    o, lse = poisoned(q.shape, np.float16), poisoned(q.shape[:3])
    gradients = [poisoned(q.shape, np.float16) for _ in range(3)]
    inputs = [x.ctypes.data for x in (q, k, v, o, lse)]
    sizes = [2, 3, 18, 64, 0.125, 1, None]
    check(raw.cuflash_attention_forward_f16(*inputs, *sizes))
    check(raw.cuflash_attention_backward_f16(
        *inputs, d_o.ctypes.data, *(x.ctypes.data for x in gradients), *sizes))
    seen = bottom_right(18, 18)
    wanted_o, wanted_lse = forward(q, k, v, 0.125, seen)
    assert_near(o, wanted_o, np.float16)
    assert_near(lse, wanted_lse, np.float32)
    for got, wanted in zip(gradients, backward(q, k, v, d_o, 0.125, seen)):
        assert_near(got, wanted, np.float16)


def test_workspace_is_exact(cpu, rng):
    """The size asked for is enough, and one byte less is refused."""
    q, k, v = (random(rng, (1, 2, 9, 16)) for _ in range(3))
    o, lse = poisoned(q.shape), poisoned(q.shape[:3])
    dq, dk, dv = (poisoned(x.shape) for x in (q, k, v))
    gradients = raw.cuflash_gradients_t.new(d_o=tensor(q), dq=tensor(dq), dk=tensor(dk),
                                            dv=tensor(dv))
    given = problem(q, k, v, o, lse)
    size = ctypes.c_size_t()
    check(raw.cuflash_attention_forward(cpu, given, None))
    check(raw.cuflash_backward_workspace_size(cpu, given, gradients, ctypes.byref(size)))
    workspace = np.zeros(size.value + 256, np.uint8)
    given.workspace = -(-workspace.ctypes.data // 256) * 256
    given.workspace_size = size.value
    check(raw.cuflash_attention_backward(cpu, given, gradients, None))
    if size.value:
        given.workspace_size = size.value - 1
        assert raw.cuflash_attention_backward(cpu, given, gradients, None) == \
            raw.CUFLASH_ERROR_WORKSPACE_TOO_SMALL
