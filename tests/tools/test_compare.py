"""benchmarks/compare.py on the CPU device: what it measures, that it refuses wrong results, what it writes."""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "bindings" / "python")]

import compare  # noqa: E402
from comparison import check, contestants, measuring  # noqa: E402
from comparison.devices import Cpu  # noqa: E402
from comparison.points import Point, add_axes, points  # noqa: E402

SMALL = Point("f32", "causal", 2, 4, 2, 65, 32)
CPU = Cpu()


def of(*flags: str) -> list[Point]:
    parser = argparse.ArgumentParser()
    add_axes(parser)
    return points(parser.parse_args(flags))


def tensors(point: Point):
    shapes = point.shape_q, point.shape_kv, point.shape_kv
    return tuple(CPU.normal(shape, point.dtype, seed) for seed, shape in enumerate(shapes))


# ---- points ----------------------------------------------------------------------------------------------


def test_tokens16k():
    found = of()
    assert found == of("--preset", "tokens16k") and len(set(found)) == 36
    assert {point.batch * point.length for point in found} == {16384}
    assert {point.heads * point.head_dim for point in found} == {2048}


def test_flags_come_on_top_of_a_preset():
    found = of("--preset", "grouped", "--len", "512", "--mask", "causal", "--dtype", "f16")
    assert [str(point) for point in found] == [
        "f16 causal B32 H16 S512 D128", "f16 causal B32 H16 Hkv2 S512 D128", "f16 causal B32 H16 Hkv1 S512 D128"]


def test_flops_count_what_a_causal_mask_leaves():
    full, causal = of("--len", "512", "--head-dim", "64")
    assert full.flops == 4 * 32 * 32 * 512 * 512 * 64 == 2 * causal.flops
    assert full.tflops(1.0) == pytest.approx(full.flops * 1e-9)


@pytest.mark.parametrize("flags", [
    ("--len", "0"), ("--len", "512,"), ("--batch", "-1"), ("--dtype", "fp16"), ("--mask", "window"),
    ("--preset", "all")])
def test_bad_axes_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as refused:
        of(*flags)
    assert refused.value.code == 2 and flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("flags, message", [
    (("--len", "32768"), "more than --tokens 16384"), (("--heads", "6", "--heads-kv", "4"), "no multiple of 4")])
def test_axes_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        of(*flags)


@pytest.mark.parametrize("flags", [("--peers", "cudnn"), ("--graph", "4"), ("--rounds", "0"), ("--seconds", "0")])
def test_bad_flags_are_refused(flags):
    with pytest.raises(SystemExit) as refused:
        compare.arguments(["--device", "cpu", *flags])
    assert refused.value.code == 2


# ---- the check -------------------------------------------------------------------------------------------


def rounded(x, dtype: str):
    return x.astype(CPU.unwritten((), dtype).dtype).astype(np.float64)


