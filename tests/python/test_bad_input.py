"""The calls of tests/bad_input/table.tsv in Python, and in every language those that need another
library than the one under test. All on the CPU device."""
from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import cuflash
import numpy as np
import pytest
from arrays import poisoned, random, run_python
from cargo_process import FOUND, TARGET, cargo, link_library, must_pass
from cargo_process import MISSING as NO_CARGO
from conftest import ROOT
from cuflash import cuda, raw
from julia_process import JULIA, try_julia
from julia_process import MISSING as NO_JULIA
from stub_library import build_stub
from test_messages import Call

LANGUAGES = ["c", "cpp", "python", "rust", "julia"]


@dataclass
class Row:
    id: str
    operation: str
    spoilt: str
    status: str
    words: str
    cannot: str
    reasons: dict = field(init=False)  # by language

    def __post_init__(self):
        parts = [] if self.cannot == "-" else self.cannot.split(" | ")
        self.reasons = dict(part.split(": ", 1) for part in parts)

    def check_message(self, message: str) -> None:
        for word in self.words.split(","):
            assert word == "-" or any(either in message for either in word.split("|")), (word, message)


ROWS = [Row(*line.split("\t")) for line in (ROOT / "tests/bad_input/table.tsv").read_text().splitlines()
        if not line.startswith("#")]
IN_PROCESS = [row for row in ROWS if row.operation != "library"]
LIBRARY = [row for row in ROWS if row.operation == "library"]


