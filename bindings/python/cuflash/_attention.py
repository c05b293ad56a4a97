"""The operations on arrays."""
from __future__ import annotations

import ctypes
import json
from typing import Any, Callable, Sequence

from . import _problem, _raw as raw
from ._arrays import Array, Arrays, refuse
from ._errors import check, integer
from ._handle import Handle, handle_of
from ._library import Struct
from ._problem import heads_first, in_layout


def attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None,
    window: tuple[int | None, int | None] | None = None, align: str | int | Array = "bottom-right",
    out: Array | None = None, lse: Array | None = None, return_lse: bool = False,
    layout: str = "bhsd", kernel: str | None = None, deterministic: bool = False,
    batch_invariant: bool = False, handle: Handle | None = None, stream: Any = None,
) -> Any:
    """softmax(scale * q k^T, masked) v: a new array like q, or `out`; with return_lse a pair.

    q: [B, Hq, S, D] of float32, float16 or bfloat16; k, v: [B, Hkv, Sk, D] of the same dtype, Hq a
    multiple of Hkv. With layout="bshd" all three, and the result, are [B, S, H, D]. Any strides with
    contiguous channels, 0 to repeat; nothing is copied.

    causal, window, align: row i has the centre c = i + Sk - S ("bottom-right"), i ("top-left"),
    i + align (an integer) or i + align[b] (an int32 array [B]). causal: keys j <= c are seen.
    window: (left, right), keys c - left <= j <= c + right are seen, None is unlimited.
    scale: 1 / sqrt(D) if None.
    out: where to write, like q. lse: where to write the log-sum-exp, float32 [B, Hq, S] in either
    layout; return_lse: return it also, as (out, lse).

    kernel, deterministic, batch_invariant: as the fields and flags of cuflash_problem_t.
    handle: a cuflash.Handle of the arrays' device with other options than the defaults.
    stream: on CUDA the stream to work on, an integer or a stream object; by default the current one
    of PyTorch or CuPy where arrays are theirs, else the one that the arrays name, else the default
    stream. CUDA calls only enqueue.
    """
    call = _forward(q, k, v, causal=causal, scale=scale, window=window, align=align, out=out, lse=lse,
                    return_lse=return_lse, layout=layout, kernel=kernel, deterministic=deterministic,
                    batch_invariant=batch_invariant, handle=handle, stream=stream)
    call.run(raw.cuflash_attention_forward)
    o = call.arrays.output("out")
    return (o, call.arrays.output("lse")) if return_lse else o


