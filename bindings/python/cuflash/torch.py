"""Attention as PyTorch operators: differentiable, for torch.compile and CUDA graphs.

    from cuflash import torch as cuflash_torch
    o = cuflash_torch.attention(q, k, v, causal=True)

The operators torch.ops.cuflash.attention_forward, attention_backward and decode, the first two with the prefix
general_ for all options, and cache_decode and cache_append for caches, are made with torch.library alone: no
extension is compiled, and one package serves every PyTorch. CUDA calls are enqueued on torch's current stream. Under
torch.use_deterministic_algorithms(True) results are bitwise equal from run to run.
"""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _attention as _arrays_layer
from . import _problem
from . import _raw as raw
from ._arrays import Arrays, View, refuse
from ._cache import KVCache, PagedKVCache
from ._errors import check, integer
from ._handle import handle_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["append", "attention", "attention_varlen", "decode"]

_OPTIONS = ("bool causal=False, float? scale=None, int? window_left=None, int? window_right=None, "
            'str align="bottom-right", int? offset=None')
# First those with gradients, then the slopes, whose gradient is refused, then integers.
_TENSOR_OPTIONS = ("bias", "sinks", "alibi_slopes", "dropout_seed", "cu_seqlens_q", "cu_seqlens_k", "seqused_q",
                   "seqused_k", "leftpad_k", "tree_mask")
_MODES = "SymInt? tree_mask_len=None, bool batch_invariant=False, int sm_margin=0"
_GENERAL_OPTIONS = (", ".join(f"Tensor? {name}=None" for name in _TENSOR_OPTIONS)
                    + ", SymInt max_len_q=0, SymInt max_len_k=0, float softcap=0.0, float dropout_p=0.0, "
                    + f"{_MODES}, {_OPTIONS}")
_CACHE_TENSORS = ("lengths", "batch_idx", "block_table", "indptr", "indices", "k_scale", "v_scale", "k_zero", "v_zero")
_CACHE = (", ".join(f"Tensor? {name}=None" for name in _CACHE_TENSORS)
          + ', str? k_dtype=None, str? v_dtype=None, SymInt? head_dim_v=None, SymInt? max_len=None, '
          'str cache_layout="bhsd"')
