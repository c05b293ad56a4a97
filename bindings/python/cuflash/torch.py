"""Attention as PyTorch operators: differentiable, for torch.compile and CUDA graphs.

    from cuflash import torch as cuflash_torch
    o = cuflash_torch.attention(q, k, v, causal=True)

The operators torch.ops.cuflash.attention_forward, attention_backward and decode are made with
torch.library alone: no extension is compiled, and one package serves every PyTorch. CUDA calls are
enqueued on torch's current stream. Under torch.use_deterministic_algorithms(True) results are
bitwise equal from run to run.
"""
from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from . import _problem
from . import _raw as raw
from ._arrays import Arrays
from ._errors import check
from ._handle import handle_of

__all__ = ["attention", "decode"]

_OPTIONS = ("bool causal=False, float? scale=None, int? window_left=None, int? window_right=None, "
            'str align="bottom-right", int? offset=None')
_SCHEMAS = (
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    "attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? lengths=None, int num_splits=0, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
)
# A compiler may not hand over other strides than the program has: the channels must stay contiguous.
_TAGS = (torch.Tag.pt2_compliant_tag,
         getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))

_library = torch.library.Library("cuflash", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=_TAGS)
_attention_forward = torch.ops.cuflash.attention_forward.default
_attention_backward = torch.ops.cuflash.attention_backward.default
_decode = torch.ops.cuflash.decode.default


# ---- what a user calls --------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
              window: tuple[int | None, int | None] | None = None, align: str | int = "bottom-right",
              return_lse: bool = False, layout: str = "bhsd") -> Any:
    """As cuflash.attention(), on tensors of one device, with gradients for q, k and v.

    q: [B, Hq, S, D]; k, v: [B, Hkv, Sk, D]; with layout="bshd" [B, S, H, D]; float32, float16 or
    bfloat16, any strides with contiguous channels. The result lies in memory in q's order of
    dimensions. return_lse: (o, lse), lse float32 [B, Hq, S]; no gradient flows through lse."""
    if layout != "bhsd":
        _problem.check_layout(layout)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    arguments = (q, k, v, *_arguments(causal, scale, window, align))
    if _is_compiling():
        o, lse = _attention_forward(*arguments)
    elif _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o, lse = _Attention.apply(*arguments)
    else:
        with _BelowAutograd():
            o, lse = _attention_forward(*arguments)
    if layout != "bhsd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, lengths: Tensor | None = None,
           causal: bool = False, scale: float | None = None,
           window: tuple[int | None, int | None] | None = None, align: str | int = "bottom-right",
           num_splits: int = 0, return_lse: bool = False, layout: str = "bhsd") -> Any:
    """As cuflash.decode(): q [B, Hq, S, D] over caches [entries, Hkv, max_len, D], lengths int32 [B]
    on the same device. It has no gradients."""
    if layout != "bhsd":
        _problem.check_layout(layout)
        q, k_cache, v_cache = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    arguments = (q, k_cache, v_cache, lengths, num_splits, *_arguments(causal, scale, window, align))
    if _is_compiling() or _is_grad_enabled():
        o, lse = _decode(*arguments)  # and a gradient is refused
    else:
        with _BelowAutograd():
            o, lse = _decode(*arguments)
    if layout != "bhsd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _arguments(causal: bool, scale: float | None, window: tuple | None, align: str | int) -> tuple:
    """The options as the schemas have them; the fewer, the faster the call."""
    if scale is None and window is None and align == "bottom-right":
        return (causal,) if causal else ()
    left, right = (None, None) if window is None else window
    if isinstance(align, str):
        return causal, scale, left, right, align
    return causal, scale, left, right, "bottom-right", align


_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled

# torch.library's own way to autograd costs 5 us of a call without gradients and 50 of one with them.
# Outside torch.compile attention() goes around it: below autograd, or by a torch.autograd.Function.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with _BelowAutograd():
            output = _attention_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, d_o, d_lse):
        return _differentiate(ctx, d_o, d_lse)


# ---- the kernels --------------------------------------------------------------------------------------
#
# A call with the shapes, strides and options of an earlier one takes that one's structs and sets only
# the addresses, which keeps Python's part of a call to some microseconds. The structs belong to a
# thread: autograd calls from threads of its own.