def attention(point: Point, q, k, v, keys: slice = slice(None)):
    """O with probabilities and results rounded as kernels round them, and LSE; over some keys alone."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, point.heads // point.heads_kv, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(point.head_dim)
    if point.mask == "causal":
        scores += np.triu(np.full((point.length, point.length), -np.inf), 1)
    weights = np.exp(scores[..., keys])
    o = rounded(weights, point.dtype) @ v[:, :, keys] / weights.sum(axis=-1, keepdims=True)
    return rounded(o, point.dtype), np.log(weights.sum(axis=-1))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_rounding_passes_and_far_from_the_limit(dtype, mask):
    if dtype == "bf16":
        pytest.importorskip("ml_dtypes")
    point = Point(dtype, mask, 1, 2, 1, 1000, 64)
    inputs = tensors(point)
    error = check.Expected(point, *inputs, CPU).check(*attention(point, *inputs))
    assert error < check.LIMIT / 2
    assert dtype == "f32" or error > 0.3  # it is in units of just that


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_one_lost_key_of_a_thousand_is_found(dtype):
    if dtype == "bf16":
        pytest.importorskip("ml_dtypes")
    point = Point(dtype, "full", 1, 1, 1, 1000, 64)
    inputs = tensors(point)
    o, _ = attention(point, *inputs, keys=slice(0, 999))
    with pytest.raises(check.Wrong, match=r"wrong result: batch 0 head 0 row \d+: error"):
        check.Expected(point, *inputs, CPU).check(o)


@pytest.mark.parametrize("damage, message", [
    (lambda o, lse: o.__setitem__((1, 3, 40), np.nan), "wrong result: NaN"),
    (lambda o, lse: lse.__setitem__((1, 2, 7), np.inf), "wrong LSE: NaN"),
    (lambda o, lse: o.__imul__(1.001), "wrong result: batch 0 head 0"),
    (lambda o, lse: lse.__imul__(1.4427), "wrong LSE: batch 0 head 0"),
])
def test_damage_is_found(damage, message):
    inputs = tensors(SMALL)
    o, lse = attention(SMALL, *inputs)
    expected = check.Expected(SMALL, *inputs, CPU)
    expected.check(o, lse)
    damage(o, lse)
    with pytest.raises(check.Wrong, match=message):
        expected.check(o, lse)


# ---- measuring -------------------------------------------------------------------------------------------


def test_calls_fit_the_time():
    plan = measuring.Plan(rounds=5, max_calls=100)
    assert measuring.calls_in_a_round(3.0, [4.0, 6.0], plan) == 60
    assert measuring.calls_in_a_round(-1.0, [4.0, 6.0], plan) == 1
    assert measuring.calls_in_a_round(9.0, [0.1, 0.1], plan) == 100
    assert measuring.calls_in_a_round(1.0, [1.0], measuring.Plan(rounds=5, max_calls=100, graph=20)) == 10


def test_ratio_is_of_rounds_with_the_same_clocks():
    none = contestants.Contestant(lambda: None, lambda: None)
    ours = measuring.Entry("cuflash", none, rounds=[[1.0, 1.0, 9.0], [2.0], [1.0]])
    peer = measuring.Entry("peer", none, rounds=[[2.0], [4.0], [1.0]])
    assert measuring.ratio(peer, ours) == 2.0
    assert ours.round_ms == [1.0, 2.0, 1.0] and ours.ms == 1.0


def spoilt(after: int) -> contestants.Maker:
    """cuflash, whose result is wrong from a certain call on."""
    def make(point, q, k, v, device):
        contestant = contestants.cuflash_with(None)(point, q, k, v, device)
        right, calls = contestant.call, [0]

        def call():
            right()
            calls[0] += 1
            if calls[0] > after:
                contestant.result()[0, 0, 0, 0] += 1

        contestant.call = call
        return contestant

    return make


def broken(*_):
    raise RuntimeError("no kernel image\nsecond line")


def run(makers) -> dict[str, dict]:
    rows = measuring.measure(SMALL, makers, CPU, measuring.Plan(rounds=2, max_calls=3), lambda: 1.0)
    return {row["contestant"]: row for row in rows}


@pytest.mark.parametrize("after, message", [
    (0, "wrong result: batch 0 head 0 row 0"), (5, "after 6 calls: wrong result")])
def test_a_wrong_result_is_not_reported(after, message):
    rows = run({"cuflash": spoilt(after), "numpy": contestants.numpy_plain})
    assert set(rows["cuflash"]) == {"point", "contestant", "failed"}
    assert rows["cuflash"]["failed"].startswith(message)
    assert rows["numpy"]["ms"] > 0


def test_a_peer_that_fails_or_is_wrong_is_no_peer():
    def lazy(point, q, k, v, device):
        return contestants.Contestant(lambda: None, lambda: q)

    rows = run({"cuflash": contestants.cuflash_with(None), "broken": broken, "lazy": lazy})
    assert rows["broken"]["failed"] == "RuntimeError: no kernel image"
    assert rows["lazy"]["failed"].startswith("wrong result")
    assert rows["cuflash"]["ms"] > 0 and "ratio" not in rows["cuflash"]


def test_a_forced_kernel_is_taken_or_refused_with_its_reason():
    rows = run({"cuflash": contestants.cuflash_with("reference"), "cuflash:wgmma": contestants.cuflash_with("wgmma")})
    assert rows["cuflash"]["kernel"] == "fwd_reference_cpu"
    assert "wgmma" in rows["cuflash:wgmma"]["failed"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_peers_of_the_cpu_are_right(dtype):
    if dtype == "bf16":
        pytest.importorskip("ml_dtypes")
    makers, _ = contestants.peers("cpu", None)
    rows = measuring.measure(Point(dtype, "causal", 2, 4, 2, 65, 32), makers, CPU,
                             measuring.Plan(rounds=1, max_calls=1), lambda: 1.0)
    assert [(row["contestant"], row.get("failed")) for row in rows] == [(name, None) for name in makers]


def test_peers_that_cannot_be_imported_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    makers, missing = contestants.peers("cpu", None)
    assert list(makers) == ["numpy"] and missing["torch"].startswith("torch cannot be imported")


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_peers_of_a_gpu_are_called_as_they_want(mask, monkeypatch):
    """On the CPU's tensors of PyTorch; what is not here stands in by its signature."""
    torch = pytest.importorskip("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def flash_attn_func(q, k, v, causal=False):
        o = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True)
        return o.transpose(1, 2), None

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, starts_q, starts_kv, heads, heads_kv, head_dim, causal, q_data_type):
            self.starts, self.causal = starts_q.tolist(), causal

        def run(self, q, k, v):
            return torch.cat([
                sdpa(*(x[begin:end].transpose(0, 1) for x in (q, k, v)), is_causal=self.causal, enable_gqa=True)
                .transpose(0, 1) for begin, end in zip(self.starts, self.starts[1:])])

    for module, name, value in (("flash_attn_interface", "flash_attn_func", flash_attn_func),
                                ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", Wrapper)):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[module], name, value)

    class Tensors(Cpu):
        doubles = staticmethod(lambda x: x.double().numpy())
        all_finite = staticmethod(lambda x: bool(x.isfinite().all()))
        normal = lambda self, *arguments: torch.from_numpy(Cpu.normal(self, *arguments))  # noqa: E731

    makers, _ = contestants.peers("cuda", ["sdpa_flash", "flash_attn_3", "flashinfer"])
    rows = measuring.measure(Point("f32", mask, 3, 4, 2, 33, 64), makers, Tensors(),
                             measuring.Plan(rounds=1, max_calls=1), lambda: 1.0)
    assert [row.get("failed") for row in rows] == [None] * 3


# ---- the program -----------------------------------------------------------------------------------------


def program(*flags: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    command = [sys.executable, ROOT / "benchmarks" / "compare.py", "--device", "cpu", "--preset", "tiny", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_on_the_cpu():
    done, lines = program("--peers", "numpy", "--rounds", "2", "--calls", "2", "--kernels", "auto,reference")
    assert done.returncode == 0, done.stderr
    header, *rows = lines
    run = header["run"]
    assert run["schema"] == 1 and run["device"] and run["cuflash"].startswith("cuflash ")
    assert run["flags"] == {"device": "cpu", "preset": "tiny", "peers": "numpy", "rounds": 2, "calls": 2,
                            "kernels": "auto,reference"}
    assert [row["contestant"] for row in rows] == ["cuflash", "cuflash:reference", "numpy"] * 4
    for row in rows:
        assert row["p20_ms"] <= row["ms"] <= row["p80_ms"] and row["calls"] == 4 and len(row["round_ms"]) == 2
        assert row["tflops"] == pytest.approx(Point(**row["point"]).tflops(row["ms"]), rel=1e-3)
        if row["contestant"] != "numpy":
            assert row["best_peer"] == "numpy" and row["ratio"] == row["ratios"]["numpy"] > 0
    assert {row["kernel"] for row in rows[::3]} == {"fwd_cpu"}
    progress = done.stderr.splitlines()
    assert progress[0].startswith("[1/4] f32 full B2 H4 Hkv2 S65 D32: cuflash ") and "s to go" in progress[0]
    assert progress[-1].startswith("cuflash to the best peer: geometric mean ")


@pytest.mark.parametrize("graph", [0, 4])
def test_a_run_on_a_gpu(graph):
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    done, lines = program("--device", "cuda", "--preset", "few-blocks", "--len", "512", "--head-dim", "64", "--peers",
                          "sdpa_flash,sdpa_cudnn", "--rounds", "2", "--calls", "3", "--graph", str(graph))
    assert done.returncode == 0, done.stderr
    assert lines[0]["run"]["driver"] and lines[0]["run"]["matmul_tflops"] > 0
    assert [row["contestant"] for row in lines[1:]] == ["cuflash", "sdpa_flash", "sdpa_cudnn"] * 2
    for row in lines[1:]:
        assert row["calls"] == 6 * max(graph, 1) and row["host_ms"] > 0 and row["ms"] > 0, row.get("failed")


def test_time_that_is_up(tmp_path):
    output = tmp_path / "lines.jsonl"
    done, _ = program("--peers", "numpy", "--seconds", "0.001", "--output", str(output))
    rows = [json.loads(line) for line in output.read_text().splitlines()][1:]
    assert done.returncode == 1 and done.stdout == ""
    assert [row["failed"] for row in rows] == ["no time left"] * 8


def test_a_wrong_result_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(compare, "cuflash_with", lambda kernel: spoilt(0))
    monkeypatch.setattr(compare, "START", compare.time.monotonic())
    assert compare.main(["--device", "cpu", "--preset", "tiny", "--peers", "none", "--len", "65"]) == 1
    output, progress = capsys.readouterr()
    assert "cuflash FAILED" in progress and "wrong result" in progress and "geometric mean" not in progress
    assert not any("ms" in json.loads(line) for line in output.splitlines())
