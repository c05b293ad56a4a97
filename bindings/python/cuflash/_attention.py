"""The operations on arrays."""
from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, Any, Callable, Sequence

from . import _problem, _raw as raw
from ._arrays import Array, Arrays, View, refuse
from ._cache import KVCache, append
from ._call import Call, read
from ._errors import check, integer
from ._handle import Handle
from ._library import Struct
from ._problem import PACKED, Options, heads_first, in_layout

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attention(
    q: Array, k: Array, v: Array, *, out: Array | None = None, lse: Array | None = None,
    return_lse: bool = False, out_dtype: str | None = None, accumulate: bool = False,
    layout: str = "bhsd", handle: Handle | None = None, stream: Any = None, **options: Unpack[Options],
) -> Any:
    """softmax(scale * q k^T, masked) v: a new array like q, or `out`; with return_lse a pair.

    q: [B, Hq, S, D] of float32, float16 or bfloat16; k: [B, Hkv, Sk, D], v: [B, Hkv, Sk, Dv] of the same
    dtype, Hq a multiple of Hkv; the result has the channels of v. With layout="bshd" all three, and the
    result, are [B, S, H, D]. Any strides with contiguous channels, 0 to repeat; nothing is copied.

    out: where to write, of q's dtype or float32. lse: where to write the log-sum-exp, float32
    [B, Hq, S] in either layout; return_lse: return it also, as (out, lse). out_dtype="float32": for a
    new result. accumulate: fold into the `out` (float32) and `lse` that are there, as merge_states().
    handle: a cuflash.Handle of the arrays' device with other options than the defaults.
    stream: on CUDA the stream to work on, an integer or a stream object; by default the current one
    of PyTorch or CuPy where arrays are theirs, else the one that the arrays name, else the default
    stream. CUDA calls only enqueue.

    Options:

    causal, window, align: row i has the centre c = i + Sk - S ("bottom-right"), i ("top-left"),
    i + align (an integer) or i + align[b] (an int32 array [B]). causal: keys j <= c are seen.
    window: (left, right), keys c - left <= j <= c + right are seen, None is unlimited.
    scale: 1 / sqrt(D) if None. Then, on the scores in this order,
    softcap: cap * tanh(score / cap); 0 for none.
    bias: added, [B, Hq, S, Sk] or what NumPy would repeat to it along all but the keys; -inf masks.
    alibi_slopes: slope * |c - j| is subtracted, [Hq] or [B, Hq].
    sinks: [Hq], a score without a value, which joins the sum of exponentials of each row.
    These three may be float32, float16 or bfloat16 of their own.
    tree_mask: uint32 or int32 words [B, S, words], or what NumPy would repeat to it: bit t % 32 of word
    t / 32 of a row says whether it sees key Sk - tree_mask_len + t; tree_mask_len is S if None. Mask and
    window hold too; a tree of drafted tokens goes without them. Not in the backward pass.

    dropout_p: probabilities are set to 0 with probability p and the others divided by 1 - p. The same
    dropout_seed and dropout_offset drop the same; calls drop independently if each adds Sk / 4, rounded
    up, to the offset. Both may be arrays of one uint64 or int64 on the device, read when the kernel runs.

    seqused_q, seqused_k: int32 [B], how many rows of each sequence are in use; leftpad_k: int32 [B], how
    many of those of k and v come before the first key. Rows that are not in use are neither read nor
    written.

    kernel, deterministic, batch_invariant, sm_margin: as the fields and flags of cuflash_problem_t.
    """
    call = _forward(q, k, v, out=out, lse=lse, return_lse=return_lse, out_dtype=out_dtype,
                    accumulate=accumulate, layout=layout, handle=handle, stream=stream, **options)
    call.run(raw.cuflash_attention_forward)
    return call.output("out", "lse") if return_lse else call.output("out")


def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, *, max_len_q: int,
    max_len_k: int, out: Array | None = None, lse: Array | None = None, return_lse: bool = False,
    out_dtype: str | None = None, accumulate: bool = False, handle: Handle | None = None,
    stream: Any = None, **options: Unpack[Options],
) -> Any:
    """attention() of sequences of any lengths, packed one after the other without padding.

    q: [total_q, Hq, D], k: [total_k, Hkv, D], v: [total_k, Hkv, Dv], the result [total_q, Hq, Dv], lse
    [Hq, total_q]. cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on the same device: sequence b has the rows
    cu_seqlens[b] to before cu_seqlens[b + 1]; it may have none. max_len_q, max_len_k: the longest
    lengths; what is longer is cut, and they are the S and Sk of a bias. Everything else as in
    attention(); rows of no sequence are not written."""
    call = _forward(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_len_q=max_len_q,
                    max_len_k=max_len_k, out=out, lse=lse, return_lse=return_lse, out_dtype=out_dtype,
                    accumulate=accumulate, handle=handle, stream=stream, **options)
    call.run(raw.cuflash_attention_forward)
    return call.output("out", "lse") if return_lse else call.output("out")


