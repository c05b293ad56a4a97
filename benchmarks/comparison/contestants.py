"""Who computes: cuflash, and its peers where they can be imported.

A contestant is made for one point from the same tensors q, k, v as every other: [B, H, S, D], or packed [T, H, D]
where the sequences are ragged. Peers that want another order of the dimensions get views of them; those that take
packed sequences alone, copies of dense ones.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, NamedTuple

import numpy as np

import cuflash
from cuflash import raw

from .devices import Call
from .points import Point

#: as in cuflash.h
_DTYPES = {"f32": raw.CUFLASH_F32, "f16": raw.CUFLASH_F16, "bf16": raw.CUFLASH_BF16}


class Unavailable(Exception):
    """It cannot compute this point here; says why."""


@dataclass
class Contestant:
    call: Call  # enqueues one attention
    result: Callable[[], Any]  # of the last call, shaped as q
    lse: Any = None  # where it is to be checked
    kernel: str | None = None
    around: Callable[[], ContextManager] = contextlib.nullcontext  # in which calls are made
    holds: tuple = ()  # of which the call has addresses alone


Maker = Callable[[Point, Any, Any, Any, Any], Contestant]  # of point, q, k, v, device


def _returning(compute: Callable[[], Any], order: Callable[[Any], Any] = lambda o: o, **others) -> Contestant:
    """For functions that return a new result."""
    last: list[Any] = [None]

    def call() -> None:
        last[0] = compute()

    return Contestant(call, lambda: order(last[0]), **others)


# ---- cuflash ---------------------------------------------------------------------------------------------


def _tensor(point: Point, x, heads: int, device) -> raw.cuflash_tensor_t:
    if point.ragged is None:
        return raw.cuflash_tensor_t.new(data=device.address(x), flags=raw.CUFLASH_TENSOR_DENSE)
    # There is one batch entry, whatever its stride.
    return raw.cuflash_tensor_t.new(data=device.address(x), head_stride=point.head_dim,
                                    row_stride=heads * point.head_dim)


def _problem(point: Point, q, k, v, o, lse, starts, kernel: str | None, device) -> raw.cuflash_problem_t:
    """`starts` is read where the sequences are ragged."""
    problem = raw.cuflash_problem_t.new(
        batch=point.batch, heads_q=point.heads, heads_kv=point.heads_kv, len_q=max(point.lengths),
        len_k=max(point.lengths), head_dim=point.head_dim, lse=device.address(lse),
        kernel=kernel.encode() if kernel else None)
    for name, x, heads in ("q", q, point.heads), ("k", k, point.heads_kv), ("v", v, point.heads_kv), (
            "o", o, point.heads):
        setattr(problem, name, _tensor(point, x, heads, device))
    problem.q.dtype = _DTYPES[point.dtype]
    if point.mask == "causal":
        problem.mask = raw.CUFLASH_MASK_CAUSAL
    elif point.window:
        problem.flags |= raw.CUFLASH_PROBLEM_WINDOW
        problem.window_left, problem.window_right = point.window - 1, 0
    if point.ragged is not None:
        problem.total_q = problem.total_k = point.starts[-1]
        problem.cu_seqlens_q = problem.cu_seqlens_k = device.address(starts)
    return problem


def cuflash_with(kernel: str | None) -> Maker:
    """cuflash with the kernel that it chooses, or with one of this name or family."""

    def make(point: Point, q, k, v, device) -> Contestant:
        o = device.unwritten(point.shape_q, point.dtype)
        lse = device.unwritten(point.shape_lse, "f32")
        starts = device.integers(point.starts)
        problem = _problem(point, q, k, v, o, lse, starts, kernel, device)
        handle = cuflash.Handle(device.ordinal)
        explained = cuflash.explain("forward", handle, problem)
        if explained["kernel"] is None:
            raise Unavailable("; ".join(f"{each['name']}: {each['reason']}" for each in explained["kernels"]))
        size = ctypes.c_size_t()
        cuflash.check(raw.cuflash_forward_workspace_size(handle, problem, ctypes.byref(size)))
        workspace = device.bytes(size.value)
        if size.value:
            problem.workspace, problem.workspace_size = device.address(workspace), size.value
        forward, stream = raw.cuflash_attention_forward, device.stream

        def call() -> None:
            status = forward(handle, problem, stream)
            if status:
                cuflash.check(status)

        return Contestant(call, lambda: o, lse=lse, kernel=explained["kernel"], holds=(q, k, v, starts, workspace))

    return make


# ---- peers on the CPU ------------------------------------------------------------------------------------


def numpy_plain(point: Point, q, k, v, device) -> Contestant:
    """The matrices of scores as they are, in f32."""
    group = point.heads // point.heads_kv

    @functools.lru_cache(maxsize=None)
    def hidden(length: int):
        """-infinity is added to the scores of keys that a row does not see."""
        everything = np.full((length, length), -np.inf, np.float32)
        after = np.triu(everything, 1) if point.mask != "full" else 0
        return after + np.tril(everything, -point.window) if point.window else after

    def attention(q, k, v):  # [..., H, S, D]
        queries, keys, values = (x.astype(np.float32, order="C") for x in (q, k, v))
        keys, values = (np.repeat(x, group, axis=-3) for x in (keys, values))
        scores = queries @ keys.swapaxes(-2, -1) * np.float32(point.head_dim**-0.5) + hidden(q.shape[-2])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights @ values / weights.sum(axis=-1, keepdims=True)).astype(q.dtype)

    def packed():
        return np.concatenate([attention(*(x[begin:end].swapaxes(0, 1) for x in (q, k, v))).swapaxes(0, 1)
                               for begin, end in zip(point.starts, point.starts[1:])])

    return _returning(packed if point.ragged is not None else lambda: attention(q, k, v))


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


class Packed(NamedTuple):
    """What takes packed sequences alone gets of any point."""

    tensors: list[Any]  # q, k and v, [T, H, D]
    starts: Any  # int32 [B + 1] on the device
    longest: int
    order: Callable[[Any], Any]  # the result in the shape of q


def _packed(point: Point, q, k, v, device) -> Packed:
    starts, longest = device.integers(point.starts), max(point.lengths)
    if point.ragged is not None:
        return Packed([q, k, v], starts, longest, lambda o: o)
    shape = point.batch, point.length, point.heads, point.head_dim
    return Packed([x.transpose(1, 2).reshape(point.batch * point.length, -1, point.head_dim) for x in (q, k, v)],
                  starts, longest, lambda o: o.reshape(shape).transpose(1, 2))


def _window_size(point: Point) -> tuple[int, int]:
    """(left, right), -1 being unlimited, for those that have no other mask."""
    if point.window:
        return point.window - 1, 0
    return (-1, 0) if point.mask == "causal" else (-1, -1)


def torch_varlen(point: Point, q, k, v, device) -> Contestant:
    """PyTorch's copy of FlashAttention 2 for packed sequences, which also has windows."""
    attention = _import("torch.nn.attention.varlen", "varlen_attn")
    packed, window = _packed(point, q, k, v, device), _window_size(point)
    return _returning(lambda: attention(*packed.tensors, packed.starts, packed.starts, packed.longest, packed.longest,
                                        window_size=window), order=packed.order)


