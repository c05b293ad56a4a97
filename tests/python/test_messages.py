"""A refused call says which argument, what it got and what it wants; a field without a kernel is
refused by name. All on the CPU device, whose checks are those of every device."""
from __future__ import annotations

import ctypes
import json
import math

import numpy as np
import pytest
from arrays import poisoned, problem, tensor
from conftest import ROOT
from cuflash import raw

API = json.loads((ROOT / "bindings" / "cuflash.json").read_text())
PHRASE = "not implemented yet"

SHAPE = (2, 4, 6, 16)


class Call:
    """A small valid problem with all that the operations want; tests spoil one thing."""

    def __init__(self, handle):
        self.handle = handle
        self.q, self.k, self.v, self.d_o = (np.zeros(SHAPE, np.float32) for _ in range(4))
        self.o, self.dq, self.dk, self.dv = (poisoned(SHAPE) for _ in range(4))
        self.lse = np.zeros(SHAPE[:3], np.float32)
        self.lengths = np.zeros(SHAPE[:1], np.int32)
        self.problem = problem(self.q, self.k, self.v, self.o, self.lse)
        self.gradients = raw.cuflash_gradients_t.new(
            d_o=tensor(self.d_o), dq=tensor(self.dq), dk=tensor(self.dk), dv=tensor(self.dv))
        self.cache = raw.cuflash_kv_cache_t.new(k=tensor(self.k), v=tensor(self.v),
                                                max_len=SHAPE[2])
        self.merge = raw.cuflash_merge_t.new(
            num_parts=1, batch=2, heads=4, len=6, head_dim=16, parts=tensor(self.q),
            part_stride=self.q.size, lse_parts=self.lse.ctypes.data,
            lse_part_stride=self.lse.size, o=tensor(self.o))

    def forward(self):
        return raw.cuflash_attention_forward(self.handle, self.problem, None)

    def backward(self):
        return raw.cuflash_attention_backward(self.handle, self.problem, self.gradients, None)

    def decode(self):
        self.problem.k = self.problem.v = raw.cuflash_tensor_t()
        self.problem.len_k = 0
        return raw.cuflash_attention_decode(self.handle, self.problem, self.cache, None)

    def merge_states(self):
        return raw.cuflash_merge_states(self.handle, self.merge, None)


@pytest.fixture
def call(cpu):
    return Call(cpu)


def message() -> str:
    return raw.cuflash_last_error().decode()


def set_path(target: object, path: str, value: object) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    assert hasattr(target, name)
    setattr(target, name, value)


def test_the_unspoilt_calls_succeed(call):
    for operation in (call.forward, call.backward, call.merge_states, call.decode):
        assert operation() == 0, message()
        assert message() == ""


