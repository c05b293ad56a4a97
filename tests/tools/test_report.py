"""benchmarks/report.py on tests/tools/compare.jsonl: three points, one of them wrong, one with a peer less."""
from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("compare.jsonl")
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None,
                                      reason="Matplotlib is not installed (benchmarks/requirements.txt)")


def made(capsys, *flags: str) -> str:
    assert report.main([*map(str, [RESULTS]), *flags]) == 0
    return capsys.readouterr().out


def test_tables(capsys):
    text = made(capsys)
    assert "- A GPU, 2026-11-30, driver 580.1, cuda 13.0, matmul_tflops 720.0, python 3.12.1, torch 2.11.0" in text
    assert "commit 0123abc" in text and "without flashinfer: flashinfer cannot be imported" in text
    assert "| 512 | 32 | 343.6 | 171.8 | 286.3 | 1.200 | cudnn | `fwd_wgmma_bf16_d128` |" in text
    assert "| 1024 | 16 | 687.2 | 2291 | – | 0.300 | flash | `fwd_wgmma_bf16_d128` |" in text
    assert "| 1024 | 16 | – | 458.1 | – | – | – | – |" in text
    mean = "2 | 0.600 | 0.300 | bf16 causal B16 H16 S1024 D128 |"  # sqrt(1.2 * 0.3)
    assert f"| bf16 | D128 | causal | {mean}" in text and f"| bf16 | all | all | {mean}" in text
    assert "- bf16 full B16 H16 S1024 D128: cuflash: wrong result: batch 0" in text
    assert "- bf16 causal B16 H16 S1024 D128: cudnn: no engine" in text


def test_against_one_peer(capsys):
    text = made(capsys, "--against", "flash")
    assert "cuflash is faster than flash" in text
    assert "| 512 | 32 | 343.6 | 171.8 | 286.3 | 2.000 | flash |" in text
    text = made(capsys, "--against", "cudnn")
    assert "| bf16 | all | all | 1 | 1.200 | 1.200 |" in text


def test_what_was_measured_last_counts(tmp_path, capsys):
    row = json.loads(RESULTS.read_text().splitlines()[1])
    again = tmp_path / "again.jsonl"
    again.write_text(json.dumps({**row, "tflops": 400.0, "ratio": 1.5}) + "\n")
    text = made(capsys, str(again))
    assert "| 400 | 171.8 |" in text and "343.6" not in text


def rows_of(path: Path, *points: dict) -> str:
    """A file with a row of cuflash for each: what of a point is another than usual, and the keys of the row."""
    usual = {"dtype": "bf16", "mask": "causal", "batch": 4, "heads": 16, "heads_kv": 16, "length": 512, "head_dim": 64}
    lines = []
    for changed in points:
        point = {**usual, **{name: value for name, value in changed.items() if name in (*usual, "ragged")}}
        row = {name: value for name, value in changed.items() if name not in point}
        lines.append({"point": point, "contestant": "cuflash", "ms": 1.0, "kernel": "k", **row})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_f16_to_bf16(tmp_path, capsys):
    file = rows_of(tmp_path / "rows.jsonl", {"tflops": 500.0}, {"dtype": "f16", "tflops": 400.0},
                   {"length": 1024, "tflops": 600.0}, {"length": 1024, "dtype": "f16", "tflops": 630.0},
                   {"length": 2048, "dtype": "f16", "tflops": 630.0}, {"length": 4096, "tflops": 630.0})
    assert report.main([file]) == 0
    _, text = capsys.readouterr().out.split("## f16 to bf16")
    assert "| causal B4 H16 S512 D64 | 400 | 500 | 0.800 |" in text
    assert "| causal B4 H16 S1024 D64 | 630 | 600 | 1.050 |" in text
    assert "Geometric mean 0.917, smallest 0.800 of 2, at causal B4 H16 S512 D64." in text  # sqrt(0.8 * 1.05)


def test_grouped_heads(tmp_path, capsys):
    file = rows_of(tmp_path / "rows.jsonl", {"tflops": 500.0}, {"heads_kv": 2, "tflops": 450.0},
                   {"heads_kv": 1, "tflops": 550.0}, {"length": 1024, "heads_kv": 1, "tflops": 550.0})
    assert report.main([file]) == 0
    _, text = capsys.readouterr().out.split("## Grouped heads")
    assert "| bf16 causal B4 H16 Hkv2 S512 D64 | 450 | 500 | 0.900 |" in text
    assert "| bf16 causal B4 H16 Hkv1 S512 D64 | 550 | 500 | 1.100 |" in text
    assert "Geometric mean 0.995, smallest 0.900 of 2, at bf16 causal B4 H16 Hkv2 S512 D64." in text


def test_ragged_batches(tmp_path, capsys):
    file = rows_of(tmp_path / "rows.jsonl", {"tflops": 500.0},
                   {"ragged": 1, "tflops": 400.0, "dense_ratio": 0.93, "dense_tflops": {"128": 200.0, "256": 345.6}},
                   {"ragged": 2, "tflops": 401.0, "dense_failed": "length 128: no memory"})
    assert report.main([file]) == 0
    text = capsys.readouterr().out
    tokens = 1 + 1 + 1 + 1 + int(511 * 0.13436**3) + int(511 * 0.84743**3) + int(511 * 0.76377**3) + int(
        511 * 0.25507**3)
    assert f"| bf16 causal B4 H16 S512 D64 ragged by seed 1 | {tokens} | 400 | 0.930 | 128: 200, 256: 345.6 |" in text
    assert "### bf16 D64 H16 causal ragged by seed 1\n" in text and "### bf16 D64 H16 causal\n" in text
    assert ("- bf16 causal B4 H16 S512 D64 ragged by seed 2: cuflash: dense batches: length 128: no memory") in text


def test_no_sections_without_their_points(capsys):
    text = made(capsys)
    assert "Ragged" not in text and "f16 to bf16" not in text and "Grouped" not in text


def test_names_without_times_are_refused(capsys):
    with pytest.raises(SystemExit):
        report.main([str(RESULTS), "--against", "numpy"])
    assert "those that have: cuflash, flash, cudnn" in capsys.readouterr().err


def test_another_schema_is_refused(tmp_path):
    later = tmp_path / "later.jsonl"
    later.write_text('{"run": {"schema": 2}}\n')
    with pytest.raises(ValueError, match="later.jsonl:1: schema 2; 1 is known"):
        report.read([later])


@needs_matplotlib
def test_figures(tmp_path, capsys):
    text = made(capsys, "--figures", str(tmp_path))
    figures = {name: (tmp_path / name).read_bytes() for name in ("tflops.svg", "ratios.svg")}
    assert all(f"![{name}]({name})" in text and b"</svg>" in svg for name, svg in figures.items())
    assert b">0.30<" in figures["ratios.svg"] and b">bf16 D128 H16 full<" in figures["tflops.svg"]
    made(capsys, "--figures", str(tmp_path))
    assert all((tmp_path / name).read_bytes() == svg for name, svg in figures.items())
