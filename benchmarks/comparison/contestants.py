"""Who computes: cuflash, and its peers where they can be imported.

A contestant is made for one point from the same tensors q, k, v as every other, all [B, H, S, D]; peers that want
another order of the dimensions get views of them, flashinfer, which takes none, copies.
"""
from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any, Callable, ContextManager

import numpy as np

import cuflash
from cuflash import raw

from .devices import Call
from .points import Point

#: as in cuflash.h
_DTYPES = {"f32": raw.CUFLASH_F32, "f16": raw.CUFLASH_F16, "bf16": raw.CUFLASH_BF16}
_MASKS = {"full": raw.CUFLASH_MASK_NONE, "causal": raw.CUFLASH_MASK_CAUSAL}


class Unavailable(Exception):
    """It cannot compute this point here; says why."""


@dataclass
class Contestant:
    call: Call  # enqueues one attention
    result: Callable[[], Any]  # of the last call, [B, H, S, D]
    lse: Any = None  # where it is to be checked
    kernel: str | None = None
    around: Callable[[], ContextManager] = contextlib.nullcontext  # in which calls are made


Maker = Callable[[Point, Any, Any, Any, Any], Contestant]  # of point, q, k, v, device


def _returning(compute: Callable[[], Any], order: Callable[[Any], Any] = lambda o: o, **others) -> Contestant:
    """For functions that return a new result."""
    last: list[Any] = [None]

    def call() -> None:
        last[0] = compute()

    return Contestant(call, lambda: order(last[0]), **others)


# ---- cuflash ---------------------------------------------------------------------------------------------


def cuflash_with(kernel: str | None) -> Maker:
    """cuflash with the kernel that it chooses, or with one of this name or family."""

    def make(point: Point, q, k, v, device) -> Contestant:
        def tensor(x):
            return raw.cuflash_tensor_t.new(data=device.address(x), flags=raw.CUFLASH_TENSOR_DENSE)

        o = device.unwritten(point.shape_q, point.dtype)
        lse = device.unwritten(point.shape_q[:3], "f32")
        problem = raw.cuflash_problem_t.new(
            batch=point.batch, heads_q=point.heads, heads_kv=point.heads_kv, len_q=point.length, len_k=point.length,
            head_dim=point.head_dim, q=tensor(q), k=tensor(k), v=tensor(v), o=tensor(o), lse=device.address(lse),
            mask=_MASKS[point.mask], kernel=kernel.encode() if kernel else None)
        problem.q.dtype = _DTYPES[point.dtype]
        handle = cuflash.Handle(device.ordinal)
        explained = cuflash.explain("forward", handle, problem)
        if explained["kernel"] is None:
            raise Unavailable("; ".join(f"{each['name']}: {each['reason']}" for each in explained["kernels"]))
        forward, stream = raw.cuflash_attention_forward, device.stream

        def call() -> None:
            status = forward(handle, problem, stream)
            if status:
                cuflash.check(status)

        return Contestant(call, lambda: o, lse=lse, kernel=explained["kernel"])

    return make


# ---- peers on the CPU ------------------------------------------------------------------------------------


def numpy_plain(point: Point, q, k, v, device) -> Contestant:
    """The matrix of scores as it is, in f32."""
    group = point.heads // point.heads_kv
    hidden = np.triu(np.full((point.length, point.length), -np.inf, np.float32), 1) if point.mask == "causal" else 0

    def compute():
        queries, keys, values = (x.astype(np.float32) for x in (q, k, v))
        keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
        scores = queries @ keys.swapaxes(2, 3) * np.float32(point.head_dim**-0.5) + hidden
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights @ values / weights.sum(axis=-1, keepdims=True)).astype(q.dtype)

    return _returning(compute)