def flash_attn(module: str) -> Maker:
    """FlashAttention 2, 3 and 4 have the same functions, of [B, S, H, D] and of [T, H, D]; some versions return LSE
    beside O."""

    def make(point: Point, q, k, v, device) -> Contestant:
        options: dict[str, Any] = {"causal": point.mask != "full"}
        if point.window:
            options["window_size"] = _window_size(point)
        if point.ragged is None:
            attention = _import(module, "flash_attn_func")
            tensors = [x.transpose(1, 2) for x in (q, k, v)]
        else:
            attention = _import(module, "flash_attn_varlen_func")
            tensors, starts, longest, _ = _packed(point, q, k, v, device)
            options.update(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)

        def order(o):
            o = o[0] if isinstance(o, tuple) else o
            return o.transpose(1, 2) if point.ragged is None else o

        return _returning(lambda: attention(*tensors, **options), order=order)

    return make


def flashinfer(point: Point, q, k, v, device) -> Contestant:
    library, torch = _import("flashinfer"), _import("torch")
    packed = _packed(point, q, k, v, device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=q.device), "NHD")
    options = {"window_left": point.window - 1} if point.window else {}
    wrapper.plan(packed.starts, packed.starts, point.heads, point.heads_kv, point.head_dim,
                 causal=point.mask != "full", q_data_type=q.dtype, **options)
    return _returning(lambda: wrapper.run(*packed.tensors), order=packed.order)


def _import(module: str, attribute: str | None = None):
    """Unavailable where it cannot be had, for whatever reason: it is code of others."""
    try:
        imported = importlib.import_module(module)
        return getattr(imported, attribute) if attribute else imported
    except Exception as error:
        raise Unavailable(f"{module} cannot be imported: {type(error).__name__}: {error}") from None


class Peer(NamedTuple):
    needed: tuple[str, ...]  # module and attribute
    make: Maker
    refuses: Callable[[Point], str | None] = lambda point: None  # why it does not compute this point


def _dense_without_windows(point: Point) -> str | None:
    if point.ragged is not None:
        return "takes dense batches alone"
    return "has no windows" if point.window else None


def _dense_like_sdpa(point: Point) -> str | None:
    return "is sdpa_flash by another name here" if _dense_without_windows(point) is None else None


PEERS: dict[str, dict[str, Peer]] = {
    "cpu": {"numpy": Peer(("numpy",), numpy_plain),
            "torch": Peer(("torch",), torch_cpu, _dense_without_windows)},
    "cuda": {
        "sdpa_flash": Peer(("torch",), sdpa("FLASH_ATTENTION"), _dense_without_windows),
        "sdpa_cudnn": Peer(("torch",), sdpa("CUDNN_ATTENTION"), _dense_without_windows),
        "torch_varlen": Peer(("torch.nn.attention.varlen", "varlen_attn"), torch_varlen, _dense_like_sdpa),
        **{name: Peer((module, "flash_attn_func"), flash_attn(module)) for name, module in (
            ("flash_attn_2", "flash_attn"), ("flash_attn_3", "flash_attn_interface"),
            ("flash_attn_4", "flash_attn.cute"))},
        "flashinfer": Peer(("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"), flashinfer),
    },
}


def _unless_refused(peer: Peer) -> Maker:
    def make(point: Point, q, k, v, device) -> Contestant:
        if reason := peer.refuses(point):
            raise Unavailable(reason)
        return peer.make(point, q, k, v, device)

    return make


def peers(device: str, names: list[str] | None, points: list[Point]) -> tuple[dict[str, Maker], dict[str, str]]:
    """Those that can be imported and compute any of the points, and why the others do not; all of the device, or by
    name."""
    known = PEERS[device]
    makers, missing = {}, {}
    for name in known if names is None else names:
        if name not in known:
            raise ValueError(f"peer {name!r}: on {device} one of {', '.join(known)}")
        peer = known[name]
        try:
            _import(*peer.needed)
        except Unavailable as reason:
            missing[name] = str(reason)
            continue
        reasons = [peer.refuses(point) for point in points]
        if all(reasons):
            missing[name] = "; ".join(dict.fromkeys(reasons))
        else:
            makers[name] = _unless_refused(peer)
    return makers, missing
