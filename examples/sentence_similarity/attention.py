"""Self-attention over fused projections in libcuflash, on the CPU device or on a GPU."""

from __future__ import annotations

import numpy as np

import cuflash
from cuflash import cuda, raw


def self_attention(shape: tuple, dtype: int, qkv: int, o: int) -> raw.cuflash_problem_t:
    """The problem of one layer: qkv and o are addresses of [batch, tokens, 3, heads, head_dim] and
    [batch, tokens, heads, head_dim]. The strides say where q, k and v lie; nothing is moved."""
    batch, tokens, _, heads, head_dim = shape
    hidden = heads * head_dim

    def tensor(address: int, row_stride: int) -> raw.cuflash_tensor_t:
        return raw.cuflash_tensor_t.new(
            data=address,
            dtype=dtype,
            batch_stride=tokens * row_stride,
            row_stride=row_stride,
            head_stride=head_dim,
        )

    element = 2 if dtype == raw.CUFLASH_F16 else 4
    q, k, v = (tensor(qkv + part * hidden * element, 3 * hidden) for part in range(3))
    return raw.cuflash_problem_t.new(
        batch=batch,
        heads_q=heads,
        len_q=tokens,
        len_k=tokens,
        head_dim=head_dim,
        q=q,
        k=k,
        v=v,
        o=tensor(o, hidden),
    )


class CpuAttention:
    dtype = "fp32"

    def __init__(self) -> None:
        self.handle = cuflash.Handle(raw.CUFLASH_DEVICE_CPU)
        self.device = "the CPU device"
        self.kernels: dict[tuple, str] = {}  # by the shape of the call

    def __call__(self, qkv: np.ndarray) -> np.ndarray:
        batch, tokens, _, heads, head_dim = qkv.shape
        o = np.empty((batch, tokens, heads, head_dim), np.float32)
        problem = self_attention(qkv.shape, raw.CUFLASH_F32, qkv.ctypes.data, o.ctypes.data)
        if qkv.shape not in self.kernels:
            self.kernels[qkv.shape] = cuflash.explain("forward", self.handle, problem)["kernel"]
        cuflash.check(raw.cuflash_attention_forward(self.handle, problem, None))
        return o


class CudaAttention:
    """fp16, since that is what the tensor cores take; the rest of the encoder stays fp32."""

    dtype = "fp16"

    def __init__(self, device: cuda.Device) -> None:
        self.handle = cuflash.Handle(device.ordinal)
        self.device = cuda.describe()
        self.kernels: dict[tuple, str] = {}  # by the shape of the call
        self._memory = device
        self._qkv = self._o = device.empty(0)

    def __call__(self, qkv: np.ndarray) -> np.ndarray:
        batch, tokens, _, heads, head_dim = qkv.shape
        half = qkv.astype(np.float16)
        if half.nbytes > self._qkv.nbytes:
            self._qkv.free()
            self._o.free()
            self._qkv = self._memory.empty(half.nbytes)
            self._o = self._memory.empty(half.nbytes // 3)
        self._qkv.copy_from(half)
        problem = self_attention(qkv.shape, raw.CUFLASH_F16, self._qkv.ptr, self._o.ptr)
        if qkv.shape not in self.kernels:
            self.kernels[qkv.shape] = cuflash.explain("forward", self.handle, problem)["kernel"]
        cuflash.check(raw.cuflash_attention_forward(self.handle, problem, None))
        return self._o.to_numpy((batch, tokens, heads, head_dim), np.float16).astype(np.float32)