def torch_cpu(point: Point, q, k, v, device) -> Contestant:
    torch = _import("torch")

    def shared(x):
        if point.dtype == "bf16":  # which torch does not know as a dtype of NumPy
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    tensors = [shared(x) for x in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention
    return _returning(lambda: attention(*tensors, is_causal=point.mask == "causal",
                                        enable_gqa=point.heads != point.heads_kv),
                      order=lambda o: o.float().numpy())


# ---- peers on a GPU --------------------------------------------------------------------------------------


def sdpa(backend: str) -> Maker:
    """PyTorch's scaled_dot_product_attention."""

    def make(point: Point, q, k, v, device) -> Contestant:
        attention = _import("torch.nn.functional", "scaled_dot_product_attention")
        nn_attention = _import("torch.nn.attention")
        only = getattr(nn_attention.SDPBackend, backend)
        causal, grouped = point.mask == "causal", point.heads != point.heads_kv
        return _returning(lambda: attention(q, k, v, is_causal=causal, enable_gqa=grouped),
                          around=lambda: nn_attention.sdpa_kernel([only]))

    return make


def flash_attn(module: str) -> Maker:
    """FlashAttention 2, 3 and 4 have the same function, of [B, S, H, D]; some versions return LSE beside O."""

    def make(point: Point, q, k, v, device) -> Contestant:
        attention = _import(module, "flash_attn_func")
        views = [x.transpose(1, 2) for x in (q, k, v)]
        causal = point.mask == "causal"
        return _returning(lambda: attention(*views, causal=causal),
                          order=lambda o: (o[0] if isinstance(o, tuple) else o).transpose(1, 2))

    return make


def flashinfer(point: Point, q, k, v, device) -> Contestant:
    library, torch = _import("flashinfer"), _import("torch")
    packed = [x.transpose(1, 2).reshape(point.batch * point.length, -1, point.head_dim) for x in (q, k, v)]
    starts = torch.arange(0, (point.batch + 1) * point.length, point.length, dtype=torch.int32, device=q.device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=q.device), "NHD")
    wrapper.plan(starts, starts, point.heads, point.heads_kv, point.head_dim, causal=point.mask == "causal",
                 q_data_type=q.dtype)
    shape = (point.batch, point.length, point.heads, point.head_dim)
    return _returning(lambda: wrapper.run(*packed), order=lambda o: o.reshape(shape).transpose(1, 2))


def _import(module: str, attribute: str | None = None):
    """Unavailable where it cannot be had, for whatever reason: it is code of others."""
    try:
        imported = importlib.import_module(module)
        return getattr(imported, attribute) if attribute else imported
    except Exception as error:
        raise Unavailable(f"{module} cannot be imported: {type(error).__name__}: {error}") from None


#: by device: what has to be there, and who makes it
PEERS: dict[str, dict[str, tuple[tuple[str, ...], Maker]]] = {
    "cpu": {"numpy": (("numpy",), numpy_plain), "torch": (("torch",), torch_cpu)},
    "cuda": {
        "sdpa_flash": (("torch",), sdpa("FLASH_ATTENTION")),
        "sdpa_cudnn": (("torch",), sdpa("CUDNN_ATTENTION")),
        **{name: ((module, "flash_attn_func"), flash_attn(module)) for name, module in (
            ("flash_attn_2", "flash_attn"), ("flash_attn_3", "flash_attn_interface"),
            ("flash_attn_4", "flash_attn.cute"))},
        "flashinfer": (("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"), flashinfer),
    },
}


def peers(device: str, names: list[str] | None) -> tuple[dict[str, Maker], dict[str, str]]:
    """Those that can be imported, and why the others cannot; all of the device, or by name."""
    known = PEERS[device]
    makers, missing = {}, {}
    for name in known if names is None else names:
        if name not in known:
            raise ValueError(f"peer {name!r}: on {device} one of {', '.join(known)}")
        needed, make = known[name]
        try:
            _import(*needed)
        except Unavailable as reason:
            missing[name] = str(reason)
        else:
            makers[name] = make
    return makers, missing