def attention_backward(
    d_o: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, d_lse: Array | None = None,
    delta: Array | None = None, return_d_bias: bool = False, return_d_sinks: bool = False,
    return_delta: bool = False, out: Sequence[Array] | None = None, out_dtype: str | None = None,
    accumulate: bool = False, layout: str = "bhsd", handle: Handle | None = None, stream: Any = None,
    **options: Unpack[Options],
) -> tuple[Array, ...]:
    """(dq, dk, dv), the gradients of a scalar whose gradient by attention's result is d_o.

    d_o: as the result. o, lse: what attention(..., return_lse=True) gave; options and layout as in that
    call. dk and dv are sums over the query heads that share a key head. d_lse: the scalar's gradient by
    lse, if it depends on it. delta: the sums of o * d_o over the channels, if they are known; o is not
    read then. d_lse and delta: with the shape and strides of lse.

    return_d_bias, return_d_sinks, return_delta: append these, in this order. The gradient of a bias needs
    one that is contiguous, whose shape says where it repeats. out: arrays to write all results to;
    out_dtype="float32": for new dq, dk and dv. accumulate: add dq, dk and dv, float32, to those in out."""
    call = _backward(d_o, q, k, v, o, lse, d_lse=d_lse, delta=delta, return_d_bias=return_d_bias,
                     return_d_sinks=return_d_sinks, return_delta=return_delta, out=out,
                     out_dtype=out_dtype, accumulate=accumulate, layout=layout, handle=handle,
                     stream=stream, **options)
    call.run(raw.cuflash_attention_backward)
    return call.output(*_gradient_names(return_d_bias, return_d_sinks, return_delta))


def attention_varlen_backward(
    d_o: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, cu_seqlens_q: Array,
    cu_seqlens_k: Array, *, max_len_q: int, max_len_k: int, d_lse: Array | None = None,
    delta: Array | None = None, return_d_bias: bool = False, return_d_sinks: bool = False,
    return_delta: bool = False, out: Sequence[Array] | None = None, out_dtype: str | None = None,
    accumulate: bool = False, handle: Handle | None = None, stream: Any = None, **options: Unpack[Options],
) -> tuple[Array, ...]:
    """attention_backward() of attention_varlen()."""
    call = _backward(d_o, q, k, v, o, lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                     max_len_q=max_len_q, max_len_k=max_len_k, d_lse=d_lse, delta=delta,
                     return_d_bias=return_d_bias, return_d_sinks=return_d_sinks, return_delta=return_delta,
                     out=out, out_dtype=out_dtype, accumulate=accumulate, handle=handle, stream=stream,
                     **options)
    call.run(raw.cuflash_attention_backward)
    return call.output(*_gradient_names(return_d_bias, return_d_sinks, return_delta))


def attention_weights(
    q: Array, k: Array, lse: Array, *, rows: Array | None = None, out: Array | None = None,
    layout: str = "bhsd", handle: Handle | None = None, stream: Any = None, **options: Unpack[Options],
) -> Array:
    """The probabilities of attention's softmax, before dropout, to look at: float32 [B, Hq, S, Sk].

    q, k, lse: those of attention(..., return_lse=True), options and layout as in that call. rows: int32
    [R] on the same device, which rows to give, [B, Hq, R, Sk]; all if None. A row that a sequence does
    not have, or a key that is not seen, has 0."""
    call = _weights(q, k, lse, rows=rows, out=out, layout=layout, handle=handle, stream=stream, **options)
    if call.structs[1].num_rows:  # 0 would mean all rows
        call.run(raw.cuflash_attention_weights)
    return call.output("out")


def decode(
    q: Array, k_cache: Array | KVCache, v_cache: Array | None = None, *, lengths: Array | None = None,
    num_splits: int = 0, out: Array | None = None, lse: Array | None = None, return_lse: bool = False,
    out_dtype: str | None = None, accumulate: bool = False, layout: str = "bhsd",
    handle: Handle | None = None, stream: Any = None, **options: Unpack[Options],
) -> Any:
    """Attention of the newest S tokens, often 1, over caches of keys and values.

    q: [B, Hq, S, D]; then a KVCache or a PagedKVCache, which have lengths and a layout of their own, or
    k_cache: [entries, Hkv, max_len, D], v_cache: [entries, Hkv, max_len, Dv], entries >= B, sequence b in
    entry b, with lengths: int32 [B] on the same device, the keys in use, the new ones among them; None:
    max_len. With "bottom-right" row i of sequence b sits at lengths[b] - S + i, so causal matters where
    S > 1.
    num_splits: parts along the keys, 0: chosen. Everything else as in attention(), with max_len for Sk;
    lengths stand for seqused_k, and there is no leftpad_k."""
    call = decode_call(q, k_cache, v_cache, lengths=lengths, num_splits=num_splits, out=out, lse=lse,
                   return_lse=return_lse, out_dtype=out_dtype, accumulate=accumulate, layout=layout,
                   handle=handle, stream=stream, **options)
    call.run(raw.cuflash_attention_decode)
    return call.output("out", "lse") if return_lse else call.output("out")


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
    states = heads_first(arrays["parts"], layout, parts=True)
    shape = states.shape[1:]
    arrays.add_output("out", in_layout(shape, layout), states.dtype)
    arrays.add_output("lse", shape[:3], "f32")
    struct = _problem.merge(states, arrays["lse_parts"], heads_first(arrays["out"], layout), arrays["lse"],
                            base2, layout)
    call = Call(arrays, handle, struct)
    call.run(raw.cuflash_merge_states)
    return call.output("out", "lse")


