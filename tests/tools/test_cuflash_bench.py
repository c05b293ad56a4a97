"""cuflash-bench on the CPU device: its lines, report.py on them, and what it refuses.

tests/bench has the tests of its checker. Skipped where the program was not built: it needs nlohmann_json and CLI11.
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
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(ROOT / "benchmarks")]

import cuflash  # noqa: E402
import report  # noqa: E402
from comparison.points import Point  # noqa: E402

LIBRARY = Path(cuflash.library_path()).resolve()
PROGRAM = LIBRARY.parents[1] / "bin" / "cuflash-bench"
if not PROGRAM.exists():
    pytest.skip("cuflash-bench was not built", allow_module_level=True)

FEW = ["--rounds", "2", "--calls", "2"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, *arguments], text=True, capture_output=True, timeout=300,
                          env={**os.environ, **environment})


def lines(*arguments: str) -> list[dict]:
    done = run("--device", "cpu", *FEW, *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- lines -----------------------------------------------------------------------------------------------


def test_a_run(tmp_path, capsys):
    output = tmp_path / "lines.jsonl"
    done = run("--device", "cpu", "--preset", "tiny", *FEW, "--kernel", "auto,reference", "--commit", "0123abc",
               "--output", str(output), CUFLASH_KERNEL="")
    assert done.returncode == 0 and done.stdout == "", done.stderr
    header, *rows = map(json.loads, output.read_text().splitlines())
    found = header["run"]
    assert found["schema"] == 1 and found["program"] == "cuflash-bench" and found["device"] and found["processors"] > 0
    assert found["cuflash"].startswith(f"cuflash {cuflash.__version__}") and found["commit"] == "0123abc"
    assert found["flags"] == {"device": "cpu", "preset": "tiny", "rounds": "2", "calls": "2",
                              "kernel": "auto,reference"}
    assert [row["contestant"] for row in rows] == ["cuflash", "cuflash:reference"] * 4
    for row in rows:
        point = Point(**row["point"])
        assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"] and row["calls"] == 4 and len(row["round_ms"]) == 2
        assert row["tflops"] == pytest.approx(point.tflops(row["ms"]), rel=1e-3)
        bytes_moved = 4 * 2 * point.length * (2 * (4 + 2) * 32 + 4)
        assert row["gb_s"] == pytest.approx(bytes_moved / row["ms"] * 1e-6, rel=1e-3)
        assert 0 < row["error"] < 4
        assert not row.keys() & {"percent_of_matrix", "percent_of_copy", "host_us", "empty_launch_us"}
    assert not found.keys() & {"matrix_tflops", "copy_gb_s"}
    assert {row["kernel"] for row in rows} == {"fwd_cpu", "fwd_reference_cpu"}
    progress = done.stderr.splitlines()
    assert re.match(r"\[1/4\] f32 full B2 H4 Hkv2 S65 D32: cuflash [\d.e-]+, cuflash:reference [\d.e-]+ TFLOP/s; "
                    r"\d+ s gone, \d+ s to go$", progress[0])
    assert len(progress) == 4

    assert report.main([str(output)]) == 0
    text = capsys.readouterr().out
    assert "commit 0123abc" in text and 'cuflash-bench with {"' in text
    assert f"| 65 | 2 | {rows[0]['tflops']:.4g} | {rows[1]['tflops']:.4g} |" in text


#: What a multiprocessor of this architecture multiplies and adds in a clock, at most: operations.
PEAK = {"f32": {80: 128, 90: 256}, "f16": {80: 2048, 90: 4096}, "bf16": {80: 2048, 90: 4096}}


def test_a_run_on_a_gpu():
    done = run("--preset", "few-blocks", "--len", "512", "--head-dim", "64", "--dtype", "f32,f16,bf16", "--host", *FEW)
    if done.returncode == 2 and "--device cuda: " in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    header, *rows = map(json.loads, done.stdout.splitlines())
    found = header["run"]
    assert found["copy_gb_s"] > 0 and len(rows) == 6
    if found["arch"] == 90:
        assert found["matrix_instruction"] == {"f32": "fma.f32", "f16": "wgmma.m64n256k16", "bf16": "wgmma.m64n256k16"}
    for dtype, speed in found["matrix_tflops"].items():
        # Clocks sink under load, but not by half: a wrong count of operations shows.
        peak = PEAK[dtype].get(found["arch"])
        if peak and "max_clock" in found:
            most = peak * found["multiprocessors"] * float(found["max_clock"].split()[0]) * 1e-6
            assert 0.5 * most < speed < 1.02 * most, (dtype, speed, most)
    for row in rows:
        mark = found["matrix_tflops"][row["point"]["dtype"]]
        assert row["percent_of_matrix"] == pytest.approx(100 * row["tflops"] / mark, rel=1e-3)
        assert row["percent_of_matrix"] < 100 and 100 <= row["host_calls"] <= 10000
        assert 0.3 < row["empty_launch_us"] < row["host_us"] < 200
    assert "%) TFLOP/s; " in done.stderr and " us of the host, an empty launch " in done.stderr


def test_axes_make_products():
    found = lines("--dtype", "f16,bf16", "--mask", "full,window", "--window", "3,40", "--len-q", "5", "--len-k", "5,33",
                  "--batch", "1", "--heads", "2", "--head-dim", "8")[1:]
    assert [(row["point"]["dtype"], row["point"].get("length_k", 5), row["point"]["mask"]) for row in found] == [
        (dtype, len_k, mask) for dtype in ("f16", "bf16") for len_k in (5, 33)
        for mask in ("full", "window 2,0", "window 39,0")]


def test_report_tells_lengths_of_keys_apart(tmp_path, capsys):
    output = tmp_path / "lines.jsonl"
    lines("--dtype", "f32", "--mask", "causal,window", "--window", "8", "--len-q", "1,16", "--len-k", "64,96",
          "--batch", "1", "--heads", "2", "--head-dim", "8", "--output", str(output))
    assert report.main([str(output)]) == 0
    text = capsys.readouterr().out
    for mask in ("causal", "window 7,0"):
        for len_k in (64, 96):
            assert f"### f32 D8 H2 {mask} Sk{len_k}\n" in text


def test_masks_and_heads_are_right():
    """Whatever is timed was compared with double precision, so that these runs are tests of the masks as well."""
    assert len(lines("--dtype", "f32,f16,bf16", "--mask", "full,causal,window", "--window", "1,5", "--len-q", "7,60",
                     "--len-k", "7,40", "--heads", "4", "--heads-kv", "1,4", "--batch", "2", "--head-dim",
                     "20")) == 1 + 3 * 2 * 2 * 4 * 2


def test_time_that_is_up():
    done = run("--device", "cpu", "--preset", "tiny", "--seconds", "0.000001")
    rows = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert done.returncode == 1 and [row["failed"] for row in rows] == ["no time left"] * 4
    assert "cuflash FAILED" in done.stderr


# ---- wrong results ---------------------------------------------------------------------------------------

BROKEN = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <cuflash.h>
cuflash_status_t cuflash_attention_forward(cuflash_handle_t handle, const cuflash_problem_t* problem,
                                           cuflash_stream_t stream) {
  static int call;
  cuflash_status_t (*real)(cuflash_handle_t, const cuflash_problem_t*, cuflash_stream_t) =
      dlsym(RTLD_NEXT, "cuflash_attention_forward");
  cuflash_status_t status = real(handle, problem, stream);
  (void)call;
  %s
  return status;
}
"""
FAULTS = {
    "one element": ("((float*)problem->o.data)[0] += 0.01f;", "wrong result: batch 0 head 0 row 0"),
    "an LSE": ("problem->lse[0] += 0.01f;", "wrong LSE: batch 0 head 0 row 0"),
    "a NaN in any row": ("problem->lse[7] = 0.0f / 0.0f;", "wrong LSE: NaN"),
    "later calls": ("if (++call > 3) ((float*)problem->o.data)[0] += 0.01f;", "after 4 calls: wrong result"),
    "nothing is written": ("for (int i = 0; i < 9; ++i) ((unsigned*)problem->o.data)[i] = ~0u;", "rows not written"),
    "a refusal": ("status = CUFLASH_ERROR_INTERNAL;", "CUFLASH_ERROR_INTERNAL"),
}


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_not_reported(tmp_path, fault):
    """With a library before libcuflash that spoils what it computes."""
    body, reason = FAULTS[fault]
    broken = tmp_path / "broken.so"
    subprocess.run(["gcc", "-x", "c", "-shared", "-fPIC", "-I", ROOT / "include", "-", "-o", broken, "-ldl"],
                   check=True, text=True, input=BROKEN % body)
    done = run("--device", "cpu", "--preset", "tiny", *FEW, "--len", "65", "--mask", "full", LD_PRELOAD=str(broken))
    assert done.returncode == 1, done.stderr
    [row] = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert reason in row["failed"] and not row.keys() & {"ms", "tflops"}
    assert "cuflash FAILED" in done.stderr and reason in done.stderr