_SCHEMAS = (
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    "attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? lengths=None, int num_splits=0, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    f"general_attention_forward(Tensor q, Tensor k, Tensor v, {_GENERAL_OPTIONS}) -> (Tensor, Tensor)",
    "general_attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool with_d_bias, "
    f"bool with_d_sinks, {_GENERAL_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"cache_decode(Tensor q, Tensor k_cache, Tensor? v_cache=None, {_CACHE}, Tensor? alibi_slopes=None, "
    f"Tensor? bias=None, Tensor? sinks=None, Tensor? tree_mask=None, {_MODES}, float softcap=0.0, int num_splits=0, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    # Without q it is q_out itself that is normed and rotated.
    "cache_append(Tensor k, Tensor? v, Tensor? q, Tensor(a!)? q_out, Tensor(b!) k_cache, Tensor(c!)? v_cache, "
    f"{_CACHE}, Tensor? positions=None, Tensor? slot_mapping=None, Tensor? cos=None, Tensor? sin=None, "
    "Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, bool interleaved=False, float norm_epsilon=0.0) -> ()",
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
_general_forward = torch.ops.cuflash.general_attention_forward.default
_general_backward = torch.ops.cuflash.general_attention_backward.default
_cache_decode = torch.ops.cuflash.cache_decode.default
_cache_append = torch.ops.cuflash.cache_append.default
_GENERAL_NAMES = [argument.name for argument in _general_forward._schema.arguments][3:]


# ---- what a user calls --------------------------------------------------------------------------------


class Options(TypedDict, total=False):
    """Beside those of every call; cuflash.attention() documents them. With any of them Python's part of a
    call is about 140 us, not 15."""

    softcap: float
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    tree_mask: Tensor | None
    tree_mask_len: int | None
    batch_invariant: bool
    sm_margin: int


class DecodeOptions(TypedDict, total=False):
    """Likewise of decode()."""

    softcap: float
    alibi_slopes: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    tree_mask: Tensor | None
    tree_mask_len: int | None
    batch_invariant: bool
    sm_margin: int


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
              window: tuple[int | None, int | None] | None = None, align: str | int = "bottom-right",
              return_lse: bool = False, layout: str = "bhsd", **options: Unpack[Options]) -> Any:
    """As cuflash.attention(), on tensors of one device, with gradients for q, k, v, bias and sinks.

    q: [B, Hq, S, D]; k: [B, Hkv, Sk, D], v: [B, Hkv, Sk, Dv]; with layout="bshd" [B, S, H, D]; float32,
    float16 or bfloat16, any strides with contiguous channels. The result lies in memory in q's order of
    dimensions. return_lse: (o, lse), lse float32 [B, Hq, S]; no gradient flows through lse.

    dropout_seed: an integer of 64 bits, or an int64 tensor of one element on the device; None draws one from
    torch's generator. Of rows that are not in use (seqused_q, seqused_k, leftpad_k) results and
    gradients are 0."""
    if layout != "bhsd":
        _problem.check_layout(layout)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    arguments = (q, k, v, *_arguments(causal, scale, window, align))
    if options:
        o, lse = _general_forward(q, k, v, **_general(q, causal, scale, window, align, **options))
    elif _is_compiling():
        o, lse = _attention_forward(*arguments)
    elif _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o, lse = _Attention.apply(*arguments)
    else:
        o, lse = _forward_below_autograd(*arguments)
    if layout != "bhsd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_len_q: int,
                     max_len_k: int, causal: bool = False, scale: float | None = None,
                     window: tuple[int | None, int | None] | None = None, align: str | int = "bottom-right",
                     return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """attention() of sequences packed one after the other, as cuflash.attention_varlen().

    q: [total_q, Hq, D]; k: [total_k, Hkv, D]; v: [total_k, Hkv, Dv]; cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on
    the same device; lse [Hq, total_q]. Results and gradients of rows of no sequence are 0."""
    o, lse = _general_forward(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_len_q=max_len_q,
                              max_len_k=max_len_k, **_general(q, causal, scale, window, align, **options))
    return (o, lse) if return_lse else o


def decode(q: Tensor, k_cache: Tensor | KVCache, v_cache: Tensor | None = None, *, lengths: Tensor | None = None,
           causal: bool = False, scale: float | None = None, window: tuple[int | None, int | None] | None = None,
           align: str | int = "bottom-right", num_splits: int = 0, return_lse: bool = False, layout: str = "bhsd",
           **options: Unpack[DecodeOptions]) -> Any:
    """As cuflash.decode(): q [B, Hq, S, D] over caches [entries, Hkv, max_len, D], lengths int32 [B] on the same
    device, or over a cuflash.KVCache or PagedKVCache of tensors. It has no gradients."""
    arguments = _arguments(causal, scale, window, align)
    if layout != "bhsd":
        _problem.check_layout(layout)
        q = q.transpose(1, 2)
    if options or v_cache is None or isinstance(k_cache, KVCache):
        cache = _arrays_layer.cache_of(k_cache, v_cache, lengths, layout)
        o, lse = _cache_decode(q, *_tensors_of(cache), **options, num_splits=num_splits,
                               **dict(zip(_MASK_DEFAULTS, arguments)))
    else:
        if layout != "bhsd":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        if not _is_compiling() and _dispatch_would_only_call(q, k_cache, v_cache, lengths):
            o, lse = _run_decode(q, k_cache, v_cache, lengths, num_splits, *arguments)
        elif _is_compiling() or _is_grad_enabled():
            o, lse = _decode(q, k_cache, v_cache, lengths, num_splits, *arguments)  # and a gradient is refused
        else:
            with _BelowAutograd():
                o, lse = _decode(q, k_cache, v_cache, lengths, num_splits, *arguments)
    if layout != "bhsd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def append(cache: KVCache, k: Tensor, v: Tensor | None = None, *, q: Tensor | None = None, q_out: Tensor | None = None,
           positions: Tensor | None = None, slot_mapping: Tensor | None = None, cos: Tensor | None = None,
           sin: Tensor | None = None, interleaved: bool = False, q_norm_weight: Tensor | None = None,
           k_norm_weight: Tensor | None = None, norm_epsilon: float = 0.0, layout: str = "bhsd") -> Tensor | None:
    """As cache.append(), on tensors, for torch.compile too. It has no gradients."""
    if q is None and q_out is not None:  # to the operator that is q in place
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, "q_out: given without q")
    in_place = q_out is q
    if layout != "bhsd":
        _problem.check_layout(layout)
        k, v, q, q_out = (None if x is None else x.transpose(1, 2) for x in (k, v, q, q_out))
    if q is not None and q_out is None:
        q_out = _empty_like(q)
    _cache_append(k, v, None if in_place else q, q_out, *_tensors_of(cache), positions=positions,
                  slot_mapping=slot_mapping, cos=cos, sin=sin, q_norm_weight=q_norm_weight,
                  k_norm_weight=k_norm_weight, interleaved=interleaved, norm_epsilon=norm_epsilon)
    return q_out if q_out is None or layout == "bhsd" else q_out.transpose(1, 2)


