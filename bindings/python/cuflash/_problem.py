"""The C API's structs from views of arrays. What only the shapes can tell is checked here, all else
by the library."""
from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from . import _dlpack
from . import _raw as raw
from ._arrays import FLOATS, Array, View, refuse, spelled
from ._errors import integer

LAYOUTS = ("bhsd", "bshd")
PACKED = "thd"  # the sequences one after the other; what takes it says so by its name
_ALIGNMENTS = {"bottom-right": raw.CUFLASH_ALIGN_BOTTOM_RIGHT, "top-left": raw.CUFLASH_ALIGN_TOP_LEFT}


class Options(TypedDict, total=False):
    """What the operations have in common, with the defaults of options(); attention() documents them."""

    causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    align: str | int | Array
    softcap: float
    alibi_slopes: Array | None
    bias: Array | None
    sinks: Array | None
    tree_mask: Array | None
    tree_mask_len: int | None
    dropout_p: float
    dropout_seed: int | Array
    dropout_offset: int | Array
    seqused_q: Array | None
    seqused_k: Array | None
    leftpad_k: Array | None
    kernel: str | None
    deterministic: bool
    batch_invariant: bool
    sm_margin: int


#: arguments of options() and extents() that are arrays, or may be
ARRAYS = ("align", "alibi_slopes", "bias", "sinks", "tree_mask", "dropout_seed", "dropout_offset", "cu_seqlens_q",
          "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"layout: {layout!r}; one of {', '.join(LAYOUTS)}")


def in_layout(shape: tuple, layout: str) -> tuple:
    """[..., H, S, D] as the layout has it."""
    if layout == "bhsd":
        return shape
    swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return swapped[1:] if layout == PACKED else swapped


def from_layout(extents: tuple, layout: str, batch: int) -> tuple:
    """And back; batch: for the dimension that a packed layout lacks."""
    return in_layout((batch, batch, *extents) if layout == PACKED else extents, layout)


def heads_first(view: View, layout: str, parts: bool = False) -> View:
    """The view as [..., H, S, D] with contiguous channels; the parts of a merge come first."""
    check_rank(view, "P" * parts + layout.upper())
    check_floats(view)
    if layout == "bhsd":
        return view
    return View(view.name, view.pointer, from_layout(view.shape, layout, 1),
                from_layout(view.strides, layout, 0), view.dtype, view.writable, view.owner)


def check_rank(view: View, letters: str) -> None:
    if len(view.shape) != len(letters):
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
               f"{view.name}: {len(view.shape)} dimensions {view.shape}; {len(letters)}: [{', '.join(letters)}]")


def check_floats(view: View) -> None:
    """Of a dtype to compute with, contiguous along the last dimension."""
    if view.dtype not in FLOATS:
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE,
               f"{view.name}: {spelled(view.dtype)}; float32, float16 or bfloat16")
    check_contiguous(view)


def check_contiguous(view: View) -> None:
    if view.strides[-1] != (1 if view.shape[-1] > 1 else 0):
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
               f"{view.name}: strides {view.strides}; the last dimension must be contiguous")


def output_dtype(name: str | None, default: str) -> str:
    """Of an output that is as q or float32."""
    if name not in (None, "float32"):
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE, f"out_dtype: {name!r}; None (as q) or 'float32'")
    return default if name is None else "f32"


def tensor(view: View) -> raw.cuflash_tensor_t:
    """Of a view that heads_first() made; a dimension of parts is left to the caller."""
    batch, head, row = view.strides[-4:-1]
    return raw.cuflash_tensor_t.new(data=view.pointer, batch_stride=batch, head_stride=head,
                                    row_stride=row, dtype=FLOATS[view.dtype])


def check_shape(view: View, wanted: tuple, layout: str = "bhsd") -> None:
    """wanted: extents, or letters for what is free."""
    if view.shape == wanted:
        return
    if len(view.shape) != len(wanted) or any(
            isinstance(w, int) and n != w for n, w in zip(view.shape, wanted)):
        shape, wanted = ((in_layout(view.shape, layout), in_layout(wanted, layout))
                         if len(wanted) >= 4 else (view.shape, wanted))
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
               f"{view.name}: shape {shape}; must be ({', '.join(map(str, wanted))})")


