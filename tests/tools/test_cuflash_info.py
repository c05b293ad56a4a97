"""cuflash-info: what it prints agrees with the library, and its self-test can fail.

Skipped where the program was not built: it needs nlohmann_json.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(ROOT / "tests" / "python")]

import cuflash  # noqa: E402
from cuflash import raw  # noqa: E402

LIBRARY = Path(cuflash.library_path()).resolve()
PROGRAM = LIBRARY.parents[1] / "bin" / "cuflash-info"
if not PROGRAM.exists():
    pytest.skip("cuflash-info was not built", allow_module_level=True)

OPERATIONS = ["forward", "backward", "decode"]
DTYPES = {"f32": raw.CUFLASH_F32, "f16": raw.CUFLASH_F16, "bf16": raw.CUFLASH_BF16}
HEAD_DIMS = [32, 64, 96, 128, 192, 256]
ARCHS = [75, 80, 86, 90, 100, 120]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, *arguments], text=True, capture_output=True, timeout=300,
                          env={**os.environ, **environment})


def text(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def document(*arguments: str) -> dict:
    return json.loads(text("--json", *arguments))


def explain(operation: str, dtype: str, *, arch: int = 0, handle=None, batch=1, heads_q=1, heads_kv=1,
            len_q, len_k, head_dim, **fields) -> dict:
    """What the library says, by the Python binding."""
    tensor = raw.cuflash_tensor_t(flags=raw.CUFLASH_TENSOR_DENSE, dtype=DTYPES[dtype])
    decode = operation == "decode"
    problem = raw.cuflash_problem_t.new(
        batch=batch, heads_q=heads_q, heads_kv=heads_kv, len_q=len_q, len_k=0 if decode else len_k,
        head_dim=head_dim, target_arch=arch, q=tensor, o=tensor, **fields)
    if not decode:
        problem.k = problem.v = tensor
    more = {"forward": [],
            "backward": [raw.cuflash_gradients_t.new(d_o=tensor, dq=tensor, dk=tensor, dv=tensor)],
            "decode": [raw.cuflash_kv_cache_t.new(k=tensor, v=tensor, max_len=len_k)]}[operation]
    return cuflash.explain(operation, handle, problem, *more)


@pytest.fixture
def cpu():
    with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as handle:
        yield handle


# ---- the survey --------------------------------------------------------------------------------


def test_about_the_library():
    found = document("--device", "cpu")
    assert found["format"] == 1
    assert found["version"] == cuflash.__version__
    assert found["abi"] == raw.cuflash_abi_version()
    assert found["build"] == raw.cuflash_build_info().decode()
    for architecture in found["architectures"]:
        assert re.fullmatch(r"\d+a?-(real|virtual)", architecture) and architecture in found["build"]
    assert bool(found["architectures"]) == ("CUDA" in found["build"])
    infos = {info.name.decode(): info for info in cuflash.kernels()}
    assert [kernel["name"] for kernel in found["kernels"]] == list(infos)
    for kernel in found["kernels"]:
        info = infos[kernel["name"]]
        assert kernel["family"] == info.family.decode()
        assert kernel["operation"] in [*OPERATIONS, "append"]
        assert kernel["device"] == ("cpu" if info.on_cpu else "cuda")
        assert kernel["built"] == bool(info.built)
        for name in ("rank", "tile_m", "tile_n", "threads", "shared_memory"):
            assert kernel[name] == getattr(info, name)


def check_choices(choices: list[dict], **device) -> None:
    assert [(c["operation"], c["dtype"], c["head_dim"]) for c in choices] == [
        (operation, dtype, head_dim)
        for operation in OPERATIONS for dtype in DTYPES for head_dim in HEAD_DIMS]
    for choice in choices:
        length = 1 if choice["operation"] == "decode" else 4096
        answer = explain(choice["operation"], choice["dtype"], batch=4, heads_q=32, heads_kv=32,
                         len_q=length, len_k=4096, head_dim=choice["head_dim"],
                         mask=raw.CUFLASH_MASK_CAUSAL, **device)
        assert (choice["kernel"], choice["family"]) == (answer["kernel"], answer["family"])
        kernels = {kernel["name"]: kernel for kernel in answer["kernels"]}
        for refused in choice["refused"]:
            assert refused.items() <= kernels[refused["name"]].items() and refused["reason"]
        if choice["kernel"]:
            rank = kernels[choice["kernel"]]["rank"]
            higher = {name for name, kernel in kernels.items() if kernel["rank"] > rank
                      and "devices only" not in (kernel["reason"] or "")
                      and "device only" not in (kernel["reason"] or "")}
            assert higher <= {refused["name"] for refused in choice["refused"]}


def test_choices_of_the_cpu_device(cpu):
    [device] = document("--device", "cpu")["devices"]
    assert (device["name"], device["model"], device["arch"]) == ("cpu", None, None)
    check_choices(device["choices"], handle=cpu)


@pytest.mark.parametrize("arch", ARCHS)
def test_choices_of_an_architecture(arch):
    [device] = document("--arch", str(arch))["devices"]
    assert (device["name"], device["model"], device["arch"]) == (f"sm_{arch}", None, arch)
    check_choices(device["choices"], arch=arch)


def test_devices_of_this_machine():
    """Without a GPU the CPU device alone, with the reason, and success."""
    found = document()
    names = [device["name"] for device in found["devices"]]
    assert names == [f"cuda:{i}" for i in range(len(names) - 1)] + ["cpu"]
    if len(names) == 1:
        assert found["unusable"][0]["name"] == "cuda"
        assert found["unusable"][0]["reason"].startswith("CUFLASH_ERROR_")


@pytest.mark.parametrize("device", [["--device", "cpu"], ["--arch", "75"], ["--arch", "90"]],
                         ids=" ".join)
def test_text_of_the_survey(device):
    found, shown = document(*device), text(*device)
    assert found["build"] in shown
    assert f"{len(found['kernels'])}, {sum(k['built'] for k in found['kernels'])} in this build" in shown
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in shown.splitlines()
            if line.startswith("  ") and line.split()[0] in OPERATIONS and not line.startswith("    ")}
    choices = found["devices"][0]["choices"]
    for operation in OPERATIONS:
        for dtype in DTYPES:
            assert rows[operation, dtype] == [
                c["family"] or "none" for c in choices
                if (c["operation"], c["dtype"]) == (operation, dtype)]
    for choice in choices:  # each family that refused has its row
        for family in {kernel["family"] for kernel in choice["refused"]} - {choice["family"]}:
            assert re.search(rf"^    {family} +\S", shown, re.MULTILINE)


# ---- questions ---------------------------------------------------------------------------------

WINDOW = raw.CUFLASH_PROBLEM_WINDOW
QUESTIONS = [
    ("forward bf16 causal B4 H32 S4096 D128",
     dict(batch=4, heads_q=32, heads_kv=32, len_q=4096, len_k=4096, head_dim=128,
          mask=raw.CUFLASH_MASK_CAUSAL),
     "forward bf16 causal B4 H32 Hkv32 Sq4096 Sk4096 D128"),
    ("D64 Sk70 Sq5 f32 backward", dict(len_q=5, len_k=70, head_dim=64),
     "backward f32 full B1 H1 Hkv1 Sq5 Sk70 D64"),
    ("backward f16 full window 128,-1 top-left H8 Hkv2 S100 Sk90 D80",
     dict(heads_q=8, heads_kv=2, len_q=100, len_k=90, head_dim=80, flags=WINDOW, window_left=128,
          window_right=-1, mask_align=raw.CUFLASH_ALIGN_TOP_LEFT),
     "backward f16 full window 128,-1 top-left B1 H8 Hkv2 Sq100 Sk90 D80"),
    ("forward f16 causal offset -7 S9 D8",
     dict(len_q=9, len_k=9, head_dim=8, mask=raw.CUFLASH_MASK_CAUSAL,
          mask_align=raw.CUFLASH_ALIGN_OFFSET, mask_offset=-7),
     "forward f16 causal offset -7 B1 H1 Hkv1 Sq9 Sk9 D8"),
    ("decode bf16 bottom-right B64 H32 Hkv8 S8192 D128",
     dict(batch=64, heads_q=32, heads_kv=8, len_q=1, len_k=8192, head_dim=128),
     "decode bf16 full B64 H32 Hkv8 Sq1 Sk8192 D128"),
    ("decode f16 Sq3 Sk50 D32", dict(len_q=3, len_k=50, head_dim=32),
     "decode f16 full B1 H1 Hkv1 Sq3 Sk50 D32"),
]


@pytest.mark.parametrize("words, sizes, whole", QUESTIONS, ids=[row[0] for row in QUESTIONS])
def test_question(cpu, words, sizes, whole):
    operation, dtype = whole.split()[:2]
    found = document("--device", "cpu", "--explain", words)
    assert found["question"] == whole
    assert found["answer"] == explain(operation, dtype, handle=cpu, **sizes)
    assert document("--device", "cpu", "--explain", whole)["question"] == whole
    for arch in ARCHS:
        found = document("--arch", str(arch), "--explain", words)
        assert found["device"] == {"name": f"sm_{arch}", "model": None, "arch": arch}
        assert found["answer"] == explain(operation, dtype, arch=arch, **sizes)


def test_text_of_an_explanation():
    words = QUESTIONS[0][0]
    answer = document("--arch", "90", "--explain", words)["answer"]
    shown = text("--arch", "90", "--explain", words)
    assert QUESTIONS[0][2] in shown and "on sm_90" in shown
    assert re.search(rf"^  kernel +{answer['kernel'] or 'none'}$", shown, re.MULTILINE)
    for kernel in answer["kernels"]:
        verdict = "taken" if kernel["name"] == answer["kernel"] else \
            kernel["reason"] or "would take it too"
        row = f"  {kernel['rank']:4}  {kernel['name']:24}  {verdict}"
        assert (row in shown.splitlines()) == (verdict != "runs on the CPU device only")


def test_sample_of_the_page():
    page = (ROOT / "docs" / "tools.md").read_text()
    words, shown = re.search(
        r'^\$ cuflash-info --device cpu --explain "(.*)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE).groups()
    workspace = re.compile(r"(?<=workspace  )\d+")  # depends on the cores
    assert workspace.sub("", shown) == workspace.sub("", text("--device", "cpu", "--explain", words))


BAD = [
    (["--explain", "forward bf16 S10 D64 sideways"], ['unknown word "sideways"', "top-left"]),
    (["--explain", "forward bf16 S10 D64 X3"], ['unknown word "X3"']),
    (["--explain", "Forward bf16 S10 D64"], ['unknown word "Forward"']),
    (["--explain", "forward bf16 S10 D"], ['unknown word "D"']),
    (["--explain", "forward bf16 S10 D6x"], ["D6x", "no 64-bit integer"]),
    (["--explain", "forward bf16 S10 D99999999999999999999"], ["no 64-bit integer"]),
    (["--explain", "forward forward bf16 S10 D64"], ["operation is given twice"]),
    (["--explain", "forward bf16 S10 D64 D64"], ["D is given twice"]),
    (["--explain", "forward bf16 full causal S10 D64"], ["mask is given twice"]),
    (["--explain", "bf16 S10 D64"], ["operation is missing"]),
    (["--explain", "forward S10 D64"], ["dtype is missing"]),
    (["--explain", "forward bf16 Sq10 D64"], ["size is missing: S or Sq and Sk"]),
    (["--explain", "decode bf16 D64"], ["size is missing: S or Sk"]),
    (["--explain", "forward bf16 S10"], ["size is missing: D"]),
    (["--explain", "forward bf16 S10 D64 window"], ['nothing follows "window"']),
    (["--explain", "forward bf16 S10 D64 window 3"], ["LEFT,RIGHT"]),
    (["--explain", "forward bf16 S10 D64 window 3,"], ["no 64-bit integer"]),
    (["--explain", ""], ["operation is missing"]),
    # What the library refuses, in its words.
    (["--explain", "forward bf16 S10 D577"], ["CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM", "577"]),
    (["--explain", "forward bf16 S10 D64 B-1"], ["problem.batch", "-1"]),
    (["--explain", "forward bf16 H3 Hkv2 S10 D64"], ["CUFLASH_ERROR_DIMENSION_MISMATCH"]),
    (["--explain", "forward bf16 S10 D64 window -5,0"], ["window_left", "-5"]),
    (["--arch", "12"], ["CUFLASH_ERROR_UNSUPPORTED_ARCH", "12"]),
    (["--arch", "ninety"], ["--arch", "ninety"]),
    (["--device", "-1"], ["--device", "-1"]),
    (["--device", "999"], ["CUFLASH_ERROR_"]),
    (["--arch", "90", "--device", "0"], ["exclude each other"]),
    (["--selftest", "--arch", "90"], ["--selftest"]),
    (["--selftest", "--explain", "forward f32 S1 D1"], ["--selftest"]),
    (["--no-such-option"], ["--no-such-option"]),
    (["operand"], ["operand"]),
]


@pytest.mark.parametrize("arguments, words", BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_command_lines(arguments, words):
    if "--explain" in arguments and "--selftest" not in arguments:
        arguments = ["--device", "cpu", *arguments]
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


def test_help_and_version():
    assert text("--version") == f"cuflash-info {cuflash.__version__}\n"
    shown = text("--help")
    manual = (ROOT / "tools" / "cuflash_info" / "cuflash-info.1").read_text()
    options = re.findall(r"--\w+", shown)
    assert set(options) >= {"--explain", "--selftest", "--device", "--arch", "--json"}
    for option in options:
        assert option.replace("-", r"\-") in manual


def test_a_forced_kernel_shows():
    [device] = json.loads(run("--json", "--device", "cpu", CUFLASH_KERNEL="reference").stdout)["devices"]
    assert {choice["family"] for choice in device["choices"]} == {"reference"}
    done = run("--device", "cpu", CUFLASH_KERNEL="nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr


# ---- the self-test -----------------------------------------------------------------------------


def test_selftest():
    done = run("--selftest", "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["failed"] == 0
    results = [result for result in found["results"] if result["device"] == "cpu"]
    assert [(r["operation"], r["dtype"]) for r in results[::2]] == [
        (operation, dtype) for operation in [*OPERATIONS, "merge"] for dtype in DTYPES]
    for result in results:
        assert result["result"] == "passed" and 0 <= result["error"] <= result["allowed"]
        assert (result["kernel"] is None) == (result["operation"] == "merge")
    assert text("--selftest", "--device", "cpu").endswith(f"{len(results)} passed, 0 failed, 0 skipped\n")


FAULTS = {
    "computes nothing": ("forward", "return 0;"),
    "one element of O": ("forward", "status = real(handle, problem, stream);"
                         "if (problem->q.dtype == CUFLASH_F32) ((float*)problem->o.data)[700] += 1e-2f;"
                         "return status;"),
    "the LSE of a row": ("decode", "status = real(handle, problem, cache, stream);"
                         "problem->lse[1] += 0.5f; return status;"),
    "dV": ("backward", "status = real(handle, problem, gradients, stream);"
           "((uint16_t*)gradients->dv.data)[3] ^= 0x4000; return status;"),
    "refuses": ("merge", "return CUFLASH_ERROR_INTERNAL;"),
}
SIGNATURES = {
    "forward": ("cuflash_attention_forward", "const cuflash_problem_t* problem"),
    "backward": ("cuflash_attention_backward",
                 "const cuflash_problem_t* problem, const cuflash_gradients_t* gradients"),
    "decode": ("cuflash_attention_decode",
               "const cuflash_problem_t* problem, const cuflash_kv_cache_t* cache"),
    "merge": ("cuflash_merge_states", "const cuflash_merge_t* merge"),
}


needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")


def preload(folder: Path, bodies: dict[str, str]) -> str:
    """A library to come before libcuflash, with these bodies for the operations' functions."""
    source = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <cuflash.h>\n"
    for operation, body in bodies.items():
        name, parameters = SIGNATURES[operation]
        parameters = f"cuflash_handle_t handle, {parameters}, cuflash_stream_t stream"
        source += f"""
cuflash_status_t {name}({parameters}) {{
  cuflash_status_t (*real)({parameters}) = dlsym(RTLD_NEXT, "{name}");
  cuflash_status_t status = real == 0;
  {body}
}}
"""
    library = folder / "preloaded.so"
    subprocess.run(["gcc", "-x", "c", "-shared", "-fPIC", "-I", ROOT / "include", "-", "-o", library,
                    "-ldl"], check=True, text=True, input=source)
    return str(library)