def _tensors_of(cache: KVCache) -> tuple:
    """A cache as the schemas have it."""
    paged = (None, None, None, None)
    if isinstance(cache, PagedKVCache):
        if cache.block_table is None and cache.indptr is None:  # without either the operators see entries, not pages
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, "block_table, or indptr and indices: none of them")
        paged = (cache.block_table, cache.indptr, cache.indices, cache.max_len)
    return (cache.k, cache.v, cache.lengths, cache.batch_idx, *paged[:3], cache.k_scale, cache.v_scale, cache.k_zero,
            cache.v_zero, cache.k_dtype, cache.v_dtype, cache.head_dim_v, paged[3], cache.layout)


_MASK_DEFAULTS = {"causal": False, "scale": None, "window_left": None, "window_right": None, "align": "bottom-right",
                  "offset": None}  # in the order of _arguments()


def _arguments(causal: bool, scale: float | None, window: tuple | None, align: str | int) -> tuple:
    """The options as the schemas have them; the fewer, the faster the call."""
    if scale is None and window is None and align == "bottom-right":
        return (causal,) if causal else ()
    left, right = (None, None) if window is None else window
    if isinstance(align, str):
        return causal, scale, left, right, align
    return causal, scale, left, right, "bottom-right", align


def _general(q: Tensor, causal: bool, scale: float | None, window: tuple | None, align: str | int, *,
             softcap: float = 0.0, alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
             sinks: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None,
             seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
             leftpad_k: Tensor | None = None, tree_mask: Tensor | None = None, tree_mask_len: int | None = None,
             batch_invariant: bool = False, sm_margin: int = 0) -> dict[str, Any]:
    """The options of a general operator, by the names in its schema."""
    if dropout_p == 0:
        dropout_seed = None
    elif dropout_seed is None:  # drawn on the device: nothing waits, and graphs and compilers take it
        dropout_seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    elif isinstance(dropout_seed, int):
        integer("dropout_seed", dropout_seed)
        dropout_seed = torch.full((1,), dropout_seed, dtype=torch.int64, device=q.device)
    left, right = (None, None) if window is None else window
    offset = None if isinstance(align, str) else align
    return {"bias": bias, "sinks": sinks, "alibi_slopes": alibi_slopes, "dropout_seed": dropout_seed,
            "seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_k": leftpad_k, "tree_mask": tree_mask,
            "tree_mask_len": tree_mask_len, "batch_invariant": batch_invariant, "sm_margin": sm_margin,
            "softcap": softcap, "dropout_p": dropout_p, "causal": causal, "scale": scale, "window_left": left,
            "window_right": right,
            "align": align if offset is None else "bottom-right", "offset": offset}


_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled

# torch.library's own way to autograd costs 5 us of a call without gradients and 50 of one with them.
# Outside torch.compile attention() goes around it: below autograd, or by a torch.autograd.Function.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