# ---- the command line ------------------------------------------------------------------------------------

BAD = [
    (["--dtype", "f64"], ["--dtype", "f64", "bf16"]),
    (["--mask", "causal,diagonal"], ["--mask", "diagonal", "window"]),
    (["--preset", "huge"], ["--preset", "huge", "tokens16k"]),
    (["--device", "tpu"], ["--device", "tpu"]),
    (["--kernel", "sideways"], ["--kernel", "sideways", "reference"]),
    (["--len", "0"], ["--len", "0"]),
    (["--len", "64,-3"], ["--len", "-3"]),
    (["--len", "65x"], ["--len", "65x"]),
    (["--len", "65", "130"], ["130"]),
    (["--head-dim", "99999999999999999999"], ["--head-dim", "99999999999999999999"]),
    (["--batch"], ["--batch"]),
    (["--rounds", "0"], ["--rounds", "0"]),
    (["--seconds", "0"], ["--seconds", "0"]),
    (["--seconds", "soon"], ["--seconds", "soon"]),
    (["--len", "5", "--len-q", "5"], ["--len", "--len-q", "exclude"]),
    (["--len-k", "5"], ["--len-k", "--len-q"]),
    (["--window", "5"], ["--window", "--mask window"]),
    (["--mask", "window"], ["--mask window", "--window"]),
    (["--heads", "3", "--heads-kv", "2"], ["3 query heads", "2 key/value heads"]),
    (["--preset", "tokens16k", "--tokens", "100"], ["--tokens 100"]),
    (["--graph", "4"], ["--graph", "CUDA"]),
    (["--host"], ["--host", "CUDA"]),
    (["--l2", "cold"], ["--l2 cold", "CUDA"]),
    (["--device", "cuda", "--l2", "cold", "--graph", "4"], ["exclude"]),
    (["--l2", "lukewarm"], ["--l2", "lukewarm"]),
    (["--output", "/nowhere/lines.jsonl"], ["--output", "/nowhere/lines.jsonl"]),
    (["--no-such-option"], ["--no-such-option"]),
    (["operand"], ["operand"]),
]


