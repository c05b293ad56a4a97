"""benchmarks/compare.py on the CPU device: what it measures, that it refuses wrong results, what it writes."""
from __future__ import annotations

import argparse
import dataclasses
import inspect
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
from comparison.points import Point, add_axes, groups, points  # noqa: E402

SMALL = Point("f32", "causal", 2, 4, 2, 65, 32)
RAGGED = Point("f32", "causal", 6, 4, 2, 90, 32, ragged=1)
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


def test_what_is_compared_takes_turns():
    assert {len(group) for group in groups(of())} == {1}
    found = groups(of("--preset", "grouped", "--dtype", "f16,bf16"))
    assert len(found) == 6
    for group in found:
        assert [(point.heads_kv, point.dtype) for point in group] == [
            (heads_kv, dtype) for heads_kv in (16, 2, 1) for dtype in ("f16", "bf16")]
        assert len({(point.length, point.mask) for point in group}) == 1
    assert {len(group) for group in groups(of("--preset", "dtypes"))} == {2}


def test_windows():
    found = of("--preset", "windows")
    assert [str(point) for point in found] == [
        f"bf16 {mask} B1 H16 S16384 D128" for mask in ("causal", "window 1023,0")]
    assert of("--preset", "windows", "--mask", "causal,window:1024") == found


@pytest.mark.parametrize("window", [1, 3, 7, 20])
@pytest.mark.parametrize("length", [1, 2, 7, 10])
def test_flops_count_the_pairs_of_a_window(window, length):
    [point] = of("--preset", "tiny", "--len", str(length), "--mask", f"window:{window}")
    seen = sum(1 for row in range(length) for key in range(length) if row - window < key <= row)
    assert point.window == window and point.flops == 4 * 2 * 4 * 32 * seen


def test_ragged():
    found = of("--preset", "ragged")
    assert [(point.head_dim, point.mask) for point in found] == [
        (head_dim, mask) for head_dim in (64, 128, 256) for mask in ("full", "causal")]
    full, causal = found[2:4]
    assert str(full) == "bf16 full B64 H16 S4096 D128 ragged by seed 1"
    drawn = np.array(full.lengths)
    assert len(drawn) == 64 and 1 <= drawn.min() < 100 and 3000 < drawn.max() <= 4096
    assert np.mean(drawn < 512) == pytest.approx(0.5, abs=0.15)  # u^3 is below 1/8 half of the time
    assert full.lengths[:4] == (10, 2493, 1825, 68)  # whatever draws them
    assert full.flops == 4 * 16 * 128 * sum(int(length)**2 for length in drawn) == 2 * causal.flops
    assert full.shape_q == (drawn.sum(), 16, 128) and full.shape_lse == (16, drawn.sum())
    assert of("--preset", "ragged", "--ragged", "2")[0].lengths != full.lengths
    assert {point.ragged for point in of()} == {None}


def test_a_point_in_a_line_is_that_point():
    for point in (SMALL, RAGGED):
        assert Point(**json.loads(json.dumps(point.json()))) == point
    assert "ragged" not in SMALL.json()


def test_flops_count_what_a_causal_mask_leaves():
    full, causal = of("--len", "512", "--head-dim", "64")
    assert full.flops == 4 * 32 * 32 * 512 * 512 * 64 == 2 * causal.flops
    assert full.tflops(1.0) == pytest.approx(full.flops * 1e-9)


@pytest.mark.parametrize("flags", [
    ("--len", "0"), ("--len", "512,"), ("--batch", "-1"), ("--dtype", "fp16"), ("--mask", "window"),
    ("--mask", "window:0"), ("--mask", "window 3,0"), ("--preset", "all"), ("--ragged", "u")])
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


