"""Caches of keys and values: what decode attends to, and where new tokens go."""
from __future__ import annotations

from typing import Any, NamedTuple

from . import _problem
from . import _raw as raw
from ._arrays import BYTES, CODES, FLOATS, Array, Arrays, View, refuse, spelled
from ._call import Call, read
from ._errors import integer
from ._handle import Handle
from ._problem import dense, heads_first, in_layout, integers


_ELEMENTS = {**FLOATS, **CODES}
_SCALES = ("k_scale", "v_scale", "k_zero", "v_zero")


class KVCache:
    """Keys and values of sequences: entry b of k and v, or entry batch_idx[b], holds sequence b.

    The object only names arrays of one library, which all attributes are and may be replaced by others;
    nothing is copied, and shapes and dtypes are looked at by the calls.

    k: [entries, Hkv, max_len, D], v: [entries, Hkv, max_len, Dv]; with layout="bshd" both are
    [entries, max_len, Hkv, D]. Any strides with contiguous channels. v None: the first head_dim_v
    channels of k, or all, are the values.
    lengths: int32 [B], the slots in use of each sequence; None: all. No call changes them.
    batch_idx: int32 [B]; a sequence whose entry is not in the cache has no keys.

    k and v may each be float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2, or uint8 with
    k_dtype or v_dtype "int4", "float8_e4m3fn" or "float8_e5m2": what the bytes are. Of int4 a byte holds two
    channels, the even one in its low half; head_dim_v tells an odd number of them.

    k_scale, v_scale, k_zero, v_zero: an element stands for (stored - zero) * scale. [entries, Hkv, max_len, G]
    in the order of the layout, or what NumPy would repeat to that along all but G, which is 1 or the
    number of groups of 32, 64 or 128 channels. float32, float16 or bfloat16, all with the same dtype and
    strides. Zero points are for int8 and int4."""

    def __init__(
        self, k: Array, v: Array | None = None, *, lengths: Array | None = None, batch_idx: Array | None = None,
        k_dtype: str | None = None, v_dtype: str | None = None, k_scale: Array | None = None,
        v_scale: Array | None = None, k_zero: Array | None = None, v_zero: Array | None = None,
        head_dim_v: int | None = None, layout: str = "bhsd",
    ):
        self.k, self.v, self.lengths, self.batch_idx = k, v, lengths, batch_idx
        self.k_dtype, self.v_dtype = k_dtype, v_dtype
        self.k_scale, self.v_scale, self.k_zero, self.v_zero = k_scale, v_scale, k_zero, v_zero
        self.head_dim_v, self.layout = head_dim_v, layout

    def append(
        self, k: Array, v: Array | None = None, *, q: Array | None = None, q_out: Array | None = None,
        positions: Array | None = None, slot_mapping: Array | None = None, cos: Array | None = None,
        sin: Array | None = None, interleaved: bool = False, q_norm_weight: Array | None = None,
        k_norm_weight: Array | None = None, norm_epsilon: float = 0.0, layout: str = "bhsd",
        handle: Handle | None = None, stream: Any = None,
    ) -> Array | None:
        """Writes the keys and values of T new tokens of each sequence, quantised to what the cache holds.

        k: [B, Hkv, T, D], v: [B, Hkv, T, Dv], None: keys alone are written. Token i of sequence b gets
        position positions[b, i], or lengths[b] + i without them, and the slot of that number, as decode finds
        it. The lengths are those from before and stay as they are: add T to them before the tokens are
        attended to. positions: int32 [B, T]; where there is no such slot the token is skipped.
        slot_mapping: int64 [B, T], slots in the whole cache instead, slot n % page_size of page
        n / page_size (without pages: max_len for page_size); a negative one skips the token.

        k_norm_weight: [D], k is divided by the root of its mean square plus norm_epsilon and multiplied by it.
        cos, sin: float32 [max_position, R / 2], then the first R channels are rotated by their position,
        channels i and i + R / 2 together, with interleaved 2 i and 2 i + 1.
        q: [B, Hq, T, D], gets the same with q_norm_weight, and is returned: a new array, or q_out, which may be
        q. All these arrays are of k's dtype.
        layout: of k, v, q and q_out. handle, stream: as in attention()."""
        call = append(self, k, v, q=q, q_out=q_out, positions=positions, slot_mapping=slot_mapping, cos=cos, sin=sin,
                      interleaved=interleaved, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight,
                      norm_epsilon=norm_epsilon, layout=layout, handle=handle, stream=stream)
        call.run(raw.cuflash_kv_cache_append)
        return None if q is None else call.output("q_out")

    def arrays(self) -> dict[str, Array | None]:
        """All of them, by the names that messages have for them."""
        return {"k_cache": self.k, "v_cache": self.v, "lengths": self.lengths, "batch_idx": self.batch_idx,
                "k_scale": self.k_scale, "v_scale": self.v_scale, "k_zero": self.k_zero, "v_zero": self.v_zero}

    def read(self, arrays: Arrays, batch: int, heads: int, head_dim: int) -> Stored:
        """For a call of so many sequences and heads, with the views of arrays()."""
        _problem.check_layout(self.layout)
        k, k_code = _stored(arrays["k_cache"], self.layout, "k_dtype", self.k_dtype, head_dim)
        self._check_extents(k, batch)
        _problem.check_some(k, k.shape[1], "heads", heads)
        _problem.check_shape(k, (*k.shape[:3], head_dim), self.layout)
        fields = self._places(arrays, k, batch)
        fields["k"] = _tensor(k, k_code)
        head_dim_v = head_dim if self.head_dim_v is None else integer("head_dim_v", self.head_dim_v)
        if self.v is not None:
            v, v_code = _stored(arrays["v_cache"], self.layout, "v_dtype", self.v_dtype, self.head_dim_v)
            head_dim_v = v.shape[3] if self.head_dim_v is None else head_dim_v
            _problem.check_shape(v, (*k.shape[:3], head_dim_v), self.layout)
            _problem.check_some(v, v.shape[3], "channels", head_dim)
            fields["v"] = _tensor(v, v_code)
        if head_dim_v < 1:  # 0 would be head_dim to the library
            refuse(raw.CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM, f"head_dim_v: {head_dim_v}; at least 1")
        if "lengths" in arrays:
            fields["lengths"] = integers(arrays["lengths"], batch)
        if any([name in arrays for name in _SCALES]):
            fields.update(_scales(arrays, k.shape[:3], {"k": head_dim, "v": head_dim_v}, self.layout))
        return Stored(k.shape[1], fields["max_len"], head_dim_v,
                      int(raw.CUFLASH_PROBLEM_V_IS_K_PREFIX) if self.v is None else 0,
                      raw.cuflash_kv_cache_t.new(**fields))

    def _check_extents(self, k: View, batch: int) -> None:
        _problem.check_some(k, k.shape[0], "entries", batch)

    def _places(self, arrays: Arrays, k: View, batch: int) -> dict[str, Any]:
        """The fields that tell where a sequence lies."""
        fields = {"num_pages": k.shape[0], "max_len": k.shape[2]}
        if "batch_idx" in arrays:
            fields["cache_batch_idx"] = integers(arrays["batch_idx"], batch)
        return fields