# operation, field, value, status, what the message must hold
BAD = [
    ("forward", "problem.struct_size", 8, 14, ["problem.struct_size", "8", "sizeof"]),
    ("forward", "problem.flags", 1 << 31, 10, ["problem.flags", "0x80000000"]),
    ("forward", "problem.batch", -1, 1, ["problem.batch", "-1", "0 to"]),
    ("forward", "problem.len_q", 2**31, 1, ["problem.len_q", "2147483648", "0 to"]),
    ("forward", "problem.head_dim", 577, 6, ["head_dim", "577", "1 to 576"]),
    ("backward", "problem.head_dim", 257, 6, ["head_dim", "257", "1 to 256"]),
    ("forward", "problem.head_dim", 0, 6, ["head_dim", "0", "1 to 576"]),
    ("forward", "problem.heads_kv", 3, 2, ["heads_q", "heads_kv", "4", "3"]),
    ("forward", "problem.q.dtype", 0, 7, ["q.dtype", "0", "CUFLASH_F16"]),
    ("forward", "problem.k.dtype", 2, 7, ["k.dtype", "2"]),
    ("forward", "problem.q.dtype", 99, 7, ["q.dtype", "99", "CUFLASH_F16"]),
    ("forward", "problem.q.data", None, 3, ["q", "NULL"]),
    ("forward", "problem.q.flags", 2, 10, ["q.flags", "0x2", "CUFLASH_TENSOR_DENSE"]),
    ("forward", "problem.k.row_stride", -16, 8, ["k", "row_stride", "-16", "negative"]),
    ("forward", "problem.o.row_stride", 0, 15, ["problem.o.row_stride", "output"]),
    ("forward", "problem.mask", 2, 8, ["problem.mask", "2", "causal"]),
    ("forward", "problem.mask_align", 4, 8, ["problem.mask_align", "4", "bottom-right"]),
    ("forward", "problem.mask_offset", 1, 8, ["problem.mask_offset", "CUFLASH_ALIGN_OFFSET"]),
    ("forward", "problem.window_left", 1, 8, ["window_left", "CUFLASH_PROBLEM_WINDOW"]),
    ("forward", "problem.scale", 0.5, 8, ["problem.scale", "0.5", "CUFLASH_PROBLEM_SCALE_SET"]),
    ("forward", "problem.math_mode", 7, (8, 10), ["problem.math_mode"]),
    ("forward", "problem.num_splits", 2, (8, 10), ["problem.num_splits", "2"]),
    ("forward", "problem.kernel", b"nonsense", 8, ["kernel", "nonsense", "fwd_reference_cpu"]),
    ("forward", "problem.kernel", b"fwd_reference", 10, ["fwd_reference", "CUDA"]),
    ("backward", "problem.lse", None, 3, ["problem.lse", "NULL"]),
    ("backward", "gradients.struct_size", 8, 14, ["gradients.struct_size", "8"]),
    ("backward", "gradients.flags", 1 << 31, 10, ["gradients.flags", "0x80000000"]),
    ("backward", "gradients.dq.data", None, 3, ["gradients.dq", "NULL"]),
    ("decode", "cache.struct_size", 8, 14, ["cache.struct_size", "8"]),
    ("decode", "cache.flags", 1, 10, ["cache.flags", "0x1"]),
    ("decode", "cache.max_len", -1, 1, ["cache.max_len", "-1"]),
    ("decode", "cache.layout", 3, 8, ["cache.layout", "3", "contiguous"]),
    ("decode", "problem.num_splits", 1025, 8, ["problem.num_splits", "1025", "1024"]),
    ("merge_states", "merge.struct_size", 8, 14, ["merge.struct_size", "8"]),
    ("merge_states", "merge.flags", 1 << 31, 10, ["merge.flags", "0x80000000"]),
    ("merge_states", "merge.num_parts", -1, 1, ["merge.num_parts", "-1"]),
    ("merge_states", "merge.lse_parts", None, 3, ["merge.lse_parts", "NULL"]),
]


@pytest.mark.parametrize("operation, field, value, status, words", BAD,
                         ids=[f"{row[0]}-{row[1]}={row[2]}" for row in BAD])
def test_message(call, operation, field, value, status, words):
    set_path(call, field, value)
    got = getattr(call, operation)()
    assert got in (status if isinstance(status, tuple) else (status,)), message()
    for word in words:
        assert word in message()
    assert np.isnan(call.o).all(), "a refused call has written"


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 2.0**127 * 1.5])
def test_scale(call, scale):
    call.problem.flags = raw.CUFLASH_PROBLEM_SCALE_SET
    call.problem.scale = scale
    assert call.forward() == raw.CUFLASH_ERROR_INVALID_DIMENSION
    assert "problem.scale" in message() and "2^127" in message()


@pytest.mark.parametrize("operation, field", [
    *(("forward", f"problem.{name}.data") for name in ("q", "k", "v", "o")),
    ("forward", "problem.lse"),
    ("forward", "problem.mask_offsets"),
    ("forward", "problem.workspace"),
    ("backward", "gradients.dq.data"),
    ("decode", "cache.k.data"),
    ("decode", "cache.lengths"),
])
def test_misaligned(call, operation, field):
    call.problem.mask = raw.CUFLASH_MASK_CAUSAL
    call.problem.mask_align = raw.CUFLASH_ALIGN_DEVICE_OFFSETS
    call.problem.mask_offsets = call.lengths.ctypes.data
    set_path(call, field, call.d_o.ctypes.data + 1)
    assert getattr(call, operation)() == raw.CUFLASH_ERROR_MISALIGNED
    assert field.replace(".data", "") in message()


@pytest.mark.parametrize("name", ["q", "k", "v", "lse"])
def test_output_on_an_input(call, name):
    value = getattr(call.problem, name)
    call.problem.o.data = value if name == "lse" else value.data
    assert call.forward() == raw.CUFLASH_ERROR_ALIASING
    assert "problem.o" in message() and f"problem.{name}" in message()


def test_unknown_tail(call):
    """A longer struct passes while what the library does not know is zero."""
    size = ctypes.sizeof(call.problem)
    longer = (ctypes.c_char * (size + 16))()
    ctypes.memmove(longer, ctypes.byref(call.problem), size)
    grown = raw.cuflash_problem_t.from_buffer(longer)
    grown.struct_size = size + 16
    assert raw.cuflash_attention_forward(call.handle, grown, None) == 0, message()
    longer[size + 8] = 1
    assert raw.cuflash_attention_forward(call.handle, grown, None) == 14
    assert f"byte {size + 8}" in message()