@needs_gcc
@pytest.mark.parametrize("fault", FAULTS)
def test_selftest_of_a_broken_library(tmp_path, fault):
    operation, body = FAULTS[fault]
    broken = preload(tmp_path, {operation: body})
    done = run("--selftest", "--json", "--device", "cpu", LD_PRELOAD=broken)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    failed = {result["operation"] for result in found["results"] if result["result"] == "failed"}
    assert operation in failed and found["failed"] > 0
    done = run("--selftest", "--device", "cpu", LD_PRELOAD=broken)
    assert done.returncode == 1
    assert re.search(rf"^failed +cpu +{operation}", done.stdout, re.MULTILINE)


@needs_gcc
def test_selftest_that_tests_nothing_fails(tmp_path):
    """A kernel that was left out of the build is skipped; that alone shows nothing."""
    empty = preload(tmp_path, {name: "return CUFLASH_ERROR_NOT_BUILT;" for name in SIGNATURES})
    done = run("--selftest", "--device", "cpu", "--json", LD_PRELOAD=empty)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["passed"], found["failed"]) == (0, 0) and found["skipped"] == len(found["results"])


# Host memory in the place of a GPU's, and the CPU device in the place of CUDA device 0.
PRETEND_DRIVER = """
#include <stdlib.h>
#include <string.h>
typedef unsigned long long address_t;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strncpy(name, "Pretence", size); return device; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = context; return device; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxSetCurrent(void* context) { return context == 0; }
int cuMemAlloc_v2(address_t* memory, size_t bytes) { *memory = (address_t)malloc(bytes); return 0; }
int cuMemFree_v2(address_t memory) { free((void*)memory); return 0; }
int cuMemcpyHtoD_v2(address_t to, const void* from, size_t bytes) { memcpy((void*)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void* to, address_t from, size_t bytes) { memcpy(to, (void*)from, bytes); return 0; }
"""
PRETEND_DEVICE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <cuflash.h>
cuflash_status_t cuflash_create(cuflash_handle_t* handle, int32_t device) {
  cuflash_status_t (*real)(cuflash_handle_t*, int32_t) = dlsym(RTLD_NEXT, "cuflash_create");
  return device > 0 ? CUFLASH_ERROR_INVALID_VALUE : real(handle, CUFLASH_DEVICE_CPU);
}
"""


@needs_gcc
def test_selftest_on_memory_of_the_driver(tmp_path):
    """How the self-test moves data to a GPU and back, where there is none."""
    for name, source in [("libcuda.so.1", PRETEND_DRIVER), ("device.so", PRETEND_DEVICE)]:
        subprocess.run(["gcc", "-x", "c", "-shared", "-fPIC", "-I", ROOT / "include", "-", "-o",
                        tmp_path / name, "-ldl"], check=True, text=True, input=source)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    done = run("--selftest", "--json", LD_LIBRARY_PATH=path, LD_PRELOAD=str(tmp_path / "device.so"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)["results"]
    of_device = [[r["error"] for r in results if r["device"] == name] for name in ("cuda:0", "cpu")]
    assert of_device[0] == of_device[1] and len(results) == 2 * len(of_device[0])