# And the dispatcher itself costs 3 to 4 us, even where all it does is to call the kernel below.
_functions_overridden = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_profiling = torch._C._autograd._profiler_enabled
_tracing_state = torch._C._get_tracing_state


def _dispatch_would_only_call(q, k, v, lengths=None) -> bool:
    """Whether nothing sees a call but the kernel: tensors of torch's own class on one kind of device, without
    gradients, and no mode, transform, profiler or tracer."""
    return (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and (lengths is None or type(lengths) is Tensor)
            and (q.is_cuda and k.is_cuda and v.is_cuda or q.is_cpu and k.is_cpu and v.is_cpu)
            and not (q.requires_grad or k.requires_grad or v.requires_grad)
            and not (q.is_neg() or k.is_neg() or v.is_neg())
            and not _functions_overridden() and not _dispatch_modes() and _transforms() is None
            and not _is_profiling() and _tracing_state() is None and forward_ad._current_level < 0)


def _forward_below_autograd(*arguments):
    if _dispatch_would_only_call(*arguments[:3]):
        return _run_forward(*arguments)
    if any(forward_ad.unpack_dual(x).tangent is not None for x in arguments[:3]):
        raise NotImplementedError("cuflash::attention_forward has no forward-mode gradient")
    with _BelowAutograd():
        return _attention_forward(*arguments)


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
_append_call = raw.cuflash_kv_cache_append
_is_deterministic = torch.are_deterministic_algorithms_enabled
_empty_like = torch.empty_like

try:
    from torch._C import _cuda_getCurrentRawStream as _current_stream
except ImportError:  # a PyTorch without CUDA has no CUDA tensors either
    _current_stream = None  # type: ignore[assignment]


def _views(**tensors: Tensor) -> list:
    """Views for a plan; here the shapes are checked, and that the devices agree."""
    with torch.no_grad():
        arrays = Arrays(0, False, **tensors)
    return [arrays[name] if name == "lse" else _problem.heads_first(arrays[name], "bhsd")
            for name in tensors]


def _masked_by(causal, scale, window_left, window_right, align, offset) -> _problem.Options:
    """The options of the schemas as those of calls on arrays."""
    window = None if window_left is None and window_right is None else (window_left, window_right)
    return {"causal": causal, "scale": scale, "window": window, "align": align if offset is None else offset,
            "deterministic": _is_deterministic()}


def _fields(q: View, k: View, *options) -> dict[str, Any]:
    extents = _problem.extents(q, k)
    return {"extents": extents, **_problem.options(extents, **_masked_by(*options))}


def _like(tensor: Tensor) -> Tensor:
    """In the tensor's order of dimensions, dense, with contiguous channels."""
    result = _empty_like(tensor)
    return result if result.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def _result_like(q: Tensor, channels: int) -> Tensor:
    """_like(q) with so many channels."""
    return _like(q if q.shape[-1] == channels else q[..., :1].expand(*q.shape[:-1], channels))


def _maker_of(q: Tensor, channels: int) -> Any:
    """_result_like() for tensors of these strides, without asking each time which way it goes."""
    if q.shape[-1] != channels:
        return lambda q: _result_like(q, channels)
    return _empty_like if _empty_like(q).stride(-1) == 1 else _like


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
        views = _views(q=q, k=k, v=v, o=_result_like(q, v.shape[-1]), lse=lse)
        problem = _problem.attention(*views, "bhsd", **_fields(
            *views[:2], causal, scale, window_left, window_right, align, offset))
        plan = _plans.add(key, (handle_of(device), problem, problem.q, problem.k, problem.v, problem.o,
                                _maker_of(q, v.shape[-1]), _model_of(lse)))
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
        views = (q_view, k_view, v_view, o_view, lse_view, "bhsd")
        problem = _problem.attention(*views, **_fields(
            q_view, k_view, causal, scale, window_left, window_right, align, offset))
        gradients = _problem.gradients(*views, *others)
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
        o, model = _result_like(q, v_cache.shape[-1]), KVCache(k_cache, v_cache, lengths=lengths)
        with torch.no_grad():
            arrays = Arrays(0, False, q=q, o=o, lse=lse, **model.arrays())
        q_view, o_view = (_problem.heads_first(arrays[name], "bhsd") for name in ("q", "o"))
        batch, heads, len_q, head_dim = q_view.shape
        stored = model.read(arrays, batch, heads, head_dim)
        extents = _problem.Extents(batch, heads, stored.heads_kv, len_q, stored.max_len)
        cache = stored.struct
        problem = _problem.decode(q_view, o_view, arrays["lse"], "bhsd", extents, stored.head_dim_v,
                                  num_splits=num_splits, **_problem.options(extents, **_masked_by(
                                      causal, scale, window_left, window_right, align, offset)))
        plan = _plans.add(key, (handle_of(device), problem, cache, problem.q, problem.o, cache.k, cache.v,
                                _maker_of(q, v_cache.shape[-1]), _model_of(lse)))
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


