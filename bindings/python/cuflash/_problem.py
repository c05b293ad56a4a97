"""The C API's structs from views of arrays. What only the shapes can tell is checked here, all else
by the library."""
from __future__ import annotations

from typing import Any

from . import _raw as raw
from ._arrays import FLOATS, View, refuse, spelled
from ._errors import integer

LAYOUTS = ("bhsd", "bshd")
_ALIGNMENTS = {"bottom-right": raw.CUFLASH_ALIGN_BOTTOM_RIGHT, "top-left": raw.CUFLASH_ALIGN_TOP_LEFT}


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"layout: {layout!r}; one of {', '.join(LAYOUTS)}")


def in_layout(shape: tuple, layout: str) -> tuple:
    """[..., H, S, D] as the layout has it, and back."""
    return shape if layout == "bhsd" else (*shape[:-3], shape[-2], shape[-3], shape[-1])


def heads_first(view: View, layout: str, rank: int = 4) -> View:
    """The view as [..., H, S, D] with contiguous channels; rank 5 has the parts of a merge first."""
    if len(view.shape) != rank:
        letters = ("P",) * (rank - 4) + in_layout(("B", "H", "S", "D"), layout)
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
               f"{view.name}: {len(view.shape)} dimensions {view.shape}; {rank}: [{', '.join(letters)}]")
    if view.dtype not in FLOATS:
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE,
               f"{view.name}: {spelled(view.dtype)}; float32, float16 or bfloat16")
    if view.strides[-1] != (1 if view.shape[-1] > 1 else 0):
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
               f"{view.name}: strides {view.strides}; the last dimension must be contiguous")
    return View(view.name, view.pointer, in_layout(view.shape, layout), in_layout(view.strides, layout),
                view.dtype, view.writable, view.owner)


def tensor(view: View) -> raw.cuflash_tensor_t:
    """Of a view that heads_first() made; a dimension of parts is left to the caller."""
    batch, head, row = view.strides[-4:-1]
    return raw.cuflash_tensor_t.new(data=view.pointer, batch_stride=batch, head_stride=head,
                                    row_stride=row, dtype=FLOATS[view.dtype])


def check_shape(view: View, wanted: tuple, layout: str = "bhsd") -> None:
    """wanted: extents, or letters for what is free."""
    if len(view.shape) != len(wanted) or any(
            isinstance(w, int) and n != w for n, w in zip(view.shape, wanted)):
        shape, wanted = ((in_layout(view.shape, layout), in_layout(wanted, layout))
                         if len(wanted) >= 4 else (view.shape, wanted))
        refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
               f"{view.name}: shape {shape}; must be ({', '.join(map(str, wanted))})")


def row_stats(view: View | None, shape: tuple, pointer: str, prefix: str) -> dict[str, Any]:
    """The fields of an LSE: its pointer, and its strides under names that begin with the prefix."""
    if view is None:
        return {}
    check_shape(view, shape)
    if view.dtype != "f32":
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE, f"{view.name}: {spelled(view.dtype)}; float32")
    batch, head, row = view.strides[-3:]
    if not (batch or head or row) and max(shape[-3:]) > 1 and 0 not in shape:
        # Three zeros would mean a dense array.
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{view.name}: one value repeated; copy it")
    return {pointer: view.pointer, f"{prefix}_batch_stride": batch, f"{prefix}_head_stride": head,
            f"{prefix}_row_stride": row}


def integers(view: View, count: int) -> int:
    """The address of a dense int32 [count]."""
    check_shape(view, (count,))
    if view.dtype != "i32" or view.strides != (1 if count > 1 else 0,):
        refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE,
               f"{view.name}: {spelled(view.dtype)} with strides {view.strides}; contiguous int32")
    return view.pointer


def options(causal: bool, scale: float | None, window: tuple | None, align: str | int | View,
            kernel: str | None, deterministic: bool, batch_invariant: bool, batch: int) -> dict[str, Any]:
    """The fields of a problem beside its tensors. New features of the library are added here."""
    fields: dict[str, Any] = {"flags": 0}
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
        fields["mask_offsets"] = integers(align, batch)
    elif isinstance(align, int):
        fields["mask_align"] = raw.CUFLASH_ALIGN_OFFSET
        fields["mask_offset"] = integer("align", align)
    elif align in _ALIGNMENTS:
        fields["mask_align"] = _ALIGNMENTS[align]
    else:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
               f"align: {align!r}; {', '.join(map(repr, _ALIGNMENTS))}, an offset, or int32 offsets [B]")
    if kernel is not None:
        fields["kernel"] = kernel.encode()
    if deterministic:
        fields["flags"] |= raw.CUFLASH_PROBLEM_DETERMINISTIC
    if batch_invariant:
        fields["flags"] |= raw.CUFLASH_PROBLEM_BATCH_INVARIANT
    return fields


def attention(q: View, k: View, v: View, o: View, lse: View | None, layout: str,
              **fields: Any) -> raw.cuflash_problem_t:
    """Forward and backward. The views as heads_first() makes them."""
    batch, heads_q, len_q, head_dim = q.shape
    check_shape(k, (batch, "Hkv", "Sk", head_dim), layout)
    check_shape(v, k.shape, layout)
    check_shape(o, q.shape, layout)
    return raw.cuflash_problem_t.new(
        batch=batch, heads_q=heads_q, heads_kv=k.shape[1], len_q=len_q, len_k=k.shape[2],
        head_dim=head_dim, q=tensor(q), k=tensor(k), v=tensor(v), o=tensor(o),
        **row_stats(lse, q.shape[:3], "lse", "lse"), **fields)


def gradients(q: View, k: View, d_o: View, dq: View, dk: View, dv: View,
              layout: str) -> raw.cuflash_gradients_t:
    for view, model in ((d_o, q), (dq, q), (dk, k), (dv, k)):
        check_shape(view, model.shape, layout)
    return raw.cuflash_gradients_t.new(d_o=tensor(d_o), dq=tensor(dq), dk=tensor(dk), dv=tensor(dv))


def decode(q: View, k: View, v: View, o: View, lse: View | None, lengths: View | None, layout: str,
           **fields: Any) -> tuple[raw.cuflash_problem_t, raw.cuflash_kv_cache_t]:
    """The problem and the cache, whose entries may be more than the sequences."""
    batch, heads_q, len_q, head_dim = q.shape
    check_shape(k, ("entries", "Hkv", "max_len", head_dim), layout)
    check_shape(v, k.shape, layout)
    check_shape(o, q.shape, layout)
    problem = raw.cuflash_problem_t.new(
        batch=batch, heads_q=heads_q, heads_kv=k.shape[1], len_q=len_q, head_dim=head_dim,
        q=tensor(q), o=tensor(o), **row_stats(lse, q.shape[:3], "lse", "lse"), **fields)
    cache = raw.cuflash_kv_cache_t.new(
        k=tensor(k), v=tensor(v), max_len=k.shape[2], num_pages=k.shape[0],
        lengths=None if lengths is None else integers(lengths, batch))
    return problem, cache


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
