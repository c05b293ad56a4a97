"""Finding the library, the version handshake, errors, and device memory where there is a GPU."""
from __future__ import annotations

import ctypes

import cuflash
import numpy as np
import pytest
from arrays import bottom_right, forward, poisoned, problem, run_python, tensor
from conftest import ROOT
from cuflash import _library, cuda, raw


def test_versions_agree():
    """The header's macros, the library and the build system."""
    macros = (raw.CUFLASH_VERSION_MAJOR, raw.CUFLASH_VERSION_MINOR, raw.CUFLASH_VERSION_PATCH)
    assert cuflash.library_version() == macros
    assert cuflash.__version__ == ".".join(map(str, macros))
    assert f"project(cuflash VERSION {cuflash.__version__}" in (ROOT / "CMakeLists.txt").read_text()
    assert f"cuflash {cuflash.__version__}," in raw.cuflash_build_info().decode()


def test_missing_library(tmp_path):
    """A library named and missing is an error that says so, never another library."""
    missing = str(tmp_path / "libcuflash.so.0")
    run = run_python("import cuflash", CUFLASH_LIBRARY=missing)
    assert run.returncode != 0
    assert "LibraryError" in run.stderr and f"{missing}: no such file" in run.stderr
    assert "CUFLASH_LIBRARY" in run.stderr


def test_broken_library(tmp_path):
    broken = tmp_path / "libcuflash.so.0"
    broken.write_text("not a library")
    run = run_python("import cuflash", CUFLASH_LIBRARY=str(broken))
    assert run.returncode != 0 and str(broken) in run.stderr


def test_closed_handle():
    """A closed handle is an error: as NULL it would be the default device."""
    handle = cuflash.Handle(raw.CUFLASH_DEVICE_CPU)
    handle.close()
    handle.close()
    with pytest.raises(ctypes.ArgumentError, match="the handle is closed"):
        raw.cuflash_trim(handle)


def test_order_of_search(monkeypatch):
    monkeypatch.setenv("CUFLASH_LIBRARY", "/somewhere/libcuflash.so.0")
    assert _library.candidates() == ["/somewhere/libcuflash.so.0"]
    monkeypatch.delenv("CUFLASH_LIBRARY")
    candidates = _library.candidates()
    assert candidates[0] == str(_library.PACKAGE / "lib" / "libcuflash.so.0")
    assert set(candidates[1:3]) == {str(ROOT / "build" / preset / "lib" / "libcuflash.so.0")
                                    for preset in ("release", "cpu")}
    assert candidates[3:] == ["libcuflash.so.0"]


@pytest.mark.parametrize("bindings", [(1, 0), (0, 99)])
def test_library_older_than_the_bindings(bindings):
    with pytest.raises(cuflash.LibraryError, match=r"is version .* need"):
        _library.check_version(bindings)


def test_library_of_another_abi(monkeypatch):
    monkeypatch.setattr(_library, "ABI", 1)
    with pytest.raises(cuflash.LibraryError, match="ABI 0.*ABI 1"):
        _library.check_version((0, 7))


def test_check():
    cuflash.check(0)
    with pytest.raises(cuflash.Error) as error:
        cuflash.check(raw.cuflash_set_default_device(-99))
    assert error.value.status == raw.CUFLASH_ERROR_INVALID_VALUE
    assert error.value.name == "CUFLASH_ERROR_INVALID_VALUE"
    assert "device: -99" in error.value.message
    assert str(error.value) == f"CUFLASH_ERROR_INVALID_VALUE (8): {error.value.message}"


def test_structs_know_their_fields():
    problem = raw.cuflash_problem_t.new(batch=3)
    assert (problem.struct_size, problem.batch) == (ctypes.sizeof(problem), 3)
    with pytest.raises(AttributeError):
        problem.bacth = 3
    with pytest.raises(AttributeError):
        raw.cuflash_problem_t.new(bacth=3)
    assert raw.cuflash_tensor_t.new().flags == 0


@pytest.mark.parametrize("name", ["problem", "gradients", "kv_cache", "kv_append", "merge",
                                  "weights"])
