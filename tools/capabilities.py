#!/usr/bin/env python3
"""Writes docs/capabilities.md: which kernel family takes which feature, by what the library says of itself.

    capabilities.py [--check]      CUFLASH_LIBRARY names the library; no GPU is needed

Every cell is the answer of the explain functions on a problem that has the one feature. A test runs --check.
"""
from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bindings" / "python"))

import cuflash  # noqa: E402
from cuflash import raw  # noqa: E402

PAGE = ROOT / "docs" / "capabilities.md"
ARCH = 90  # which has every CUDA family
SOMEWHERE = 0x100000  # queries read no memory
B, HQ, HKV, SQ, SK, D = 2, 8, 2, 96, 200, 64

HEADER = """# What each kernel family takes

Made by `tools/capabilities.py` from the answers of the library's explain functions for sm_90 and for the CPU device; a test
compares. A family takes a feature if one of its kernels does, for some dtype. Where only `reference` does, a call is
right, and slow. "-": no family yet, the call is refused with a message that names the field.

"""


class Call:
    """A problem of an operation, with what a feature sets."""

    def __init__(self, operation: str, dtype: int) -> None:
        self.operation = operation
        dense = dict(data=SOMEWHERE, flags=raw.CUFLASH_TENSOR_DENSE, dtype=dtype)
        tensor = raw.cuflash_tensor_t.new
        self.problem = raw.cuflash_problem_t.new(
            batch=B, heads_q=HQ, heads_kv=HKV, len_q=SQ, len_k=SK, head_dim=D, lse=SOMEWHERE,
            q=tensor(**dense), k=tensor(**dense), v=tensor(**dense), o=tensor(**dense))
        self.gradients = raw.cuflash_gradients_t.new(d_o=tensor(**dense), dq=tensor(**dense), dk=tensor(**dense), dv=tensor(**dense))
        self.cache = raw.cuflash_kv_cache_t.new(k=tensor(**dense), v=tensor(**dense), max_len=SK)
        self.append = raw.cuflash_kv_append_t.new(
            batch=B, heads_q=HQ, heads_kv=HKV, len=SQ, head_dim=D,
            k=tensor(**dense), v=tensor(**dense), q=tensor(**dense), q_out=tensor(**dense))
        if operation == "decode":
            self.problem.k, self.problem.v, self.problem.len_k = tensor(), tensor(), 0

    def families(self, handle: object, arch: int) -> set[str]:
        """Those that take the call; none where it is refused as a whole."""
        self.problem.target_arch = self.append.target_arch = arch
        structs = {"forward": (self.problem,), "backward": (self.problem, self.gradients), "decode": (self.problem, self.cache),
                   "append": (self.cache, self.append)}[self.operation]
        explain = getattr(raw, f"cuflash_{self.operation}_explain")
        needed = ctypes.c_size_t()
        status = explain(handle, *structs, None, 0, ctypes.byref(needed))
        if status == raw.CUFLASH_ERROR_UNSUPPORTED:
            return set()
        cuflash.check(status)
        text = ctypes.create_string_buffer(needed.value)
        cuflash.check(explain(handle, *structs, text, len(text), None))
        return {kernel["family"] for kernel in json.loads(text.value)["kernels"]
                if kernel["accepted"] or kernel["reason"] == "not in this build of the library"}


def fields(**values: int | float) -> Callable[[Call], None]:
    def set_them(call: Call) -> None:
        for name, value in values.items():
            setattr(call.problem, name, value)
    return set_them


def flag(bits: int, **values: int | float) -> Callable[[Call], None]:
    def set_them(call: Call) -> None:
        call.problem.flags |= bits
        fields(**values)(call)
    return set_them


def wide(call: Call) -> None:
    call.problem.o.dtype = raw.CUFLASH_F32
    for name in ("dq", "dk", "dv"):
        getattr(call.gradients, name).dtype = raw.CUFLASH_F32


def accumulate(call: Call) -> None:
    wide(call)
    if call.operation == "backward":
        call.gradients.flags |= raw.CUFLASH_GRADIENTS_ACCUMULATE
    else:
        call.problem.flags |= raw.CUFLASH_PROBLEM_ACCUMULATE


def gradient_fields(**values: int) -> Callable[[Call], None]:
    def set_them(call: Call) -> None:
        for name, value in values.items():
            setattr(call.gradients, name, value)
    return set_them


def cache_fields(**values: int) -> Callable[[Call], None]:
    def set_them(call: Call) -> None:
        for name, value in values.items():
            setattr(call.cache, name, value)
    return set_them


def append_fields(**values: int | float) -> Callable[[Call], None]:
    def set_them(call: Call) -> None:
        for name, value in values.items():
            setattr(call.append, name, value)
    return set_them


def with_bias(call: Call) -> None:
    fields(bias=SOMEWHERE, bias_head_stride=SQ * SK, bias_row_stride=SK)(call)


def packed(call: Call) -> None:
    fields(cu_seqlens_q=SOMEWHERE, total_q=B * SQ)(call)
    if call.operation != "decode":
        fields(cu_seqlens_k=SOMEWHERE, total_k=B * SK)(call)


def used(call: Call) -> None:
    fields(seqused_q=SOMEWHERE)(call)
    if call.operation != "decode":
        fields(seqused_k=SOMEWHERE)(call)