def check_some(view: View, extent: int, what: str, of_q: int) -> None:
    """The C API reads an extent of 0 here as "that of q": it would read where there is nothing."""
    if extent == 0 and of_q != 0:
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH, f"{view.name}: no {what}, but q has {of_q}")


def row_shape(q: View, layout: str) -> tuple:
    """Of one value for each row: an LSE and what goes with it."""
    return q.shape[1:3] if layout == PACKED else q.shape[:3]


def row_stats(view: View | None, shape: tuple, pointer: str, prefix: str) -> dict[str, Any]:
    """The fields of an LSE: its pointer, and its strides under names that begin with the prefix."""
    if view is None:
        return {}
    check_shape(view, shape)
    if view.dtype != "f32":
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE, f"{view.name}: {spelled(view.dtype)}; float32")
    batch, head, row = (0, *view.strides)[-3:]  # packed rows have no batch
    if not (batch or head or row) and max(shape[-3:]) > 1 and 0 not in shape:
        # Three zeros would mean a dense array.
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{view.name}: one value repeated; copy it")
    return {pointer: view.pointer, f"{prefix}_batch_stride": batch, f"{prefix}_head_stride": head,
            f"{prefix}_row_stride": row}


def strided_as(view: View, model: View) -> int:
    """The address of an array that has the strides of another, which the C API gives once; 0 if it is empty."""
    check_shape(view, model.shape)
    if view.dtype != model.dtype:
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE,
               f"{view.name}: {spelled(view.dtype)}; that of {model.name}, {spelled(model.dtype)}")
    if view.strides != model.strides:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
               f"{view.name}: strides {view.strides}; those of {model.name}, {model.strides}")
    return 0 if 0 in view.shape else view.pointer


def integers(view: View, count: int) -> int:
    """The address of a dense int32 [count]."""
    return dense(view, (count,), "i32")


def dense(view: View, wanted: tuple, dtype: str) -> int:
    """The address of a dense array; wanted as in check_shape()."""
    check_shape(view, wanted)
    strides = tuple([s if n > 1 else 0 for n, s in zip(view.shape, _dlpack.dense(view.shape))])
    if view.dtype != dtype or view.strides != strides:
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE,
               f"{view.name}: {spelled(view.dtype)} with strides {view.strides}; contiguous {spelled(dtype)}")
    return view.pointer


def repeated(view: View, wanted: tuple) -> tuple[int, ...]:
    """The strides of an array that repeats, as NumPy would, along all dimensions but its last; a letter there
    is for what is free."""
    missing = len(wanted) - len(view.shape)
    given = zip(view.shape[:-1], wanted[missing:-1])
    if not 0 <= missing < len(wanted) or any(n not in (1, w) for n, w in given) or (
            isinstance(wanted[-1], int) and view.shape[-1] != wanted[-1]):
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
               f"{view.name}: shape {view.shape}; ({', '.join(map(str, wanted))}), or 1 in place of all but the last")
    return (0,) * missing + view.strides