def test_init_does_what_new_does(name):
    kind = getattr(raw, f"cuflash_{name}_t")
    struct = kind()
    ctypes.memset(ctypes.byref(struct), 0xFF, ctypes.sizeof(struct))
    cuflash.check(getattr(raw, f"cuflash_{name}_init")(struct, ctypes.sizeof(struct)))
    assert bytes(struct) == bytes(kind.new())


def test_options_are_kept_per_handle(cpu):
    value = ctypes.c_int64()
    cpu.set_option(raw.CUFLASH_OPTION_CPU_THREADS, 3)
    cuflash.check(raw.cuflash_get_option(cpu, raw.CUFLASH_OPTION_CPU_THREADS, ctypes.byref(value)))
    assert value.value == 3
    cuflash.check(raw.cuflash_get_option(None, raw.CUFLASH_OPTION_CPU_THREADS, ctypes.byref(value)))
    assert value.value == 0
    with pytest.raises(cuflash.Error, match="0 to 1024"):
        cpu.set_option(raw.CUFLASH_OPTION_CPU_THREADS, 1025)


def test_allocator_gives_the_workspace(cpu):
    """A call without a workspace takes it from the handle's functions, and gives it back."""
    taken, given_back = {}, []

    def allocate(nbytes, device, stream):
        memory = np.empty(nbytes + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        taken[address] = memory
        return address

    cpu.set_allocator(allocate, lambda memory, device, stream: given_back.append(memory))
    q, k, v, d_o = (np.ones((1, 2, 40, 16), np.float32) for _ in range(4))
    o, dq, dk, dv = (poisoned(q.shape) for _ in range(4))
    lse = poisoned(q.shape[:3])
    given = problem(q, k, v, o, lse)
    gradients = raw.cuflash_gradients_t.new(d_o=tensor(d_o), dq=tensor(dq), dk=tensor(dk),
                                            dv=tensor(dv))
    size = ctypes.c_size_t()
    cuflash.check(raw.cuflash_attention_forward(cpu, given, None))
    cuflash.check(raw.cuflash_backward_workspace_size(cpu, given, gradients, ctypes.byref(size)))
    before = len(taken)
    cuflash.check(raw.cuflash_attention_backward(cpu, given, gradients, None))
    assert len(taken) - before == (1 if size.value else 0)
    assert sorted(given_back) == sorted(taken)


def test_show_versions(capsys):
    cuflash.show_versions()
    text = capsys.readouterr().out
    assert cuflash.library_path() in text and cuflash.__version__ in text


@pytest.mark.skipif(cuda.available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(cuda.Error, match="CUDA"):
        cuda.Device(0)
    assert cuda.describe().startswith("none")


@pytest.mark.skipif(not cuda.available(), reason="no GPU")
def test_cuda_memory():
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    with cuda.Device(0) as device:
        buffer = device.from_numpy(array.T)
        np.testing.assert_array_equal(buffer.to_numpy((100, 10), np.float32), array.T)
        buffer.fill(0)
        assert not buffer.to_numpy((100, 10), np.float32).any()
        with pytest.raises(ValueError):
            buffer.to_numpy((101, 10), np.float32)
        with pytest.raises(cuda.Error, match="memory"):
            device.empty(1 << 60)
        assert device.empty(0).ptr == 0


@pytest.mark.skipif(not cuda.available(), reason="no GPU")
@pytest.mark.skipif(all(kernel.on_cpu or not kernel.built for kernel in cuflash.kernels()),
                    reason="the library is built without CUDA")
def test_attention_on_the_gpu():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 4, 33, 64)).astype(np.float16) for _ in range(3))
    given = problem(q, k, v, np.empty_like(q), mask=raw.CUFLASH_MASK_CAUSAL)
    with cuda.Device(0) as device, cuflash.Handle(0) as handle:
        for name, array in (("q", q), ("k", k), ("v", v)):
            getattr(given, name).data = device.from_numpy(array).ptr
        o = device.empty(q.nbytes)
        given.o.data = o.ptr
        cuflash.check(raw.cuflash_attention_forward(handle, given, None))
        got = o.to_numpy(q.shape, np.float16)
    wanted, _ = forward(q, k, v, 0.125, bottom_right(33, 33))
    np.testing.assert_allclose(got, wanted, atol=4e-3)