class PagedKVCache(KVCache):
    """Keys and values in pages, which a table gives to sequences; else as KVCache.

    k: [pages, Hkv, page_size, D], v: [pages, Hkv, page_size, Dv] (with layout="bshd" [pages, page_size, Hkv, D]),
    so are the scales.
    block_table: int32 or int64 [B, columns], the pages of each sequence in order; any strides with contiguous
    columns. Or indptr: int32 [B + 1] and indices: int32 or int64, the pages of sequence b are
    indices[indptr[b]] to before indices[indptr[b + 1]]; that these are there nobody can check.
    max_len: the longest sequence; what is longer is cut, and launches are made for it. Columns * page_size if
    None, which is only for block tables.
    Entries past a sequence's length are not read; an id that is no page hides its keys."""

    def __init__(
        self, k: Array, v: Array | None = None, block_table: Array | None = None, *, indptr: Array | None = None,
        indices: Array | None = None, max_len: int | None = None, lengths: Array | None = None,
        k_dtype: str | None = None, v_dtype: str | None = None, k_scale: Array | None = None,
        v_scale: Array | None = None, k_zero: Array | None = None, v_zero: Array | None = None,
        head_dim_v: int | None = None, layout: str = "bhsd",
    ):
        super().__init__(k, v, lengths=lengths, k_dtype=k_dtype, v_dtype=v_dtype, k_scale=k_scale, v_scale=v_scale,
                         k_zero=k_zero, v_zero=v_zero, head_dim_v=head_dim_v, layout=layout)
        self.block_table, self.indptr, self.indices, self.max_len = block_table, indptr, indices, max_len

    def arrays(self) -> dict[str, Array | None]:
        return {**super().arrays(), "block_table": self.block_table, "indptr": self.indptr, "indices": self.indices}

    def _check_extents(self, k: View, batch: int) -> None:
        pass  # sequences may have no page at all

    def _places(self, arrays: Arrays, k: View, batch: int) -> dict[str, Any]:
        pages, _, page_size, _ = k.shape
        fields: dict[str, Any] = {"num_pages": pages, "page_size": page_size}
        by_table = "block_table" in arrays
        if by_table == ("indptr" in arrays) or ("indptr" in arrays) != ("indices" in arrays):
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE, "block_table, or indptr and indices: one of the two")
        ids = arrays["block_table" if by_table else "indices"]
        if by_table:
            _problem.check_shape(ids, (batch, "columns"))
            columns = ids.shape[1]
            max_len = columns * page_size if self.max_len is None else integer("max_len", self.max_len)
            if max_len > columns * page_size:
                refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
                       f"block_table: {columns} columns of pages of {page_size}; max_len is {max_len}")
            fields.update(layout=raw.CUFLASH_CACHE_PAGED, block_table=ids.pointer, block_table_stride=ids.strides[0])
        else:
            _problem.check_shape(ids, ("pages",))
            if self.max_len is None:
                refuse(raw.CUFLASH_ERROR_NULL_POINTER, "max_len: None; the longest sequence, which indices do not tell")
            max_len = integer("max_len", self.max_len)
            fields.update(layout=raw.CUFLASH_CACHE_PAGED_CSR, page_indices=ids.pointer,
                          page_indptr=integers(arrays["indptr"], batch + 1))
        if ids.dtype not in ("i32", "i64"):
            refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE, f"{ids.name}: {spelled(ids.dtype)}; int32 or int64")
        _problem.check_contiguous(ids)
        fields.update(max_len=max_len, id_bits=64 if ids.dtype == "i64" else 32)
        return fields