def test_table(api):
    statuses = next(enum for enum in api["enums"] if enum["tag"] == "cuflash_status")["values"]
    names = {value["name"].replace("CUFLASH_ERROR_", "") for value in statuses} | {"-"}
    assert len({row.id for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert set(row.status.split("|")) <= names
        languages = [language for language in LANGUAGES if language in row.reasons]
        assert list(row.reasons) == languages != LANGUAGES
        assert all(row.reasons.values())


# ---- in Python -----------------------------------------------------------------------------------------


class Good:
    """Arguments of a small call that is right."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.q, self.d_o = random(rng, (2, 4, 5, 8)), random(rng, (2, 4, 5, 8))
        self.k, self.v = random(rng, (2, 2, 7, 8)), random(rng, (2, 2, 7, 8))
        self.out, self.lse = poisoned(self.q.shape), poisoned(self.q.shape[:3])

    def forward(self, **changes):
        given = {"q": self.q, "k": self.k, "v": self.v, "out": self.out, **changes}
        return cuflash.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    def backward(self, **changes):
        lse = np.ones(self.q.shape[:3], np.float32)
        return cuflash.attention_backward(self.d_o, self.q, self.k, self.v, self.q.copy(), lse, **changes)

    def decode(self, **changes):
        return cuflash.decode(self.q, self.k, self.v, out=self.out, **changes)


    def append(self, **changes):
        return cuflash.KVCache(self.out, self.out.copy()).append(self.q[:, :, :1], self.q[:, :, :1], **changes)


class OnGpu:
    """An array whose memory, so it says, is on a GPU."""

    __cuda_array_interface__ = {"version": 3, "shape": (2, 4, 5, 8), "typestr": "<f4", "data": (4096, False)}


def on_gpu(good):
    with mock.patch.object(cuda, "device_of", lambda pointer: 0):
        good.forward(q=OnGpu())


def between_elements(array):
    moved = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), 1)
    moved[...] = array
    return moved


def repeated(array, strides):
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def merge_with_fewer_rows(good):
    cuflash.merge_states(good.q[None], np.zeros((1, 2, 4, 4), np.float32), out=good.out)


def one_byte_short(good):
    """The package takes workspace from the pool: a caller's is a matter of the raw layer."""
    with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as handle:
        call = Call(handle)
        bytes_ = ctypes.c_size_t()
        cuflash.check(raw.cuflash_forward_workspace_size(handle, call.problem, ctypes.byref(bytes_)))
        assert bytes_.value > 0
        memory = np.empty(bytes_.value + 256, np.uint8)
        call.problem.workspace = memory.ctypes.data + -memory.ctypes.data % 256
        call.problem.workspace_size = bytes_.value - 1
        cuflash.check(call.forward())


def option(good, key, value):
    with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as handle:
        handle.set_option(key, value)


def freed_handle(good):
    handle = cuflash.Handle(raw.CUFLASH_DEVICE_CPU)
    handle.close()
    handle.close()
    good.forward(handle=handle)


def dk_is_dv(good):
    dq, dk = np.empty_like(good.q), np.empty_like(good.k)
    good.backward(out=(dq, dk, dk))


CALLS = {
    "dtype": lambda g: g.forward(q=g.q.astype("f8")),
    "dtype-of-k": lambda g: g.forward(k=g.k.astype("f2")),
    "dtype-of-o": lambda g: g.forward(out=g.out.astype("f2")),
    "dtype-of-lse": lambda g: g.forward(lse=g.lse.astype("f8")),
    "dtype-of-lengths": lambda g: g.decode(lengths=np.array([1, 2])),
    "device-unknown": lambda g: cuflash.Handle(999),
    "device-negative": lambda g: cuflash.Handle(-99),
    "device-of-memory": on_gpu,
    "stream-on-cpu": lambda g: g.forward(stream=8),
    "stream-of-another-type": lambda g: g.forward(stream="8"),
    "channels": lambda g: g.forward(q=g.q.swapaxes(2, 3).copy().swapaxes(2, 3)),
    "stride-negative": lambda g: g.forward(k=g.k[:, :, ::-1]),
    "heads": lambda g: g.forward(q=g.q[:, :3], out=g.out[:, :3]),
    "head-dim": lambda g: cuflash.attention(*[np.ones((1, 1, 1, 577), np.float32)] * 3),
    "rank": lambda g: g.forward(q=g.q[0]),
    "shape-of-k": lambda g: g.forward(k=g.k[:1]),
    "shape-of-v": lambda g: g.forward(v=g.v[:, :, :3]),
    "shape-of-o": lambda g: g.forward(out=g.out[:, :2]),
    "shape-of-lse": lambda g: g.forward(lse=g.lse[:, :, :4]),
    "shape-of-dk": lambda g: g.backward(out=(np.empty_like(g.q), np.empty_like(g.k[:, :1]), np.empty_like(g.k))),
    "shape-of-lengths": lambda g: g.decode(lengths=np.ones(1, np.int32)),
    "shape-of-lse-parts": merge_with_fewer_rows,
    "misaligned": lambda g: g.forward(q=between_elements(g.q)),
    "scale-negative": lambda g: g.forward(scale=-1.0),
    "scale-nan": lambda g: g.forward(scale=float("nan")),
    "window": lambda g: g.forward(window=(-5, 0)),
    "tree-mask": lambda g: g.backward(tree_mask=np.ones((1, 1), np.uint32)),
    "zero-of-floats": lambda g: cuflash.decode(g.q, cuflash.KVCache(g.k, g.v, k_zero=np.ones(1, "f4")), out=g.out),
    "append-nowhere": lambda g: g.append(),
    "rotary-dim": lambda g: g.append(cos=np.ones((9, 5), "f4"), sin=np.ones((9, 5), "f4")),
    "splits": lambda g: g.decode(num_splits=2000),
    "splits-too-wide": lambda g: g.decode(num_splits=2**32 + 1),
    "kernel-unknown": lambda g: g.forward(kernel="nonsense"),
    "kernel-refuses": lambda g: g.forward(kernel="fwd_reference"),
    "option": lambda g: option(g, raw.CUFLASH_OPTION_CPU_THREADS, -1),
    "option-unknown": lambda g: option(g, 99, 0),
    "arch-unknown": lambda g: cuflash.explain("forward", g.q, g.k, g.v, target_arch=12),
    "o-is-q": lambda g: g.forward(out=g.q),
    "dk-is-dv": dk_is_dv,
    "o-repeats": lambda g: g.forward(out=repeated(g.out, (0, *g.out.strides[1:]))),
    "lse-repeats": lambda g: g.forward(lse=repeated(g.lse, (0, 0, 0))),
    "workspace-too-small": one_byte_short,
    "handle-freed": freed_handle,
    "handle-of-another-type": lambda g: g.forward(handle=5),
    "no-array": lambda g: g.forward(k=5),
}


def test_every_call_has_code():
    assert {row.id for row in IN_PROCESS if "python" not in row.reasons} == set(CALLS)


@pytest.mark.parametrize("row", [row for row in IN_PROCESS if row.id in CALLS], ids=lambda row: row.id)
def test_in_python(row):
    good = Good()
    wanted = Good().forward()
    q = good.q.copy()
    with pytest.raises((cuflash.Error, TypeError, ctypes.ArgumentError)) as caught:
        CALLS[row.id](good)
    row.check_message(str(caught.value))
    if row.status == "-":
        assert not isinstance(caught.value, cuflash.Error)
    else:
        assert caught.value.name.replace("CUFLASH_ERROR_", "") in row.status.split("|")
    assert np.isnan(good.out).all() and np.isnan(good.lse).all() and np.array_equal(good.q, q)
    assert np.array_equal(Good().forward(), wanted)


# ---- another library, or none ----------------------------------------------------------------------------


@pytest.fixture
def other_library(request, tmp_path, api) -> str:
    """Where the library of a row is looked for."""
    if request.param == "library-absent":
        return str(tmp_path / "libcuflash.so.0")
    if request.param == "library-of-others":
        return "libc.so.6"
    stub = {"library-older": {"minor": 6}, "library-newer": {"cuflash_abi_version": 1}}[request.param]
    return str(build_stub(tmp_path, api, **stub))


def python_program(library: str) -> subprocess.CompletedProcess:
    return run_python("import cuflash", CUFLASH_LIBRARY=library)


def julia_program(library: str) -> subprocess.CompletedProcess:
    """The call fails, and the next one, which finds the right library, works."""
    return try_julia("-e", """
        using CUFlash
        q = zeros(Float32, 8, 1, 1, 1)
        CUFlash.functional() && exit(2)
        message = try attention(q, q, q) catch error; sprint(showerror, error) end
        ENV["CUFLASH_LIBRARY"] = ENV["GOOD_LIBRARY"]
        attention(q, q, q)
        print(stderr, message)
        exit(1)
    """, CUFLASH_LIBRARY=library, GOOD_LIBRARY=cuflash.library_path())


def rust_program(library: str) -> subprocess.CompletedProcess:
    """The example: linked with the library under test, and run with the other."""
    with tempfile.TemporaryDirectory() as folder:
        must_pass(cargo(link_library(Path(folder)), "run", "-q", "--example", "attention"))
    return subprocess.run([TARGET / "debug" / "examples" / "attention"], text=True, capture_output=True,
                          env={**os.environ, "LD_LIBRARY_PATH": os.path.dirname(library)})


PROGRAMS = {"python": python_program, "rust": rust_program, "julia": julia_program}


@pytest.mark.parametrize("language, row, other_library", [
    pytest.param(language, row, row.id, id=f"{language}-{row.id}")
    for language in LANGUAGES for row in LIBRARY if language not in row.reasons],
    indirect=["other_library"])
def test_library(language, row, other_library):
    if language == "julia" and JULIA is None:
        pytest.skip(NO_JULIA)
    if language == "rust" and not FOUND:
        pytest.skip(NO_CARGO)
    run = PROGRAMS[language](other_library)
    assert run.returncode == 1, run.stdout + run.stderr
    row.check_message(run.stderr)
