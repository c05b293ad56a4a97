"""NumPy arrays as cuflash tensors, and attention written out in fp64."""
from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from cuflash import raw

DTYPES = {np.dtype(np.float32): raw.CUFLASH_F32, np.dtype(np.float16): raw.CUFLASH_F16}


def tensor(array: np.ndarray) -> raw.cuflash_tensor_t:
    """A view of a [batch, head, row, channel] array; the caller keeps the array alive."""
    batch, head, row, channel = (stride // array.itemsize for stride in array.strides)
    assert channel == 1 or array.shape[3] <= 1
    return raw.cuflash_tensor_t.new(data=array.ctypes.data, batch_stride=batch, head_stride=head,
                                    row_stride=row, dtype=DTYPES[array.dtype])


def random(rng: np.random.Generator, shape, dtype=np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def poisoned(shape, dtype=np.float32) -> np.ndarray:
    """An output array: what is not written stays NaN."""
    return np.full(shape, np.nan, dtype)


def problem(q, k, v, o, lse=None, **fields) -> raw.cuflash_problem_t:
    batch, heads_q, len_q, head_dim = q.shape
    return raw.cuflash_problem_t.new(
        batch=batch, heads_q=heads_q, heads_kv=k.shape[1], len_q=len_q, len_k=k.shape[2],
        head_dim=head_dim, q=tensor(q), k=tensor(k), v=tensor(v), o=tensor(o),
        lse=None if lse is None else lse.ctypes.data, **fields)


def probabilities(q, k, scale, seen):
    """Softmax rows and their log-sum-exp; seen is a boolean [len_q, len_k]."""
    k = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], axis=1)
    scores = np.where(seen, scale * q.astype(np.float64) @ k.swapaxes(2, 3), -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(top), top, 0))[..., 0]
    return weights / np.where(total > 0, total, 1), lse


def forward(q, k, v, scale, seen):
    p, lse = probabilities(q, k, scale, seen)
    v = np.repeat(v.astype(np.float64), q.shape[1] // v.shape[1], axis=1)
    return p @ v, lse


def backward(q, k, v, d_o, scale, seen):
    """dQ, dK, dV; those of K and V summed over the query heads that share them."""
    batch, heads_kv, len_k, head_dim = k.shape
    group = q.shape[1] // heads_kv
    p, _ = probabilities(q, k, scale, seen)
    k_all, v_all = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    d_o = d_o.astype(np.float64)
    d_p = d_o @ v_all.swapaxes(2, 3)
    d_s = p * (d_p - (p * d_p).sum(axis=-1, keepdims=True))
    dq = scale * d_s @ k_all
    dk = scale * d_s.swapaxes(2, 3) @ q.astype(np.float64)
    dv = p.swapaxes(2, 3) @ d_o
    grouped = (batch, heads_kv, group, len_k, head_dim)
    return dq, dk.reshape(grouped).sum(axis=2), dv.reshape(grouped).sum(axis=2)


def bottom_right(len_q: int, len_k: int) -> np.ndarray:
    """What a causal mask lets each row see."""
    return np.arange(len_k)[None, :] <= np.arange(len_q)[:, None] + len_k - len_q


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh process, where the environment is read anew."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path, **environment})