class _Plans(threading.local):
    LIMIT = 256  # a thread that sees more kinds of calls starts over

    def __init__(self) -> None:
        self._plans: dict[tuple, tuple] = {}
        self.get = self._plans.get

    def add(self, key: tuple, plan: tuple) -> tuple:
        if len(self._plans) >= self.LIMIT:
            self._plans.clear()
        self._plans[key] = plan
        return plan


_plans = _Plans()

_forward_call = raw.cuflash_attention_forward
_backward_call = raw.cuflash_attention_backward
_decode_call = raw.cuflash_attention_decode
_is_deterministic = torch.are_deterministic_algorithms_enabled
_empty_like = torch.empty_like

try:
    from torch._C import _cuda_getCurrentRawStream as _current_stream
except ImportError:  # a PyTorch without CUDA has no CUDA tensors either
    _current_stream = None  # type: ignore[assignment]


def _views(**tensors: Tensor | None) -> list:
    """Views for a plan; here the shapes are checked, and that the devices agree."""
    with torch.no_grad():
        arrays = Arrays(0, False, **tensors)
    return [arrays.get(name) if name in ("lse", "lengths") else _problem.heads_first(arrays[name], "bhsd")
            for name in tensors]


def _fields(batch: int, causal, scale, window_left, window_right, align, offset) -> dict[str, Any]:
    window = None if window_left is None and window_right is None else (window_left, window_right)
    return _problem.options(causal, scale, window, align if offset is None else offset, None,
                            _is_deterministic(), False, batch)


def _like(tensor: Tensor) -> Tensor:
    """In the tensor's order of dimensions, dense, with contiguous channels."""
    result = _empty_like(tensor)
    return result if result.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def _maker_of(tensor: Tensor) -> Any:
    """_like() for tensors of these strides, without asking each time which way it goes."""
    return _empty_like if _empty_like(tensor).stride(-1) == 1 else _like