@pytest.mark.parametrize("arguments, words", BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_command_lines(arguments, words):
    # CLI11 takes an option once.
    before = [*([] if "--device" in arguments else ["--device", "cpu"]),
              *([] if "--preset" in arguments else ["--preset", "tiny"])]
    done = run(*before, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("cuflash-bench: ")
    for word in words:
        assert word in done.stderr


def test_without_a_gpu():
    done = run("--preset", "tiny", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stdout == ""
    assert "--device cuda: " in done.stderr and "--device cpu" in done.stderr


def test_help_presets_and_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"cuflash-bench {cuflash.__version__}\n")
    shown = run("--help").stdout
    assert "Example: " in shown
    manual = (ROOT / "tools" / "cuflash_bench" / "cuflash-bench.1").read_text()
    options = re.findall(r"^  (--[a-z-]*[a-z]\d?)", shown, re.MULTILINE)
    assert set(options) >= {"--batch", "--heads-kv", "--len-q", "--mask", "--window", "--kernel", "--l2", "--graph",
                            "--host"}
    for option in options:
        assert option.replace("-", r"\-") in manual, option
    presets = run("--list-presets").stdout
    for name, points in (("tokens16k", 36), ("few-blocks", 18), ("window", 3), ("tiny", 4)):
        assert re.search(rf"^{name} .*\n +{points} points, ", presets, re.MULTILINE)


def test_the_example_of_the_help():
    """As it is, but for the device and smaller sizes."""
    example = re.search(r"^  cuflash-bench (.*?)\n\n", run("--help").stdout, re.DOTALL | re.MULTILINE)[1]
    words = example.replace("\\\n", " ").split()
    words = words[:words.index("--output")]
    words[words.index("--len") + 1] = "16,32"
    found = lines(*words, "--tokens", "32")[1:]
    assert [row["point"] for row in found] == [
        {"dtype": "f16", "mask": "causal", "batch": 32 // length, "heads": 32, "heads_kv": 8, "length": length,
         "head_dim": 128} for length in (16, 32)]
