"""Which kernel a call takes and why not the others: queries, the environment, the handle."""
from __future__ import annotations

import ctypes

import cuflash
import numpy as np
import pytest
from arrays import poisoned, problem, run_python
from cuflash import raw

OPERATIONS = {"forward": raw.CUFLASH_OPERATION_FORWARD, "backward": raw.CUFLASH_OPERATION_BACKWARD,
              "decode": raw.CUFLASH_OPERATION_DECODE}
KEYS = {"operation", "device", "kernel", "family", "launches", "workspace_bytes", "num_splits",
        "kernels"}


def arguments(operation: str, **fields) -> list:
    """The structs of a query; it reads no pointer, so there are none."""
    dtype = fields.pop("dtype", raw.CUFLASH_F16)
    dense = dict(flags=raw.CUFLASH_TENSOR_DENSE, dtype=dtype)
    tensors = {"q": dense, "o": dense} if operation == "decode" else \
        {"q": dense, "k": dense, "v": dense, "o": dense}
    sizes = dict(batch=2, heads_q=8, len_q=1 if operation == "decode" else 100, head_dim=64)
    if operation != "decode":
        sizes["len_k"] = 100
    given = raw.cuflash_problem_t.new(
        **{**sizes, **fields}, **{name: raw.cuflash_tensor_t(**t) for name, t in tensors.items()})
    structs = {
        "forward": [],
        "backward": [raw.cuflash_gradients_t.new(
            **{name: raw.cuflash_tensor_t(**dense) for name in ("d_o", "dq", "dk", "dv")})],
        "decode": [raw.cuflash_kv_cache_t.new(
            k=raw.cuflash_tensor_t(**dense), v=raw.cuflash_tensor_t(**dense), max_len=1000)],
    }
    return [given, *structs[operation]]


def names_of(operation: str) -> set:
    return {info.name.decode() for info in cuflash.kernels()
            if info.operation == OPERATIONS[operation]}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_every_kernel_is_listed(operation, arch):
    """For a GPU that need not be there; what is refused has its reason, the choice none."""
    answer = cuflash.explain(operation, None, *arguments(operation, target_arch=arch))
    assert KEYS <= answer.keys()
    assert answer["operation"] == operation
    assert {kernel["name"] for kernel in answer["kernels"]} == names_of(operation)
    for kernel in answer["kernels"]:
        assert bool(kernel["reason"]) != kernel["accepted"], kernel
    accepted = [kernel for kernel in answer["kernels"] if kernel["accepted"]]
    best = max(accepted, key=lambda kernel: kernel["rank"], default=None)
    assert answer["kernel"] == (best and best["name"])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_cpu_device(cpu, operation):
    answer = cuflash.explain(operation, cpu, *arguments(operation))
    infos = {info.name.decode(): info for info in cuflash.kernels()}
    assert infos[answer["kernel"]].on_cpu and infos[answer["kernel"]].built
    assert infos[answer["kernel"]].family.decode() == answer["family"]


def test_reasons_differ_by_kernel():
    """bf16 on sm_75: each kernel says what keeps it, not what keeps another."""
    answer = cuflash.explain("forward", None, *arguments("forward", target_arch=75,
                                                         dtype=raw.CUFLASH_BF16))
    reasons = {kernel["name"]: kernel["reason"] for kernel in answer["kernels"]
               if not kernel["accepted"]}
    assert len(set(reasons.values())) >= 3, reasons


def test_buffer_is_cut(cpu):
    needed = ctypes.c_size_t()
    given = arguments("forward")
    cuflash.check(raw.cuflash_forward_explain(cpu, *given, None, 0, ctypes.byref(needed)))
    whole = ctypes.create_string_buffer(needed.value)
    cuflash.check(raw.cuflash_forward_explain(cpu, *given, whole, needed.value, None))
    assert len(whole.value) == needed.value - 1
    short = ctypes.create_string_buffer(b"#" * 20, 20)
    cuflash.check(raw.cuflash_forward_explain(cpu, *given, short, 10, ctypes.byref(needed)))
    assert short.raw == whole.value[:9] + b"\0" + b"#" * 10


def test_unknown_arch():
    given = arguments("forward", target_arch=1)
    with pytest.raises(cuflash.Error) as error:
        cuflash.explain("forward", None, *given)
    assert error.value.status == raw.CUFLASH_ERROR_UNSUPPORTED_ARCH
    assert "target_arch" in error.value.message and "90" in error.value.message


FORWARD = """
import numpy as np, cuflash
from arrays import problem
from cuflash import raw
q, k, v, o = (np.zeros((1, 2, 8, 64), np.float16) for _ in range(4))
with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as handle:
    print(raw.cuflash_attention_forward(handle, problem(q, k, v, o), None))
    print(raw.cuflash_last_error().decode())
"""


@pytest.mark.parametrize("kernel, status, words", [
    ("", 0, []),
    ("fwd_reference_cpu", 0, []),
    ("reference", 0, []),
    ("nonsense", 8, ["nonsense", "reference", "fwd_reference_cpu", "fwd_wmma_f16_d64"]),
    ("fwd_wmma_f16_d64", 10, ["fwd_wmma_f16_d64", "CUDA"]),
])
def test_kernel_of_the_environment(kernel, status, words):
    """An unknown name lists the known ones, a refusing kernel gives its reason: no fallback."""
    run = run_python(FORWARD, CUFLASH_KERNEL=kernel)
    assert run.returncode == 0, run.stderr
    got, message = run.stdout.split("\n", 1)
    assert int(got) == status, message
    for word in words:
        assert word in message


def test_kernel_of_the_handle(cpu):
    q, k, v = (np.zeros((1, 2, 8, 64), np.float16) for _ in range(3))
    o = poisoned(q.shape, np.float16)
    given = problem(q, k, v, o)
    cpu.set_kernel("fwd_reference")
    assert raw.cuflash_attention_forward(cpu, given, None) == raw.CUFLASH_ERROR_UNSUPPORTED
    given.kernel = b"fwd_reference_cpu"  # stronger than the handle's
    cuflash.check(raw.cuflash_attention_forward(cpu, given, None))
    given.kernel = None
    cpu.set_kernel(None)
    cuflash.check(raw.cuflash_attention_forward(cpu, given, None))
    with pytest.raises(cuflash.Error, match="nonsense.*fwd_reference_cpu"):
        cpu.set_kernel("nonsense")


def test_kernel_names_are_unique():
    names = [info.name for info in cuflash.kernels()]
    assert len(set(names)) == len(names)
    assert raw.cuflash_kernel_info(len(names), raw.cuflash_kernel_info_t.new()) == 8
    assert raw.cuflash_kernel_info(-1, raw.cuflash_kernel_info_t.new()) == 8