# A call over a cache takes structs that the layer for arrays has built, by their names. Of each tensor a plan
# holds the struct and the field that its address goes to.

_FIELDS = {"q": ("q", "data"), "o": ("o", "data"), "k": ("k", "data"), "v": ("v", "data"), "q_out": ("q_out", "data"),
           "k_cache": ("k", "data"), "v_cache": ("v", "data"), "batch_idx": ("", "cache_batch_idx"),
           "indptr": ("", "page_indptr"), "indices": ("", "page_indices")}
_OF_CACHE = {"k_cache", "v_cache", *_CACHE_TENSORS}
_CACHE_DECODE_NAMES = [argument.name for argument in _cache_decode._schema.arguments]
_CACHE_APPEND_NAMES = [argument.name for argument in _cache_append._schema.arguments]


def _key(operation: str, arguments: tuple) -> tuple:
    return (operation, _is_deterministic(), *[
        (x.shape, x.stride(), x.dtype, x.get_device()) if isinstance(x, Tensor) else x for x in arguments])


def _addresses(tensors: dict[str, Tensor], of_call, of_cache) -> list[tuple[str, Any, str]]:
    """(name, struct, field) of the tensors that are in the structs of a call and of its cache."""
    result = []
    for name in tensors:
        within, field = _FIELDS.get(name, ("", name))
        struct = of_cache if name in _OF_CACHE else of_call
        struct = getattr(struct, within) if within else struct
        if getattr(struct, field):
            result.append((name, struct, field))
    return result


def _cache_from(named: dict[str, Any]) -> KVCache:
    """The cache of a call, whose arguments leave the dictionary."""
    taken = {name: named.pop(name) for name in (
        *_CACHE_TENSORS, "k_dtype", "v_dtype", "head_dim_v", "max_len", "cache_layout") if name in named}
    taken["layout"] = taken.pop("cache_layout", "bhsd")
    of_pages = {name: taken.pop(name, None) for name in ("block_table", "indptr", "indices", "max_len")}
    k, v = named.pop("k_cache"), named.pop("v_cache", None)
    if all(value is None for value in of_pages.values()):
        return KVCache(k, v, **taken)
    if taken.pop("batch_idx", None) is not None:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, "batch_idx: of a cache in pages, whose table tells")
    return PagedKVCache(k, v, **of_pages, **taken)


def _run_cache_decode(*arguments):
    named = {name: x for name, x in zip(_CACHE_DECODE_NAMES, arguments) if x is not None}
    q = named["q"]
    key = _key("cache_decode", arguments)
    plan = _plans.get(key)
    if plan is None:
        channels = _value_channels(*arguments)
        tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        results = tensors["o"], tensors["lse"] = _result_like(q, channels), _row_stats(q)
        options = dict(named)
        mask = {name: options.pop(name, default) for name, default in _MASK_DEFAULTS.items()}
        cache = _cache_from(options)
        with torch.no_grad():
            call = _arrays_layer.decode_call(options.pop("q"), cache, out=results[0], lse=results[1], stream=0,
                                             **options, **_masked_by(**mask))
        plan = _plans.add(key, (call.handle, *call.structs, _addresses(tensors, *call.structs), _maker_of(q, channels),
                                _model_of(results[1])))
    handle, problem, cache, addresses, like, lse = plan
    named["o"], named["lse"] = o, lse = like(q), _empty_like(lse)
    for name, struct, field in addresses:
        setattr(struct, field, named[name].data_ptr())
    device = q.get_device()
    check(_decode_call(handle, problem, cache, None if device < 0 else _current_stream(device)))
    return o, lse