def attention(point: Point, q, k, v, keys: slice = slice(None), starts=None):
    """O with probabilities and results rounded as kernels round them, and LSE; over some keys alone."""
    if point.ragged is not None:
        starts = point.starts if starts is None else starts
        parts = [attention(dataclasses.replace(point, ragged=None),
                           *(x[begin:end].swapaxes(0, 1)[None] for x in (q, k, v)))
                 for begin, end in zip(starts, starts[1:])]
        return (np.concatenate([o[0].swapaxes(0, 1) for o, _ in parts]),
                np.concatenate([lse[0] for _, lse in parts], axis=1))
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, point.heads // point.heads_kv, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(point.head_dim)
    if point.mask != "full":
        everything = np.full(scores.shape[2:], -np.inf)
        scores += np.triu(everything, 1)
        if point.window:
            scores += np.tril(everything, -point.window)
    weights = np.exp(scores[..., keys])
    o = rounded(weights, point.dtype) @ v[:, :, keys] / weights.sum(axis=-1, keepdims=True)
    return rounded(o, point.dtype), np.log(weights.sum(axis=-1))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("mask", ["full", "causal", "window 99,0"])
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


@pytest.mark.parametrize("window", [98, 100, 101])
def test_another_window_is_found(window):
    point = Point("f16", "window 98,0", 1, 2, 1, 1000, 64)
    inputs = tensors(point)
    check.Expected(point, *inputs, CPU).check(*attention(point, *inputs))
    o, _ = attention(dataclasses.replace(point, mask=f"window {window - 1},0"), *inputs)
    with pytest.raises(check.Wrong, match="wrong result"):
        check.Expected(point, *inputs, CPU).check(o)


@pytest.mark.parametrize("mask", ["full", "causal", "window 9,0"])
def test_ragged_results(mask):
    point = dataclasses.replace(RAGGED, mask=mask)
    inputs = tensors(point)
    expected = check.Expected(point, *inputs, CPU)
    o, lse = attention(point, *inputs)
    assert o.shape == point.shape_q and lse.shape == point.shape_lse
    assert expected.check(o, lse) < check.LIMIT / 2
    # Sequences that begin a row too late, or all keys for every row.
    for starts in ([0, *(start + 1 for start in point.starts[1:-1]), point.starts[-1]], [0, point.starts[-1]]):
        with pytest.raises(check.Wrong, match="wrong result"):
            expected.check(attention(point, *inputs, starts=starts)[0])
    with pytest.raises(check.Wrong, match="wrong LSE"):
        expected.check(o, np.ascontiguousarray(lse.T).reshape(lse.shape))


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
                contestant.result()[(0,) * contestant.result().ndim] += 1

        contestant.call = call
        return contestant

    return make


def broken(*_):
    raise RuntimeError("no kernel image\nsecond line")


def run(makers) -> dict[str, dict]:
    [rows] = measuring.measure([SMALL], makers, CPU, measuring.Plan(rounds=2, max_calls=3), lambda: 1.0)
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
    point = Point(dtype, "causal", 2, 4, 2, 65, 32)
    makers, _ = contestants.peers("cpu", None, [point])
    [rows] = measuring.measure([point], makers, CPU, measuring.Plan(rounds=1, max_calls=1), lambda: 1.0)
    assert [(row["contestant"], row.get("failed")) for row in rows] == [(name, None) for name in makers]


def test_peers_that_cannot_be_imported_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    makers, missing = contestants.peers("cpu", None, [SMALL])
    assert list(makers) == ["numpy"] and missing["torch"].startswith("torch cannot be imported")