class Extents(NamedTuple):
    """Fields of a problem; of packed arrays batch and lengths are those of the sequences."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    total_q: int = 0
    total_k: int = 0


def extents(q: View, k: View, cu_seqlens_q: View | None = None, max_len_q: int = 0,
            max_len_k: int = 0) -> Extents:
    batch, heads_q, len_q, _ = q.shape
    _, heads_kv, len_k, _ = k.shape
    if cu_seqlens_q is None:
        return Extents(batch, heads_q, heads_kv, len_q, len_k)
    check_shape(cu_seqlens_q, ("B + 1",))
    return Extents(max(cu_seqlens_q.shape[0] - 1, 0), heads_q, heads_kv, integer("max_len_q", max_len_q),
                   integer("max_len_k", max_len_k), len_q, len_k)


def options(extents: Extents, *, causal: bool = False, scale: float | None = None, window: tuple | None = None,
            align: str | int | View = "bottom-right", softcap: float = 0.0, alibi_slopes: View | None = None,
            bias: View | None = None, sinks: View | None = None, tree_mask: View | None = None,
            tree_mask_len: int | None = None, dropout_p: float = 0.0, dropout_seed: int | View = 0,
            dropout_offset: int | View = 0, cu_seqlens_q: View | None = None, cu_seqlens_k: View | None = None,
            seqused_q: View | None = None, seqused_k: View | None = None, leftpad_k: View | None = None,
            kernel: str | None = None, deterministic: bool = False, batch_invariant: bool = False,
            sm_margin: int = 0, accumulate: bool = False) -> dict[str, Any]:
    """The fields of a problem beside its extents and tensors. New features of the library are added here."""
    fields: dict[str, Any] = {"flags": 0}  # only what is given: each field set costs a fraction of a microsecond
    if causal:
        fields["mask"] = raw.CUFLASH_MASK_CAUSAL
    if scale is not None:
        fields["scale"] = scale
        fields["flags"] |= raw.CUFLASH_PROBLEM_SCALE_SET
    if window is not None:
        left, right = window
        fields["window_left"] = -1 if left is None else integer("window_left", left)
        fields["window_right"] = -1 if right is None else integer("window_right", right)
        fields["flags"] |= raw.CUFLASH_PROBLEM_WINDOW
    if isinstance(align, View):
        fields["mask_align"] = raw.CUFLASH_ALIGN_DEVICE_OFFSETS
        fields["mask_offsets"] = integers(align, extents.batch)
    elif isinstance(align, int):
        fields["mask_align"] = raw.CUFLASH_ALIGN_OFFSET
        fields["mask_offset"] = integer("align", align)
    elif align in _ALIGNMENTS:
        fields["mask_align"] = _ALIGNMENTS[align]
    else:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
               f"align: {align!r}; {', '.join(map(repr, _ALIGNMENTS))}, an offset, or int32 offsets [B]")
    if softcap:
        fields["softcap"] = softcap
    if alibi_slopes is not None:
        fields.update(_slopes(alibi_slopes, extents))
    if bias is not None:
        fields.update(_bias(bias, extents))
    if sinks is not None:
        fields.update(_sinks(sinks, extents))
    if tree_mask is not None:
        fields.update(_tree_mask(tree_mask, tree_mask_len, extents))
    if dropout_p:
        fields.update(dropout_p=dropout_p, **_random("dropout_seed", dropout_seed),
                      **_random("dropout_offset", dropout_offset))
    for name, view, count in (
            ("cu_seqlens_q", cu_seqlens_q, extents.batch + 1), ("cu_seqlens_k", cu_seqlens_k, extents.batch + 1),
            ("seqused_q", seqused_q, extents.batch), ("seqused_k", seqused_k, extents.batch),
            ("leftpad_k", leftpad_k, extents.batch)):
        if view is not None:
            fields[name] = integers(view, count)
    if kernel is not None:
        fields["kernel"] = kernel.encode()
    if sm_margin:
        fields["sm_margin"] = integer("sm_margin", sm_margin, 32)
    if leftpad_k is not None:
        fields["flags"] |= raw.CUFLASH_PROBLEM_LEFT_PADDED
    if deterministic:
        fields["flags"] |= raw.CUFLASH_PROBLEM_DETERMINISTIC
    if batch_invariant:
        fields["flags"] |= raw.CUFLASH_PROBLEM_BATCH_INVARIANT
    if accumulate:
        fields["flags"] |= raw.CUFLASH_PROBLEM_ACCUMULATE
    return fields


# An empty array is not handed on: it may have no address, and a gradient that repeats along an extent of 0 would
# be written where there is no memory.


def _slopes(view: View, extents: Extents) -> dict[str, Any]:
    shape = (extents.batch, extents.heads_q)
    check_shape(view, shape if len(view.shape) == 2 else shape[1:])
    check_floats(view)
    if 0 in view.shape:
        return {}
    return {"alibi_slopes": view.pointer, "alibi_dtype": FLOATS[view.dtype],
            "alibi_batch_stride": view.strides[0] if len(view.shape) == 2 else 0}


def _bias(view: View, extents: Extents) -> dict[str, Any]:
    batch, head, row, _ = repeated(view, (extents.batch, extents.heads_q, extents.len_q, extents.len_k))
    check_floats(view)
    if 0 in view.shape:
        return {}
    return {"bias": view.pointer, "bias_dtype": FLOATS[view.dtype], "bias_batch_stride": batch,
            "bias_head_stride": head, "bias_row_stride": row}


def _sinks(view: View, extents: Extents) -> dict[str, Any]:
    check_shape(view, (extents.heads_q,))
    check_floats(view)
    if 0 in view.shape:
        return {}
    return {"sinks": view.pointer, "sinks_dtype": FLOATS[view.dtype]}


def _tree_mask(view: View, length: int | None, extents: Extents) -> dict[str, Any]:
    """Words of bits for the last `length` keys."""
    length = extents.len_q if length is None else integer("tree_mask_len", length)
    batch, row, _ = repeated(view, (extents.batch, extents.len_q, "words"))
    if view.dtype not in ("u32", "i32"):
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE, f"tree_mask: {spelled(view.dtype)}; uint32 or int32")
    check_contiguous(view)
    if 32 * view.shape[-1] < length:
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
               f"tree_mask: {view.shape[-1]} words, {32 * view.shape[-1]} bits for {length} keys")
    if length == 0 or 0 in view.shape:
        return {}
    return {"tree_mask": view.pointer, "tree_mask_len": length, "tree_mask_batch_stride": batch,
            "tree_mask_row_stride": row}


def _random(name: str, value: int | View) -> dict[str, Any]:
    """A number of 64 bits, or its address on the device."""
    if not isinstance(value, View):
        if not 0 <= value < 1 << 64:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: {value}; 0 to 2^64 - 1")
        return {name: value}
    if value.shape not in ((), (1,)):
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH, f"{name}: shape {value.shape}; one element")
    if value.dtype not in ("i64", "u64"):
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE, f"{name}: {spelled(value.dtype)}; uint64 or int64")
    return {f"{name}_ptr": value.pointer}


def attention(q: View, k: View, v: View, o: View, lse: View | None, layout: str, extents: Extents,
              **fields: Any) -> raw.cuflash_problem_t:
    """Forward and backward. The views as heads_first() makes them."""
    check_shape(k, (q.shape[0], "Hkv", "Sk", q.shape[3]), layout)
    check_shape(v, (*k.shape[:3], "Dv"), layout)
    check_shape(o, (*q.shape[:3], v.shape[3]), layout)
    check_some(k, k.shape[1], "heads", q.shape[1])
    check_some(v, v.shape[3], "channels", q.shape[3])
    return raw.cuflash_problem_t.new(
        **extents._asdict(), head_dim=q.shape[3], head_dim_v=v.shape[3], q=tensor(q), k=tensor(k), v=tensor(v),
        o=tensor(o), **row_stats(lse, row_shape(q, layout), "lse", "lse"), **fields)


def weights(q: View, k: View, lse: View, out: View, num_rows: int, rows: View | None, layout: str,
            extents: Extents, **fields: Any) -> tuple[raw.cuflash_problem_t, raw.cuflash_weights_t]:
    check_shape(k, (q.shape[0], "Hkv", "Sk", q.shape[3]), layout)
    check_shape(out, (extents.batch, extents.heads_q, num_rows, extents.len_k))
    check_some(k, k.shape[1], "heads", q.shape[1])
    check_floats(out)
    if out.dtype != "f32":
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE, f"out: {spelled(out.dtype)}; float32")
    batch, head, row = out.strides[:3]
    problem = raw.cuflash_problem_t.new(**extents._asdict(), head_dim=q.shape[3], q=tensor(q), k=tensor(k),
                                        **row_stats(lse, q.shape[:3], "lse", "lse"), **fields)
    return problem, raw.cuflash_weights_t.new(
        weights=out.pointer, batch_stride=batch, head_stride=head, row_stride=row, num_rows=num_rows,
        rows=None if rows is None else integers(rows, num_rows))


def gradients(q: View, k: View, v: View, o: View, lse: View, layout: str, d_o: View, dq: View, dk: View, dv: View, *,
              d_lse: View | None = None, delta: View | None = None, delta_given: bool = False,
              bias: View | None = None, d_bias: View | None = None, sinks: View | None = None,
              d_sinks: View | None = None, accumulate: bool = False) -> raw.cuflash_gradients_t:
    for view, model in ((d_o, o), (dq, q), (dk, k), (dv, v)):
        check_shape(view, model.shape, layout)
    further = {name: strided_as(view, model) for name, view, model in (
        ("dlse", d_lse, lse), ("delta", delta, lse), ("dbias", d_bias, bias), ("dsinks", d_sinks, sinks))
        if view is not None}
    return raw.cuflash_gradients_t.new(
        flags=(raw.CUFLASH_GRADIENTS_DELTA_GIVEN if delta_given else 0)
        | (raw.CUFLASH_GRADIENTS_ACCUMULATE if accumulate else 0),
        d_o=tensor(d_o), dq=tensor(dq), dk=tensor(dk), dv=tensor(dv), **further)


def decode(q: View, o: View, lse: View | None, layout: str, extents: Extents, head_dim_v: int,
           **fields: Any) -> raw.cuflash_problem_t:
    """The problem; the cache is KVCache's to tell."""
    check_shape(o, (*q.shape[:3], head_dim_v), layout)
    return raw.cuflash_problem_t.new(
        **extents._replace(len_k=0)._asdict(), head_dim=q.shape[3], head_dim_v=head_dim_v, q=tensor(q), o=tensor(o),
        **row_stats(lse, q.shape[:3], "lse", "lse"), **fields)