def _run_cache_append(*arguments):
    named = {name: x for name, x in zip(_CACHE_APPEND_NAMES, arguments) if x is not None}
    if "q_out" in named:
        named.setdefault("q", named["q_out"])
    key = _key("cache_append", arguments)
    plan = _plans.get(key)
    if plan is None:
        tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        options = dict(named)
        cache = _cache_from(options)
        with torch.no_grad():
            call = _arrays_layer.append(cache, **options, stream=0)
        cache_struct, struct = call.structs
        plan = _plans.add(key, (call.handle, cache_struct, struct, _addresses(tensors, struct, cache_struct)))
    handle, cache_struct, struct, addresses = plan
    for name, of, field in addresses:
        setattr(of, field, named[name].data_ptr())
    device = named["k"].get_device()
    check(_append_call(handle, cache_struct, struct, None if device < 0 else _current_stream(device)))


def _value_channels(q, k_cache, v_cache=None, *further) -> int:
    """Of the result of a call over a cache."""
    named = dict(zip(_CACHE_DECODE_NAMES[3:], further))
    if named.get("head_dim_v") is not None:
        return named["head_dim_v"]
    if v_cache is None:
        return q.shape[-1]
    return v_cache.shape[-1] * (2 if named.get("v_dtype") == "int4" else 1)


# The general operators build their structs anew in each call, by the layer for arrays.


def _by_name(options: tuple) -> tuple[bool, dict[str, Any]]:
    """Whether rows may be left out, and the options as those of calls on arrays, without tensors not given."""
    named = dict(zip(_GENERAL_NAMES, options))
    mask = {name: named.pop(name, default) for name, default in _MASK_DEFAULTS.items()}
    given = {name: value for name, value in named.items() if value is not None}
    if "cu_seqlens_q" not in given:
        for name in ("max_len_q", "max_len_k"):
            given.pop(name, None)
    ragged = any(name in given for name in ("cu_seqlens_q", "seqused_q", "seqused_k", "leftpad_k"))
    return ragged, {**given, **_masked_by(**mask)}


def _call(ragged: bool, results: tuple[Tensor, ...], operation, *arguments, **options) -> None:
    """With gradients off, so that the layer for arrays takes the tensors. It leaves rows of no sequence as they
    are; here those are 0, or what lies there would reach the gradients of weights."""
    with torch.no_grad():
        if ragged:
            for result in results:
                result.zero_()
        operation(*arguments, **options)


def _new_results(q, k, v, *options):
    """o and lse of a general operator, also for compilers."""
    packed = dict(zip(_GENERAL_NAMES, options)).get("cu_seqlens_q") is not None
    rank, letters = (3, "T, H, D") if packed else (4, "B, H, S, D")
    torch._check_value(q.dim() == rank, lambda: f"q: {q.dim()} dimensions; {rank}: [{letters}]")
    shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
    return _result_like(q, v.shape[-1]), q.new_empty(shape, dtype=torch.float32)


def _new_gradients(d_o, q, k, v, o, lse, with_d_bias, with_d_sinks, *options):
    """dq, dk, dv, d_bias and d_sinks, also for compilers; the last two empty where they are not asked for."""
    bias, sinks = (dict(zip(_GENERAL_NAMES, options)).get(name) for name in ("bias", "sinks"))
    return (_like(q), _like(k), _like(v), bias.new_empty(bias.shape) if with_d_bias else q.new_empty(0),
            sinks.new_empty(sinks.shape) if with_d_sinks else q.new_empty(0))


