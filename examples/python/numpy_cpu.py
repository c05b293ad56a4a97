"""Attention on NumPy arrays: the CPU device through ctypes, by the function that needs no struct.

PYTHONPATH=bindings/python python examples/python/numpy_cpu.py
"""

import sys

import numpy as np

from cuflash import check, raw


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q, k, v: dense float32 [batch, heads, length, head_dim]."""
    batch, heads, length, head_dim = q.shape
    o = np.empty_like(q)
    lse = np.empty((batch, heads, length), np.float32)
    check(
        raw.cuflash_attention_forward_f32(
            *(tensor.ctypes.data for tensor in (q, k, v, o, lse)),
            batch, heads, length, head_dim,
            head_dim**-0.5,
            1,  # causal
            None,  # the CPU device has no streams
        )
    )
    return o


def main() -> int:
    check(raw.cuflash_set_default_device(raw.CUFLASH_DEVICE_CPU))
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 100, 64), dtype=np.float32)
    o = causal_attention(q, k, v)

    scores = q @ k.transpose(0, 1, 3, 2) * 64**-0.5
    scores[..., np.triu(np.ones((100, 100), bool), k=1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights @ v / weights.sum(axis=-1, keepdims=True)
    error = np.abs(o - expected).max()
    print(f"{raw.cuflash_build_info().decode()}\nlargest difference from NumPy: {error:.1e}")
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