def explain(operation: str, *arguments: Any, target_arch: int = 0, **options: Any) -> dict:
    """Which kernel a call takes and why not each other: nothing is run.

    explain("forward", q, k, v, causal=True) has the arguments of attention(), or by name those of
    attention_varlen(); "backward" and "decode" likewise, "append" those of KVCache.append() after the cache.
    target_arch: answer for this GPU, 90 for sm_90, whether it is there or not; the arrays may be of any
    device. Or the arguments of the C call: explain("forward", handle, problem). The answer is the JSON that
    cuflash.h describes."""
    if operation not in _BUILDERS:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"operation: {operation!r}; one of {', '.join(_BUILDERS)}")
    if not any(isinstance(argument, Struct) for argument in arguments):
        call = _BUILDERS[operation](*arguments, query=True, **options)
        asking = next(struct for struct in call.structs if hasattr(struct, "target_arch"))
        asking.target_arch = integer("target_arch", target_arch, 32)
        arguments = (None if target_arch else call.handle, *call.structs)
    query = getattr(raw, f"cuflash_{operation}_explain")
    needed = ctypes.c_size_t()
    check(query(*arguments, None, 0, ctypes.byref(needed)))
    buffer = ctypes.create_string_buffer(needed.value)
    check(query(*arguments, buffer, len(buffer), None))
    return json.loads(buffer.value)


# ---- the calls --------------------------------------------------------------------------------------


def _extents(q: View, k: View, options: dict[str, Any]) -> _problem.Extents:
    return _problem.extents(q, k, options.get("cu_seqlens_q"), options.pop("max_len_q", 0),
                            options.pop("max_len_k", 0))


def _layout(layout: str, options: dict[str, Any]) -> str:
    if "cu_seqlens_q" in options:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if options.get(name) is None:
                refuse(raw.CUFLASH_ERROR_NULL_POINTER, f"{name}: None; int32 offsets [B + 1]")
        return PACKED
    _problem.check_layout(layout)
    return layout


def _add_results(arrays: Arrays, q: View, head_dim_v: int, layout: str, out_dtype: str | None, with_lse: bool,
                 accumulate: bool) -> None:
    if accumulate and not ("out" in arrays and "lse" in arrays):
        refuse(raw.CUFLASH_ERROR_NULL_POINTER, "accumulate: needs out and lse, which hold what it adds to")
    arrays.add_output("out", in_layout((*q.shape[:3], head_dim_v), layout),
                      _problem.output_dtype(out_dtype, q.dtype))
    if with_lse or "lse" in arrays:
        arrays.add_output("lse", _problem.row_shape(q, layout), "f32")


def _forward(q, k, v, *, out=None, lse=None, return_lse=False, out_dtype=None, accumulate=False, layout="bhsd",
             handle=None, stream=None, query=False, **options) -> Call:
    layout = _layout(layout, options)
    arrays = read(stream, query, options, q=q, k=k, v=v, out=out, lse=lse)
    q, k, v = (heads_first(arrays[name], layout) for name in ("q", "k", "v"))
    _add_results(arrays, q, v.shape[3], layout, out_dtype, return_lse, accumulate)
    extents = _extents(q, k, options)
    return Call(arrays, handle, _problem.attention(
        q, k, v, heads_first(arrays["out"], layout), arrays.get("lse"), layout, extents,
        **_problem.options(extents, accumulate=accumulate, **options)))


def _gradient_names(return_d_bias: bool, return_d_sinks: bool, return_delta: bool) -> list[str]:
    return ["dq", "dk", "dv", *["d_bias"] * return_d_bias, *["d_sinks"] * return_d_sinks,
            *["delta"] * return_delta]