def _run_general_forward(q, k, v, *options):
    ragged, named = _by_name(options)
    o, lse = results = _new_results(q, k, v, *options)
    operation = _arrays_layer.attention_varlen if "cu_seqlens_q" in named else _arrays_layer.attention
    _call(ragged, results, operation, q, k, v, **named, out=o, lse=lse)
    return results


def _run_general_backward(d_o, q, k, v, o, lse, with_d_bias, with_d_sinks, *options):
    ragged, named = _by_name(options)
    if d_o.stride(-1) != 1:
        d_o = d_o.contiguous()
    if with_d_bias:
        named["bias"] = named["bias"].contiguous()
    results = _new_gradients(d_o, q, k, v, o, lse, with_d_bias, with_d_sinks, *options)
    dq, dk, dv, d_bias, d_sinks = results
    operation = (_arrays_layer.attention_varlen_backward if "cu_seqlens_q" in named
                 else _arrays_layer.attention_backward)
    _call(ragged, results, operation, d_o, q, k, v, o, lse, **named, return_d_bias=with_d_bias,
          return_d_sinks=with_d_sinks, out=(dq, dk, dv, *[d_bias] * with_d_bias, *[d_sinks] * with_d_sinks))
    return results


# ---- what torch.compile and autograd ask ----------------------------------------------------------------


def _fake_forward(q, k, v, *_):
    torch._check(q.dim() == 4, lambda: f"q: {q.dim()} dimensions; 4: [B, H, S, D]")
    return _result_like(q, v.shape[-1]), _row_stats(q)


def _fake_cache_decode(q, k_cache, v_cache=None, *further):
    torch._check(q.dim() == 4, lambda: f"q: {q.dim()} dimensions; 4: [B, H, S, D]")
    return _result_like(q, _value_channels(q, k_cache, v_cache, *further)), _row_stats(q)


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


def _save_general(ctx, inputs, output) -> None:
    q, k, v, *options = inputs
    split = len(_TENSOR_OPTIONS)
    ctx.save_for_backward(q, k, v, *output, *options[:split])
    ctx.options = options[split:]
    ctx.mark_non_differentiable(output[1])


def _differentiate_general(ctx, d_o, _):
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    # It ends with the last argument that the call had.
    with_d_bias, with_d_sinks, with_d_slopes = (*ctx.needs_input_grad[3:6], False, False, False)[:3]
    if with_d_slopes:
        raise NotImplementedError("alibi_slopes: they have no gradient")
    dq, dk, dv, d_bias, d_sinks = _general_backward(d_o, q, k, v, o, lse, with_d_bias, with_d_sinks, *tensors,
                                                    *ctx.options)
    return (dq, dk, dv, d_bias if with_d_bias else None, d_sinks if with_d_sinks else None,
            *[None] * (len(_GENERAL_NAMES) - 2))


def _has_no_gradient(operator: str):
    """Without a formula the gradient would be left out with no more than a warning."""

    def refuse(ctx, *_):
        raise NotImplementedError(f"cuflash::{operator} has no gradient")

    return refuse


for _name, _kernel, _fake, _backward, _setup in (
    ("attention_forward", _run_forward, _fake_forward, _differentiate, _save_for_backward),
    ("attention_backward", _run_backward, _fake_backward, _has_no_gradient("attention_backward"), None),
    ("decode", _run_decode, _fake_forward, _has_no_gradient("decode"), None),
    ("cache_decode", _run_cache_decode, _fake_cache_decode, _has_no_gradient("cache_decode"), None),
    ("cache_append", _run_cache_append, lambda *_: None, None, None),
    ("general_attention_forward", _run_general_forward, _new_results, _differentiate_general, _save_general),
    ("general_attention_backward", _run_general_backward, _new_gradients,
     _has_no_gradient("general_attention_backward"), None),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)
    torch.library.register_fake(f"cuflash::{_name}", _fake, lib=_library)
    if _backward is not None:  # what changes its arguments cannot have one
        torch.library.register_autograd(f"cuflash::{_name}", _backward, setup_context=_setup, lib=_library)