def cache_of(dtype: int, **values: int) -> Callable[[Call], None]:
    def set_them(call: Call) -> None:
        call.cache.k.dtype = call.cache.v.dtype = dtype
        cache_fields(k_scale=SOMEWHERE, v_scale=SOMEWHERE, **values)(call)
    return set_them


ALL = ("forward", "backward", "decode")
PREFILL = ("forward", "backward")
APPEND = ("append",)
CACHES = ("decode", "append")
FEATURES: list[tuple[str, tuple[str, ...], Callable[[Call], None]]] = [
    ("dense tensors by strides, grouped heads", ALL, fields()),
    ("causal mask", ALL, fields(mask=raw.CUFLASH_MASK_CAUSAL)),
    ("sliding window", ALL, flag(raw.CUFLASH_PROBLEM_WINDOW, window_left=64, window_right=0)),
    ("diagonal offsets of each sequence", ALL, fields(mask=raw.CUFLASH_MASK_CAUSAL, mask_align=raw.CUFLASH_ALIGN_DEVICE_OFFSETS, mask_offsets=SOMEWHERE)),
    ("ragged: packed", ALL, packed),
    ("ragged: lengths of padded tensors", ALL, used),
    ("left padding", ALL, flag(raw.CUFLASH_PROBLEM_LEFT_PADDED, leftpad_k=SOMEWHERE)),
    ("softcap", ALL, fields(softcap=30.0)),
    ("ALiBi", ALL, fields(alibi_slopes=SOMEWHERE)),
    ("additive bias", ALL, with_bias),
    ("sinks", ALL, fields(sinks=SOMEWHERE)),
    ("dropout", PREFILL, fields(dropout_p=0.1)),
    ("head_dim 256", ALL, fields(head_dim=256)),
    ("head_dim 512", ("forward", "decode"), fields(head_dim=512)),
    ("head_dim_v of its own", ALL, fields(head_dim_v=32)),
    ("fp32 outputs of 16-bit inputs", ALL, wide),
    ("accumulation into the outputs", ALL, accumulate),
    ("delta as an output", ("backward",), gradient_fields(delta=SOMEWHERE)),
    ("gradient of the LSE", ("backward",), gradient_fields(dlse=SOMEWHERE)),
    ("lengths on the device", CACHES, cache_fields(lengths=SOMEWHERE)),
    ("parts along the keys", ("decode",), fields(num_splits=4)),
    ("deterministic", ALL, flag(raw.CUFLASH_PROBLEM_DETERMINISTIC)),
    ("batch-invariant", ALL, flag(raw.CUFLASH_PROBLEM_BATCH_INVARIANT)),
    ("paged cache", CACHES, cache_fields(layout=raw.CUFLASH_CACHE_PAGED, block_table=SOMEWHERE, page_size=16, num_pages=64)),
    ("fp8 cache with scales", CACHES, cache_of(raw.CUFLASH_FP8_E4M3)),
    ("int8 cache with scales and zero points", CACHES, cache_of(raw.CUFLASH_INT8, k_zero=SOMEWHERE, v_zero=SOMEWHERE)),
    ("int4 cache, a scale for 32 channels", CACHES, cache_of(raw.CUFLASH_INT4, scale_group=32)),
    ("tree mask", ALL, fields(tree_mask=SOMEWHERE)),
    ("positions", APPEND, append_fields(positions=SOMEWHERE)),
    ("slot mapping", APPEND, append_fields(slot_mapping=SOMEWHERE)),
    ("rotary embedding", APPEND, append_fields(cos=SOMEWHERE, sin=SOMEWHERE, max_position=SK)),
    ("rotary embedding, interleaved, of some channels", APPEND,
     append_fields(cos=SOMEWHERE, sin=SOMEWHERE, max_position=SK, rotary_dim=32, flags=raw.CUFLASH_APPEND_INTERLEAVED)),
    ("RMS norm of queries and keys", APPEND, append_fields(q_norm_weight=SOMEWHERE, k_norm_weight=SOMEWHERE, norm_epsilon=1e-6)),
]


def page() -> str:
    names: dict[str, list[str]] = {"cuda": [], "cpu": []}
    for kernel in cuflash.kernels():
        family, device = kernel.family.decode(), "cpu" if kernel.on_cpu else "cuda"
        if family not in names[device]:
            names[device].append(family)
    columns = [(device, family) for device in ("cuda", "cpu") for family in names[device]]
    text = HEADER
    with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as cpu:
        for operation in (*ALL, *APPEND):
            text += f"## {operation.capitalize()}\n\n|"
            text += "".join(f" | {family} ({'CPU' if device == 'cpu' else 'CUDA'})" for device, family in columns) + " |\n"
            text += "|---" * (len(columns) + 1) + "|\n"
            for title, operations, change in FEATURES:
                if operation not in operations:
                    continue
                taken = set()
                for dtype in (raw.CUFLASH_F16, raw.CUFLASH_BF16) if change is wide else (raw.CUFLASH_F32, raw.CUFLASH_F16, raw.CUFLASH_BF16):
                    for device, handle, arch in (("cuda", None, ARCH), ("cpu", cpu, 0)):
                        call = Call(operation, dtype)
                        change(call)
                        taken |= {(device, family) for family in call.families(handle, arch)}
                text += f"| {title} |" + "".join(f" {'yes' if column in taken else '-'} |" for column in columns) + "\n"
            text += "\n"
    return text.rstrip("\n") + "\n"


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() == text:
        return 0
    print(f"{PAGE} is not what the library says: run tools/capabilities.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