def _backward(d_o, q, k, v, o, lse, *, d_lse=None, delta=None, return_d_bias=False, return_d_sinks=False,
              return_delta=False, out=None, out_dtype=None, accumulate=False, layout="bhsd", handle=None,
              stream=None, query=False, **options) -> Call:
    layout = _layout(layout, options)
    names = _gradient_names(return_d_bias, return_d_sinks, return_delta)
    given = dict(zip(names, out or ()))
    if out is not None and len(out) != len(names):
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH, f"out: {len(out)} arrays; {', '.join(names)}")
    if accumulate and out is None:
        refuse(raw.CUFLASH_ERROR_NULL_POINTER, "accumulate: needs out, which holds what it adds to")
    if delta is not None and return_delta:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, "return_delta: with a delta that is given; one of them")
    for name in ("bias", "sinks"):
        if f"d_{name}" in names and options.get(name) is None:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"return_d_{name}: without {name}")
    arrays = read(stream, query, options, q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, d_lse=d_lse,
                   **{"delta": delta, **given})
    q, k, v, o, d_o = (heads_first(arrays[name], layout) for name in ("q", "k", "v", "o", "d_o"))
    extents = _extents(q, k, options)
    problem = _problem.attention(q, k, v, o, arrays["lse"], layout, extents,
                                 **_problem.options(extents, **options))
    for name, model in (("dq", q), ("dk", k), ("dv", v)):
        arrays.add_output(name, in_layout(model.shape, layout), _problem.output_dtype(out_dtype, q.dtype))
    for name, like in (("d_bias", "bias"), ("d_sinks", "sinks"), ("delta", "lse")):
        if name in names:
            arrays.add_output(name, arrays[like].shape, arrays[like].dtype, like)
    dq, dk, dv = (heads_first(arrays[name], layout) for name in ("dq", "dk", "dv"))
    further = {name: arrays.get(name) for name in ("d_lse", "delta", "bias", "d_bias", "sinks", "d_sinks")}
    return Call(arrays, handle, problem, _problem.gradients(
        q, k, v, o, arrays["lse"], layout, d_o, dq, dk, dv, **further, delta_given=delta is not None,
        accumulate=accumulate))


def _weights(q, k, lse, *, rows, out, layout, handle, stream, **options) -> Call:
    _problem.check_layout(layout)
    arrays = read(stream, False, options, q=q, k=k, lse=lse, rows=rows, out=out)
    q, k = (heads_first(arrays[name], layout) for name in ("q", "k"))
    extents = _extents(q, k, options)
    num_rows = extents.len_q
    if rows is not None:
        _problem.check_shape(arrays["rows"], ("R",))
        num_rows, = arrays["rows"].shape
    arrays.add_output("out", (extents.batch, extents.heads_q, num_rows, extents.len_k), "f32")
    return Call(arrays, handle, *_problem.weights(
        q, k, arrays["lse"], arrays["out"], num_rows, arrays.get("rows"), layout, extents,
        **_problem.options(extents, **options)))


def cache_of(k_cache, v_cache, lengths, layout: str) -> KVCache:
    """The cache of a call, which may be given as arrays."""
    if not isinstance(k_cache, KVCache):
        if v_cache is None:
            refuse(raw.CUFLASH_ERROR_NULL_POINTER, "v_cache: None; an array, or a KVCache in place of k_cache")
        return KVCache(k_cache, v_cache, lengths=lengths, layout=layout)
    for name, value in (("v_cache", v_cache), ("lengths", lengths)):
        if value is not None:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: beside a {type(k_cache).__name__}, which has its own")
    return k_cache


def decode_call(q, k_cache, v_cache=None, *, lengths=None, num_splits=0, out=None, lse=None, return_lse=False,
            out_dtype=None, accumulate=False, layout="bhsd", handle=None, stream=None, query=False,
            **options) -> Call:
    _problem.check_layout(layout)
    cache = cache_of(k_cache, v_cache, lengths, layout)
    arrays = read(stream, query, options, q=q, out=out, lse=lse, **cache.arrays())
    q = heads_first(arrays["q"], layout)
    stored = cache.read(arrays, q.shape[0], q.shape[1], q.shape[3])
    _add_results(arrays, q, stored.head_dim_v, layout, out_dtype, return_lse, accumulate)
    extents = _problem.Extents(q.shape[0], q.shape[1], stored.heads_kv, q.shape[2], stored.max_len)
    fields = _problem.options(extents, accumulate=accumulate, **options)
    fields["flags"] |= stored.problem_flags
    problem = _problem.decode(q, heads_first(arrays["out"], layout), arrays.get("lse"), layout, extents,
                              stored.head_dim_v, num_splits=integer("num_splits", num_splits, 32), **fields)
    return Call(arrays, handle, problem, stored.struct)


_BUILDERS: dict[str, Callable[..., Call]] = {
    "forward": _forward, "backward": _backward, "decode": decode_call, "append": append}