class Stored(NamedTuple):
    """A cache as the C API has it, and what a call needs of its extents."""

    heads_kv: int
    max_len: int
    head_dim_v: int
    problem_flags: int
    struct: raw.cuflash_kv_cache_t


def append(cache: KVCache, k, v=None, *, q=None, q_out=None, layout="bhsd", handle=None, stream=None, query=False,
           positions=None, slot_mapping=None, cos=None, sin=None, interleaved=False, q_norm_weight=None,
           k_norm_weight=None, norm_epsilon=0.0) -> Call:
    """The call of KVCache.append()."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: {type(cache).__name__} is no cuflash.KVCache")
    _problem.check_layout(layout)
    if v is not None and cache.v is None:
        refuse(raw.CUFLASH_ERROR_INVALID_VALUE, "v: given, but the cache has no values besides its keys")
    if q is None:
        for name, value in (("q_out", q_out), ("q_norm_weight", q_norm_weight)):
            if value is not None:
                refuse(raw.CUFLASH_ERROR_INVALID_VALUE, f"{name}: given without q")
    further = {"positions": positions, "slot_mapping": slot_mapping, "cos": cos, "sin": sin,
               "q_norm_weight": q_norm_weight, "k_norm_weight": k_norm_weight}
    arrays = read(stream, query, {}, k=k, v=v, q=q, q_out=q_out, **further, **cache.arrays())
    for name in ("k_cache", "v_cache"):
        if name in arrays:
            arrays.check_writable(name)
    if q is not None:
        arrays.add_output("q_out", arrays["q"].shape, arrays["q"].dtype, like="q")
    k, v, q, q_out = (heads_first(arrays[name], layout) if name in arrays else None
                      for name in ("k", "v", "q", "q_out"))
    stored = cache.read(arrays, k.shape[0], k.shape[1], k.shape[3])
    return Call(arrays, handle, stored.struct, _problem.append(
        k, v, q, q_out, layout, stored.heads_kv, stored.head_dim_v, interleaved=interleaved, norm_epsilon=norm_epsilon,
        **{name: arrays.get(name) for name in further}))


def _stored(view: View, layout: str, argument: str, holds: str | None, channels: int | None) -> tuple[View, int]:
    """An array of a cache with its heads first, in elements of the dtype that is returned too. channels: how many
    there are, where int4 does not tell."""
    _problem.check_rank(view, layout.upper())
    if view.dtype == "uint8":
        if holds not in BYTES:
            refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE,
                   f"{view.name}: uint8; {argument}, {holds!r}, must tell what it holds, one of {', '.join(BYTES)}")
        code = BYTES[holds]
    else:
        if holds is not None:
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
                   f"{argument}: {holds!r}, but {view.name} is {spelled(view.dtype)}; only for uint8")
        if view.dtype not in _ELEMENTS:
            refuse(raw.CUFLASH_ERROR_UNSUPPORTED_DTYPE,
                   f"{view.name}: {spelled(view.dtype)}; {', '.join(map(spelled, _ELEMENTS))} or uint8")
        code = _ELEMENTS[view.dtype]
    _problem.check_contiguous(view)
    shape, strides = view.shape, view.strides
    if layout == "bhsd" and code != raw.CUFLASH_INT4:
        return view, code
    if code == raw.CUFLASH_INT4:
        held = 2 * shape[3]
        shape = (*shape[:3], channels if channels == held - 1 else held)
        strides = (*(2 * stride for stride in strides[:3]), 1)
    return View(view.name, view.pointer, _problem.from_layout(shape, layout, 1),
                _problem.from_layout(strides, layout, 0), view.dtype, view.writable, view.owner), code


def _tensor(view: View, code: int) -> raw.cuflash_tensor_t:
    batch, head, row, _ = view.strides
    return raw.cuflash_tensor_t.new(data=view.pointer, batch_stride=batch, head_stride=head, row_stride=row, dtype=code)


def _scales(arrays: Arrays, slots: tuple, channels: dict[str, int], layout: str) -> dict[str, Any]:
    """The fields of scales and zero points. channels: of k and of v."""
    fields: dict[str, Any] = {}
    groups = [0, 32, 64, 128]
    first = None
    for name in _SCALES:
        view = arrays.get(name)
        if view is None:
            continue
        strides = _problem.repeated(view, (*in_layout((*slots, 1), layout)[:3], "groups"))
        _problem.check_floats(view)
        of = channels[name[0]]
        groups = [group for group in groups if view.shape[-1] == (-(-of // group) if group else 1)]
        if not groups:
            refuse(raw.CUFLASH_ERROR_DIMENSION_MISMATCH,
                   f"{name}: {view.shape[-1]} groups of {of} channels; 1, or as many as there are of 32, 64 or 128, "
                   "for keys and values alike")
        if 0 in view.shape:
            continue
        page, head, slot, _ = _problem.from_layout(strides, layout, 0)
        if first is None:
            first = view
            fields.update(scale_page_stride=page, scale_head_stride=head, scale_slot_stride=slot,
                          scale_dtype=FLOATS[view.dtype])
        elif (page, head, slot, FLOATS[view.dtype]) != (
                fields["scale_page_stride"], fields["scale_head_stride"], fields["scale_slot_stride"],
                fields["scale_dtype"]):
            refuse(raw.CUFLASH_ERROR_INVALID_VALUE,
                   f"{name}: {spelled(view.dtype)} with strides {view.strides}; as {first.name}, "
                   f"{spelled(first.dtype)} with {first.strides}")
        fields[name] = view.pointer
    if first is not None:
        fields["scale_group"] = groups[0]
    return fields
