"""cffi reads the header by itself, agrees with the ctypes layer, and calls every function with bad
values: each answers with a status and a message, none crashes."""
from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import cuflash
import pytest
from c_header import function_names, load
from cuflash import cuda, raw

FFI, LIB = load(cuflash.library_path())
FUNCTIONS = function_names(LIB)
STRUCTS = [name for name in FFI.list_types()[0]
           if FFI.typeof(name).kind == "struct"]
CONSTANTS = [name for name in dir(LIB) if name.startswith("CUFLASH_")]

OPERATIONS = {"cuflash_attention_forward", "cuflash_attention_backward", "cuflash_attention_decode",
              "cuflash_kv_cache_append", "cuflash_merge_states", *(name for name in FUNCTIONS
                                        if name.endswith(("_f32", "_f16", "_bf16")))}


# ---- two readers of one header ---------------------------------------------------------------

@pytest.mark.parametrize("name", STRUCTS)
def test_struct_layout(name):
    struct = getattr(raw, name)
    assert ctypes.sizeof(struct) == FFI.sizeof(name)
    assert ctypes.alignment(struct) == FFI.alignof(name)
    fields = FFI.typeof(name).fields
    assert [field for field, _ in struct._fields_] == [field for field, _ in fields]
    for field, description in fields:
        assert getattr(struct, field).offset == description.offset, field
        assert getattr(struct, field).size == FFI.sizeof(description.type), field


def test_constants():
    assert {name: getattr(LIB, name) for name in CONSTANTS} == {
        name: int(getattr(raw, name)) for name in dir(raw)
        if name.startswith("CUFLASH_") and not name.startswith("CUFLASH_VERSION_")}


def test_functions(api):
    """Both see the same functions, with parameters of the same sizes."""
    assert set(FUNCTIONS) == {function["name"] for function in api["functions"]}
    for name in FUNCTIONS:
        prototype, bound = FFI.typeof(getattr(LIB, name)), getattr(raw, name)
        assert [FFI.sizeof(kind) for kind in prototype.args] == \
            [ctypes.sizeof(kind) for kind in bound.argtypes], name
        returned = 0 if prototype.result.kind == "void" else FFI.sizeof(prototype.result)
        assert returned == (ctypes.sizeof(bound.restype) if bound.restype else 0), name


# ---- every function, badly called ------------------------------------------------------------

@pytest.fixture(scope="module", params=["default", "cpu"])
def answers(request):
    script = Path(__file__).with_name("every_call.py")
    run = subprocess.run([sys.executable, str(script), cuflash.library_path(), request.param],
                         text=True, capture_output=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return request.param, json.loads(run.stdout)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_badly_called(answers, name):
    device, functions = answers
    answer = functions[name]
    assert answer["died"] is None, f"{name} died of {answer['died']} in: {answer['last']}"
    known = {int(status) for status in raw.cuflash_status}
    for description, status, message in answer["calls"]:
        where = f"{name}, {description}: {status} {message!r}"
        assert status in known and status != raw.CUFLASH_ERROR_INTERNAL, where
        assert bool(message) == (status != 0), where
    if name in OPERATIONS:
        status = {call[0]: call[1] for call in answer["calls"]}
        if device == "cpu":
            assert status["valid"] == 0
        elif not cuda.available():
            assert status["valid"] in (raw.CUFLASH_ERROR_NO_DEVICE, raw.CUFLASH_ERROR_NOT_BUILT)
        assert sum(call[1] != 0 for call in answer["calls"]) > 10, "the bad values are not bad"