@pytest.mark.parametrize("ragged", [None, 1])
@pytest.mark.parametrize("mask", ["full", "causal", "window 5,0"])
def test_peers_of_a_gpu_are_called_as_they_want(mask, ragged, monkeypatch):
    """On the CPU's tensors of PyTorch; what is not here stands in by its signature."""
    torch = pytest.importorskip("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def one(q, k, v, causal, left):  # [S, H, D]
        seen = torch.ones(len(q), len(q), dtype=torch.bool)
        seen = seen.tril() if causal else seen
        seen = seen.triu(-left) if left >= 0 else seen
        return sdpa(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, enable_gqa=True).transpose(0, 1)

    def all_of(q, k, v, starts, causal, left):  # [T, H, D]
        starts = starts.tolist()
        return torch.cat([one(*(x[begin:end] for x in (q, k, v)), causal, left)
                          for begin, end in zip(starts, starts[1:])])

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        return torch.stack([one(*each, causal, window_size[0]) for each in zip(q, k, v)]), None

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False,
                               window_size=(-1, -1)):
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        return all_of(q, k, v, cu_seqlens_q, causal, window_size[0])

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        assert cu_seq_q is cu_seq_k and max_q == max_k == cu_seq_q.diff().max()
        return all_of(query, key, value, cu_seq_q, window_size[1] == 0, window_size[0])

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, starts_q, starts_kv, heads, heads_kv, head_dim, causal, q_data_type, window_left=-1):
            self.arguments = starts_q, causal, window_left

        def run(self, q, k, v):
            return all_of(q, k, v, *self.arguments)

    for module, functions in (
            ("flash_attn_interface", {"flash_attn_func": flash_attn_func,
                                      "flash_attn_varlen_func": flash_attn_varlen_func}),
            ("torch.nn.attention.varlen", {"varlen_attn": varlen_attn}),
            ("flashinfer", {"BatchPrefillWithRaggedKVCacheWrapper": Wrapper})):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        for name, value in functions.items():
            setattr(sys.modules[module], name, value)

    class Tensors(Cpu):
        doubles = staticmethod(lambda x: x.double().numpy())
        all_finite = staticmethod(lambda x: bool(x.isfinite().all()))
        normal = lambda self, *arguments: torch.from_numpy(Cpu.normal(self, *arguments))  # noqa: E731
        integers = staticmethod(lambda values: torch.tensor(values, dtype=torch.int32))

    point = Point("f32", mask, 3, 4, 2, 33, 64, ragged)
    names = ["sdpa_flash", "torch_varlen", "flash_attn_3", "flashinfer"]
    makers, missing = contestants.peers("cuda", names, [point])
    if mask.startswith("window") or ragged:
        assert missing == {"sdpa_flash": "takes dense batches alone" if ragged else "has no windows"}
    else:
        assert missing == {"torch_varlen": "is sdpa_flash by another name here"}
    [rows] = measuring.measure([point], makers, Tensors(), measuring.Plan(rounds=1, max_calls=1), lambda: 1.0)
    assert [row.get("failed") for row in rows] == [None] * 3