def _row_stats(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _model_of(lse: Tensor) -> Tensor:
    """Of its shape but with memory for one element only. empty_like() of it takes a quarter of the time
    of empty(), which parses shape, dtype and device."""
    return lse.new_empty(1).expand(lse.shape)


def _run_forward(q, k, v, causal=False, scale=None, window_left=None, window_right=None,
                 align="bottom-right", offset=None):
    device = q.get_device()
    key = ("forward", q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, device,
           k.get_device(), v.get_device(), causal, scale, window_left, window_right, align, offset,
           _is_deterministic())
    plan = _plans.get(key)
    if plan is None:
        lse = _row_stats(q)
        problem = _problem.attention(*_views(q=q, k=k, v=v, o=_like(q), lse=lse), "bhsd", **_fields(
            q.shape[0], causal, scale, window_left, window_right, align, offset))
        plan = _plans.add(key, (handle_of(device), problem, problem.q, problem.k, problem.v, problem.o,
                                _maker_of(q), _model_of(lse)))
    handle, problem, q_struct, k_struct, v_struct, o_struct, like, lse = plan
    o, lse = like(q), _empty_like(lse)
    q_struct.data, k_struct.data, v_struct.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
    o_struct.data, problem.lse = o.data_ptr(), lse.data_ptr()
    status = _forward_call(handle, problem, None if device < 0 else _current_stream(device))
    if status:
        check(status)
    return o, lse


def _run_backward(d_o, q, k, v, o, lse, causal=False, scale=None, window_left=None, window_right=None,
                  align="bottom-right", offset=None):
    # Autograd chooses the layout of d_o: a sum's gradient repeats one element in all dimensions.
    if d_o.stride(-1) != 1:
        d_o = d_o.contiguous()
    dq, dk, dv = _like(q), _like(k), _like(v)
    device = q.get_device()
    key = ("backward", d_o.shape, d_o.stride(), q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
           o.shape, o.stride(), lse.shape, lse.stride(), d_o.dtype, q.dtype, k.dtype, v.dtype, o.dtype, lse.dtype, device,
           d_o.get_device(), k.get_device(), v.get_device(), o.get_device(), lse.get_device(), causal, scale,
           window_left, window_right, align, offset, _is_deterministic())
    plan = _plans.get(key)
    if plan is None:
        q_view, k_view, v_view, o_view, lse_view, *others = _views(
            q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv)
        problem = _problem.attention(q_view, k_view, v_view, o_view, lse_view, "bhsd", **_fields(
            q.shape[0], causal, scale, window_left, window_right, align, offset))
        gradients = _problem.gradients(q_view, k_view, *others, "bhsd")
        plan = _plans.add(key, (handle_of(device), problem, gradients))
    handle, problem, gradients = plan
    problem.q.data, problem.k.data, problem.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
    problem.o.data, problem.lse = o.data_ptr(), lse.data_ptr()
    gradients.d_o.data, gradients.dq.data = d_o.data_ptr(), dq.data_ptr()
    gradients.dk.data, gradients.dv.data = dk.data_ptr(), dv.data_ptr()
    check(_backward_call(handle, problem, gradients, None if device < 0 else _current_stream(device)))
    return dq, dk, dv


def _run_decode(q, k_cache, v_cache, lengths=None, num_splits=0, causal=False, scale=None, window_left=None,
                window_right=None, align="bottom-right", offset=None):
    device = q.get_device()
    given = None if lengths is None else (lengths.shape, lengths.stride(), lengths.dtype, lengths.get_device())
    key = ("decode", q.shape, q.stride(), k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride(), q.dtype,
           k_cache.dtype, v_cache.dtype, device, k_cache.get_device(), v_cache.get_device(), given, num_splits,
           causal, scale, window_left, window_right, align, offset, _is_deterministic())
    plan = _plans.get(key)
    if plan is None:
        lse = _row_stats(q)
        views = _views(q=q, k_cache=k_cache, v_cache=v_cache, o=_like(q), lse=lse, lengths=lengths)
        problem, cache = _problem.decode(*views, "bhsd", num_splits=num_splits, **_fields(
            q.shape[0], causal, scale, window_left, window_right, align, offset))
        plan = _plans.add(key, (handle_of(device), problem, cache, problem.q, problem.o, cache.k, cache.v,
                                _maker_of(q), _model_of(lse)))
    handle, problem, cache, q_struct, o_struct, k_struct, v_struct, like, lse = plan
    o, lse = like(q), _empty_like(lse)
    q_struct.data, k_struct.data, v_struct.data = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
    o_struct.data, problem.lse = o.data_ptr(), lse.data_ptr()
    if lengths is not None:
        cache.lengths = lengths.data_ptr()
    status = _decode_call(handle, problem, cache, None if device < 0 else _current_stream(device))
    if status:
        check(status)
    return o, lse


# ---- what torch.compile and autograd ask ----------------------------------------------------------------


def _fake_forward(q, k, v, *_):
    torch._check(q.dim() == 4, lambda: f"q: {q.dim()} dimensions; 4: [B, H, S, D]")
    return _like(q), _row_stats(q)


def _fake_backward(d_o, q, k, v, *_):
    return _like(q), _like(k), _like(v)


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, d_o, _):
    arguments = (d_o, *ctx.saved_tensors, *ctx.options)
    if torch.is_grad_enabled():  # create_graph=True; the second derivative is refused
        gradients = _attention_backward(*arguments)
    else:
        with _BelowAutograd():
            gradients = _attention_backward(*arguments)
    return (*gradients, *[None] * len(ctx.options))


def _has_no_gradient(operator: str):
    """Without a formula the gradient would be left out with no more than a warning."""

    def refuse(ctx, *_):
        raise NotImplementedError(f"cuflash::{operator} has no gradient")

    return refuse


for _name, _kernel, _fake, _backward, _setup in (
    ("attention_forward", _run_forward, _fake_forward, _differentiate, _save_for_backward),
    ("attention_backward", _run_backward, _fake_backward, _has_no_gradient("attention_backward"), None),
    ("decode", _run_decode, _fake_forward, _has_no_gradient("decode"), None),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"cuflash::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"cuflash::{_name}", _backward, setup_context=_setup, lib=_library)