def append(k: View, v: View | None, q: View | None, q_out: View | None, layout: str, heads_kv: int, head_dim_v: int, *,
           positions: View | None, slot_mapping: View | None, cos: View | None, sin: View | None, interleaved: bool,
           q_norm_weight: View | None, k_norm_weight: View | None, norm_epsilon: float) -> raw.cuflash_kv_append_t:
    batch, _, length, head_dim = k.shape
    check_shape(k, (batch, heads_kv, length, head_dim), layout)
    fields: dict[str, Any] = {"k": tensor(k)}
    if v is not None:
        check_shape(v, (*k.shape[:3], head_dim_v), layout)
        fields.update(v=tensor(v), head_dim_v=head_dim_v)
    if q is not None and q_out is not None:
        check_shape(q, (batch, "Hq", length, head_dim), layout)
        check_shape(q_out, q.shape, layout)
        fields.update(q=tensor(q), q_out=tensor(q_out), heads_q=q.shape[1])
    if positions is not None:
        fields["positions"] = dense(positions, (batch, length), "i32")
    if slot_mapping is not None:
        fields["slot_mapping"] = dense(slot_mapping, (batch, length), "i64")
    if cos is not None:
        fields["cos"] = dense(cos, ("max_position", "rotary_dim / 2"), "f32")
        check_some(cos, cos.shape[1], "channels", head_dim)
        fields.update(max_position=cos.shape[0], rotary_dim=2 * cos.shape[1])
    if sin is not None:
        fields["sin"] = dense(sin, ("max_position", "rotary_dim / 2") if cos is None else cos.shape, "f32")
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            fields[name] = dense(weight, (head_dim,), k.dtype)
    return raw.cuflash_kv_append_t.new(
        flags=raw.CUFLASH_APPEND_INTERLEAVED if interleaved else 0, batch=batch, heads_kv=heads_kv, len=length,
        head_dim=head_dim, norm_epsilon=norm_epsilon, **fields)


def merge(parts: View, lse_parts: View, o: View, lse: View, base2: bool,
          layout: str) -> raw.cuflash_merge_t:
    num_parts, batch, heads, len_, head_dim = parts.shape
    check_shape(o, parts.shape[1:], layout)
    lse_fields = row_stats(lse_parts, parts.shape[:4], "lse_parts", "lse")
    check_shape(lse, parts.shape[1:4])
    if lse.strides != lse_parts.strides[1:]:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
               f"lse: strides {lse.strides}; those of a part of lse_parts, {lse_parts.strides[1:]}")
    return raw.cuflash_merge_t.new(
        flags=raw.CUFLASH_MERGE_LSE_BASE2 if base2 else 0,
        num_parts=num_parts, batch=batch, heads=heads, len=len_, head_dim=head_dim,
        parts=tensor(parts), part_stride=parts.strides[0], o=tensor(o), **lse_fields,
        lse_part_stride=lse_parts.strides[0], lse=lse.pointer)