def test_torch_has_what_ragged_batches_need():
    """The names and the order of the arguments that the call relies on; it runs on a GPU alone."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    parameters = inspect.signature(varlen.varlen_attn).parameters
    assert list(parameters)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "window_size" in parameters


def test_a_peer_says_what_it_does_not_compute_among_what_it_does():
    makers, missing = contestants.peers("cpu", ["torch"], [SMALL, RAGGED])
    if missing:
        pytest.skip(missing["torch"])
    plan = measuring.Plan(rounds=1, max_calls=1)
    [dense], [ragged] = measuring.measure([SMALL, RAGGED], makers, CPU, plan, lambda: 1.0)
    assert dense["ms"] > 0 and ragged["failed"] == "takes dense batches alone"


# ---- ragged batches beside dense ones --------------------------------------------------------------------


def test_time_at_the_speeds_of_dense_batches():
    assert measuring.dense_lengths(4096) == [128, 256, 512, 1024, 2048, 4096]
    assert measuring.dense_lengths(4097)[-1] == 8192 and measuring.dense_lengths(1) == [128]
    point = Point("bf16", "full", 3, 2, 2, 4096, 64, ragged=1)
    speeds = {128: 100.0, 256: 300.0, 512: 500.0}
    flops = {length: 4 * 2 * 64 * length**2 for length in (50, 256, 362, 512)}

    class Chosen(Point):
        lengths = (50, 256, 512)

    chosen = Chosen(*dataclasses.astuple(point))
    wanted = flops[50] / 100 + flops[256] / 300 + flops[512] / 500
    assert measuring.dense_ms(chosen, speeds) == pytest.approx(wanted * 1e-9)
    Chosen.lengths = (2**8.5,)  # half way between two in the logarithm
    assert measuring.dense_ms(chosen, speeds) == pytest.approx(4 * 2 * 64 * 2.0**17 / 400 * 1e-9)


def test_ratio_to_dense_is_of_rounds_with_the_same_clocks():
    none = contestants.Contestant(lambda: None, lambda: None)
    point = Point("bf16", "causal", 4, 2, 2, 100, 64, ragged=1)
    [dense] = measuring.dense_points(point)
    assert dense == Point("bf16", "causal", 128, 2, 2, 128, 64)
    share = point.flops / dense.flops  # all are below 128 rows: of one speed
    ragged = measuring.Entry("cuflash", none, rounds=[[1.0], [2.0], [3.0]])
    beside = {128: measuring.Entry("cuflash", none, rounds=[[8.0], [2.0], [6.0]])}
    found = measuring.beside_dense(ragged, point, beside)
    assert found["dense_ratio"] == pytest.approx(2 * share, rel=1e-4)
    assert found["dense_tflops"] == {"128": pytest.approx(dense.tflops(6.0), rel=1e-4)}


def test_ragged_rows():
    point = dataclasses.replace(RAGGED, batch=3, length=220)
    makers = {"cuflash": contestants.cuflash_with(None), "numpy": contestants.numpy_plain}
    [rows] = measuring.measure([point], makers, CPU, measuring.Plan(rounds=2, max_calls=2), lambda: 1.0)
    ours, numpy = rows
    assert ours["point"] == point.json() and ours["tflops"] == pytest.approx(point.tflops(ours["ms"]), rel=1e-3)
    assert ours["ratio"] > 0 and set(ours["dense_tflops"]) == {"128", "256"} and ours["dense_ratio"] > 0
    assert numpy["ms"] > 0 and "dense_ratio" not in numpy


def test_a_dense_batch_that_is_wrong_is_no_measure():
    def make(point, *others):
        return (contestants.cuflash_with(None) if point.ragged else spoilt(0))(point, *others)

    [[row]] = measuring.measure([RAGGED], {"cuflash": make}, CPU, measuring.Plan(rounds=1, max_calls=1), lambda: 1.0)
    assert row["ms"] > 0 and row["dense_failed"].startswith("length 128: wrong result") and "dense_ratio" not in row


def test_starts_of_sequences_that_are_wrong_are_found(monkeypatch):
    class Late(Cpu):
        integers = staticmethod(lambda values: Cpu.integers([0, *(start + 1 for start in values[1:-1]), values[-1]]))

    makers = {"cuflash": contestants.cuflash_with(None)}
    [[row]] = measuring.measure([RAGGED], makers, Late(), measuring.Plan(rounds=1, max_calls=1), lambda: 1.0)
    assert row["failed"].startswith("wrong result")


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


def test_a_ragged_run_on_a_gpu():
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    done, lines = program("--device", "cuda", "--preset", "ragged", "--dtype", "f16,bf16", "--head-dim", "64",
                          "--peers", "torch_varlen", "--rounds", "2", "--calls", "3")
    assert done.returncode == 0, done.stderr
    assert [row["contestant"] for row in lines[1:]] == ["cuflash", "torch_varlen"] * 4
    for row in lines[1:]:
        assert row["ms"] > 0 and row["calls"] == 6, row.get("failed")
    for row in lines[1::2]:
        assert row["ratios"]["torch_varlen"] > 0 and row["dense_ratio"] > 0
        assert list(row["dense_tflops"]) == ["128", "256", "512", "1024", "2048", "4096"]


def test_windows_on_a_gpu():
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    done, lines = program("--device", "cuda", "--preset", "windows", "--len", "2048", "--peers", "torch_varlen",
                          "--rounds", "2", "--calls", "3")
    assert done.returncode == 0, done.stderr
    assert lines[3]["point"]["mask"] == "window 1023,0" and lines[3]["ratio"] > 0
    assert lines[2]["failed"] == "is sdpa_flash by another name here"


def test_dtypes_windows_and_ragged_batches_on_the_cpu():
    done, lines = program("--peers", "numpy", "--rounds", "2", "--calls", "2", "--dtype", "f16,f32", "--len", "65",
                          "--mask", "causal,window:7")
    assert done.returncode == 0, done.stderr
    assert [(row["point"]["mask"], row["point"]["dtype"]) for row in lines[1::2]] == [
        (mask, dtype) for mask in ("causal", "window 6,0") for dtype in ("f16", "f32")]
    assert {row["contestant"]: row["failed"] for row in lines[1:] if "failed" in row} == {}
    done, lines = program("--peers", "numpy", "--rounds", "2", "--calls", "2", "--ragged", "3", "--batch", "5")
    assert done.returncode == 0, done.stderr
    assert "of dense;" in done.stderr and lines[0]["run"]["flags"]["ragged"] == 3
    assert [row["dense_ratio"] > 0 for row in lines[1::2]] == [True] * 4


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