# ---- what is not implemented yet -------------------------------------------------------------

STRUCTS = {  # argument -> the operations that read it
    "problem": ["forward", "backward", "decode"],
    "gradients": ["backward"],
    "cache": ["decode"],
}
C_NAMES = {"problem": "cuflash_problem_t", "gradients": "cuflash_gradients_t",
           "cache": "cuflash_kv_cache_t"}


def unimplemented_fields() -> list:
    """(operation, argument, field) for each field whose comment has the phrase."""
    by_name = {struct["name"]: struct for struct in API["structs"]}
    return [
        (operation, argument, field["name"])
        for argument, operations in STRUCTS.items()
        for field in by_name[C_NAMES[argument]]["fields"] if PHRASE in field["comment"]
        for operation in operations
    ]


@pytest.mark.parametrize("operation, argument, name", unimplemented_fields())
def test_unimplemented_field(call, operation, argument, name):
    struct = getattr(call, argument)
    kind = dict(type(struct)._fields_)[name]
    setattr(struct, name, call.lse.ctypes.data if kind is ctypes.c_void_p else 1)
    assert getattr(call, operation)() == raw.CUFLASH_ERROR_UNSUPPORTED
    assert f"{argument}.{name}" in message()


CONSTANTS = {  # enum -> operation, field, statuses, whether the message names the constant
    "cuflash_dtype": ("forward", "problem.q.dtype", (7, 10)),
    "cuflash_math": ("forward", "problem.math_mode", (10,)),
    "cuflash_problem_flag": ("forward", "problem.flags", (10,)),
    "cuflash_gradients_flag": ("backward", "gradients.flags", (10,)),
    "cuflash_cache_layout": ("decode", "cache.layout", (10,)),
}


def unimplemented_constants() -> list:
    return [(enum["tag"], value["name"], value["value"]) for enum in API["enums"]
            for value in enum["values"] if PHRASE in value["comment"]]


@pytest.mark.parametrize("tag, name, value", unimplemented_constants())
def test_unimplemented_constant(call, tag, name, value):
    operation, field, statuses = CONSTANTS[tag]
    set_path(call, field, value)
    assert getattr(call, operation)() in statuses
    assert field in message()
    if field.endswith(".flags"):
        assert name in message()


# ---- the positional functions keep their order of checks -------------------------------------

POSITIONAL = [
    ({"q": None, "seq_len": 0, "head_dim": 999, "scale": math.nan}, 3, "Q"),
    ({"seq_len": 0, "head_dim": 999, "scale": math.nan}, 1, "seq_len"),
    ({"head_dim": 257, "scale": math.nan}, 6, "head_dim"),
    ({"scale": math.nan}, 1, "scale"),
    ({"scale": -1.0}, 1, "scale"),
]


@pytest.mark.parametrize("spoilt, status, word", POSITIONAL)
def test_positional_order_of_checks(call, cpu_by_default, spoilt, status, word):
    given = {"q": call.q.ctypes.data, "seq_len": SHAPE[2], "head_dim": SHAPE[3], "scale": 1.0,
             **spoilt}
    got = raw.cuflash_attention_forward_f32(
        given["q"], call.k.ctypes.data, call.v.ctypes.data, call.o.ctypes.data,
        call.lse.ctypes.data, SHAPE[0], SHAPE[1], given["seq_len"], given["head_dim"],
        given["scale"], 0, None)
    assert got == status
    assert word in message()


def test_statuses_have_names_and_sentences(api):
    statuses = next(enum for enum in api["enums"] if enum["tag"] == "cuflash_status")["values"]
    for status in statuses:
        assert raw.cuflash_status_name(status["value"]).decode() == status["name"]
    sentences = {raw.cuflash_error_string(status["value"]) for status in statuses}
    assert len(sentences) == len(statuses)
    for unknown in (-1, len(statuses), 2**31 - 1):
        assert raw.cuflash_status_name(unknown) == b"CUFLASH_STATUS_UNKNOWN"
        assert raw.cuflash_error_string(unknown) == b"Unknown error"


def test_last_error_copy(call):
    call.problem.batch = -1
    call.forward()
    whole = raw.cuflash_last_error()
    assert raw.cuflash_last_error_copy(None, 0) == len(whole)
    buffer = ctypes.create_string_buffer(b"#" * 16, 16)
    assert raw.cuflash_last_error_copy(buffer, 8) == len(whole)
    assert buffer.raw == whole[:7] + b"\0" + b"#" * 8