def attention_backward(
    d_o: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, causal: bool = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None,
    align: str | int | Array = "bottom-right", out: Sequence[Array] | None = None,
    layout: str = "bhsd", kernel: str | None = None, deterministic: bool = False,
    batch_invariant: bool = False, handle: Handle | None = None, stream: Any = None,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv), the gradients of a scalar whose gradient by attention's result is d_o.

    d_o and o: as q. o, lse: what attention(..., return_lse=True) gave; all other arguments as in that
    call. dk and dv are sums over the query heads that share a key head. out: three arrays to
    write them to."""
    call = _backward(d_o, q, k, v, o, lse, causal=causal, scale=scale, window=window, align=align,
                     out=out, layout=layout, kernel=kernel, deterministic=deterministic,
                     batch_invariant=batch_invariant, handle=handle, stream=stream)
    call.run(raw.cuflash_attention_backward)
    return tuple(call.arrays.output(name) for name in ("dq", "dk", "dv"))


def decode(
    q: Array, k_cache: Array, v_cache: Array, *, lengths: Array | None = None, causal: bool = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None,
    align: str | int | Array = "bottom-right", num_splits: int = 0, out: Array | None = None,
    lse: Array | None = None, return_lse: bool = False, layout: str = "bhsd",
    kernel: str | None = None, deterministic: bool = False, batch_invariant: bool = False,
    handle: Handle | None = None, stream: Any = None,
) -> Any:
    """Attention of the newest S tokens, often 1, over caches of keys and values.

    q: [B, Hq, S, D]; k_cache, v_cache: [entries, Hkv, max_len, D], entries >= B, sequence b in entry b.
    lengths: int32 [B] on the same device, the keys in use, the new ones among them; None: max_len. With
    "bottom-right" row i of sequence b sits at lengths[b] - S + i, so causal matters where S > 1.
    num_splits: parts along the keys, 0: chosen. Everything else as in attention()."""
    call = _decode(q, k_cache, v_cache, lengths=lengths, causal=causal, scale=scale, window=window,
                   align=align, num_splits=num_splits, out=out, lse=lse, return_lse=return_lse,
                   layout=layout, kernel=kernel, deterministic=deterministic,
                   batch_invariant=batch_invariant, handle=handle, stream=stream)
    call.run(raw.cuflash_attention_decode)
    o = call.arrays.output("out")
    return (o, call.arrays.output("lse")) if return_lse else o


def merge_states(
    parts: Array, lse_parts: Array, *, base2: bool = False, out: Array | None = None,
    lse: Array | None = None, layout: str = "bhsd", handle: Handle | None = None, stream: Any = None,
) -> tuple[Array, Array]:
    """(o, lse) over all keys from results over disjoint sets of keys.

    parts: [P, B, H, S, D] (or [P, B, S, H, D]), lse_parts: float32 [P, B, H, S]. A part whose LSE is
    -infinity adds nothing, whatever it holds. base2: LSE in and out are base-2 logarithms. out, lse:
    where to write; they may be exactly one of the parts."""
    _problem.check_layout(layout)
    arrays = Arrays(stream, parts=parts, lse_parts=lse_parts, out=out, lse=lse)
    states = heads_first(arrays["parts"], layout, rank=5)
    shape = states.shape[1:]
    arrays.add_output("out", in_layout(shape, layout), states.dtype)
    arrays.add_output("lse", shape[:3], "f32")
    struct = _problem.merge(states, arrays["lse_parts"], heads_first(arrays["out"], layout), arrays["lse"],
                            base2, layout)
    _Call(arrays, handle, struct).run(raw.cuflash_merge_states)
    return arrays.output("out"), arrays.output("lse")


def explain(operation: str, *arguments: Any, target_arch: int = 0, **options: Any) -> dict:
    """Which kernel a call takes and why not each other: nothing is run.

    explain("forward", q, k, v, causal=True) has the arguments of attention(); "backward" and "decode"
    likewise. target_arch: answer for this GPU, 90 for sm_90, whether it is there or not; the arrays
    may be of any device. Or the arguments of the C call: explain("forward", handle, problem), also
    "append". The answer is the JSON that cuflash.h describes."""
    in_c = any(isinstance(argument, Struct) for argument in arguments)
    known = [*_BUILDERS, "append"] if in_c else [*_BUILDERS]
    if operation not in known:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"operation: {operation!r}; one of {', '.join(known)}")
    if not in_c:
        call = _BUILDERS[operation](*arguments, query=True, **options)
        call.structs[0].target_arch = integer("target_arch", target_arch, 32)
        arguments = (None if target_arch else call.handle, *call.structs)
    query = getattr(raw, f"cuflash_{operation}_explain")
    needed = ctypes.c_size_t()
    check(query(*arguments, None, 0, ctypes.byref(needed)))
    buffer = ctypes.create_string_buffer(needed.value)
    check(query(*arguments, buffer, len(buffer), None))
    return json.loads(buffer.value)


# ---- the calls --------------------------------------------------------------------------------------


class _Call:
    """The arguments of a C call, with all that they point to."""

    def __init__(self, arrays: Arrays, handle: Handle | None, *structs: Struct):
        self.arrays = arrays
        if not isinstance(handle, (Handle, type(None))):
            raise TypeError(f"handle: {type(handle).__name__} is no cuflash.Handle")
        self.handle = handle or handle_of(arrays.device)
        self.structs = structs

    def run(self, function) -> None:
        check(function(self.handle, *self.structs, self.arrays.stream))
        self.arrays.wait()


def _options(arrays: Arrays, batch: int, *, causal=False, scale=None, window=None, align="bottom-right",
             kernel=None, deterministic=False, batch_invariant=False) -> dict[str, Any]:
    return _problem.options(causal, scale, window, arrays.get("align") or align, kernel, deterministic,
                            batch_invariant, batch)


def _array_of(align: Any) -> Array | None:
    return None if isinstance(align, (str, int)) else align


def _forward(q, k, v, *, out=None, lse=None, return_lse=False, layout="bhsd", handle=None, stream=None,
             query=False, **options) -> _Call:
    _problem.check_layout(layout)
    arrays = Arrays(stream, query, q=q, k=k, v=v, out=out, lse=lse, align=_array_of(options.get("align", "")))
    q, k, v = (heads_first(arrays[name], layout) for name in ("q", "k", "v"))
    arrays.add_output("out", in_layout(q.shape, layout), q.dtype)
    if return_lse or lse is not None:
        arrays.add_output("lse", q.shape[:3], "f32")
    problem = _problem.attention(q, k, v, heads_first(arrays["out"], layout), arrays.get("lse"), layout,
                                 **_options(arrays, q.shape[0], **options))
    return _Call(arrays, handle, problem)


def _backward(d_o, q, k, v, o, lse, *, out=None, layout="bhsd", handle=None, stream=None, query=False,
              **options) -> _Call:
    _problem.check_layout(layout)
    dq, dk, dv = out or (None, None, None)
    arrays = Arrays(stream, query, q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, dq=dq, dk=dk, dv=dv,
                    align=_array_of(options.get("align", "")))
    q, k, v, o, d_o = (heads_first(arrays[name], layout) for name in ("q", "k", "v", "o", "d_o"))
    problem = _problem.attention(q, k, v, o, arrays["lse"], layout, **_options(arrays, q.shape[0], **options))
    for name, model in (("dq", q), ("dk", k), ("dv", v)):
        arrays.add_output(name, in_layout(model.shape, layout), model.dtype)
    dq, dk, dv = (heads_first(arrays[name], layout) for name in ("dq", "dk", "dv"))
    return _Call(arrays, handle, problem, _problem.gradients(q, k, d_o, dq, dk, dv, layout))


def _decode(q, k_cache, v_cache, *, lengths=None, num_splits=0, out=None, lse=None, return_lse=False,
            layout="bhsd", handle=None, stream=None, query=False, **options) -> _Call:
    _problem.check_layout(layout)
    arrays = Arrays(stream, query, q=q, k_cache=k_cache, v_cache=v_cache, lengths=lengths, out=out,
                    lse=lse, align=_array_of(options.get("align", "")))
    q, k, v = (heads_first(arrays[name], layout) for name in ("q", "k_cache", "v_cache"))
    arrays.add_output("out", in_layout(q.shape, layout), q.dtype)
    if return_lse or lse is not None:
        arrays.add_output("lse", q.shape[:3], "f32")
    problem, cache = _problem.decode(
        q, k, v, heads_first(arrays["out"], layout), arrays.get("lse"), arrays.get("lengths"), layout,
        num_splits=integer("num_splits", num_splits, 32), **_options(arrays, q.shape[0], **options))
    return _Call(arrays, handle, problem, cache)


_BUILDERS: dict[str, Callable[..., _Call]] = {"forward": _forward, "backward": _backward, "decode": _decode}
