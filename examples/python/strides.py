"""The struct call on NumPy arrays: any order of memory, grouped heads, a window, no copies.

PYTHONPATH=bindings/python python examples/python/strides.py
"""

import sys

import numpy as np

from cuflash import Handle, check, explain, raw


def tensor(array: np.ndarray) -> raw.cuflash_tensor_t:
    """A float32 view [batch, heads, length, head_dim]; its channels must be contiguous."""
    batch, head, row, channel = (stride // array.itemsize for stride in array.strides)
    if channel != 1:
        raise ValueError("the channels must be contiguous")
    return raw.cuflash_tensor_t.new(data=array.ctypes.data, dtype=raw.CUFLASH_F32,
                                    batch_stride=batch, head_stride=head, row_stride=row)


def window_problem(q, k, v, o, left: int, right: int) -> raw.cuflash_problem_t:
    batch, heads_q, len_q, head_dim = q.shape
    return raw.cuflash_problem_t.new(
        batch=batch, heads_q=heads_q, heads_kv=k.shape[1], len_q=len_q, len_k=k.shape[2],
        head_dim=head_dim, q=tensor(q), k=tensor(k), v=tensor(v), o=tensor(o),
        flags=raw.CUFLASH_PROBLEM_WINDOW, window_left=left, window_right=right)


def expected(q, k, v, left: int, right: int) -> np.ndarray:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat(group, axis=1).transpose(0, 1, 3, 2) * q.shape[3] ** -0.5
    i, j = np.ogrid[: q.shape[2], : k.shape[2]]
    centre = i + k.shape[2] - q.shape[2]  # bottom-right
    scores[..., (j < centre - left) | (j > centre + right)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v.repeat(group, axis=1) / weights.sum(axis=-1, keepdims=True)


def main() -> int:
    # [batch, length, heads, head_dim] in memory, as a projection leaves it; transposed as a view.
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 60, 8, 64), dtype=np.float32).transpose(0, 2, 1, 3)
    k, v = rng.standard_normal((2, 2, 100, 2, 64), dtype=np.float32).transpose(0, 1, 3, 2, 4)
    o = np.empty((2, 60, 8, 64), np.float32).transpose(0, 2, 1, 3)

    problem = window_problem(q, k, v, o, left=15, right=0)
    with Handle(raw.CUFLASH_DEVICE_CPU) as cpu:
        check(raw.cuflash_attention_forward(cpu, problem, None))
        kernel = explain("forward", cpu, problem)["kernel"]
    error = np.abs(o - expected(q, k, v, 15, 0)).max()
    print(f"kernel {kernel}: largest difference from NumPy {error:.1e}")
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
