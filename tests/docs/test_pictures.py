"""The pictures of the documentation show what the library computes, and are what their script draws."""
from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "pictures" / "draw.py"
sys.path.insert(0, str(ROOT / "bindings" / "python"))

from cuflash import Handle, check, raw  # noqa: E402

_spec = importlib.util.spec_from_file_location("draw", SCRIPT)
draw = importlib.util.module_from_spec(_spec)
sys.modules["draw"] = draw
_spec.loader.exec_module(draw)


def dense(array: np.ndarray) -> raw.cuflash_tensor_t:
    return raw.cuflash_tensor_t.new(data=array.ctypes.data, dtype=raw.CUFLASH_F32,
                                    flags=raw.CUFLASH_TENSOR_DENSE)


def output(v: np.ndarray, heads_q: int, len_q: int, **mask) -> np.ndarray:
    """O [heads_q, len_q, D] for v [heads_kv, len_k, D] where every score is 0."""
    heads_kv, len_k, head_dim = v.shape
    q, k = np.zeros((heads_q, len_q, head_dim), np.float32), np.zeros(v.shape, np.float32)
    o = np.full(q.shape, np.nan, np.float32)
    problem = raw.cuflash_problem_t.new(
        batch=1, heads_q=heads_q, heads_kv=heads_kv, len_q=len_q, len_k=len_k, head_dim=head_dim,
        q=dense(q), k=dense(k), v=dense(v), o=dense(o), **mask)
    with Handle(raw.CUFLASH_DEVICE_CPU) as cpu:
        check(raw.cuflash_attention_forward(cpu, problem, None))
    return o


def fields(mask) -> dict:
    """The mask of a picture as fields of the problem."""
    values: dict = {"mask": raw.CUFLASH_MASK_CAUSAL if mask.causal else raw.CUFLASH_MASK_NONE}
    if mask.align == "top-left":
        values["mask_align"] = raw.CUFLASH_ALIGN_TOP_LEFT
    elif mask.align != "bottom-right":
        values.update(mask_align=raw.CUFLASH_ALIGN_OFFSET, mask_offset=mask.align)
    if mask.window:
        values.update(flags=raw.CUFLASH_PROBLEM_WINDOW, window_left=mask.window[0],
                      window_right=mask.window[1])
    return values


@pytest.mark.parametrize("mask", draw.MASKS, ids=lambda m: f"{m.title}, {m.len_q} rows")
def test_masks(mask):
    """Value j is the unit vector j: a row's output is not zero where it sees the key."""
    v = np.eye(mask.len_k, dtype=np.float32)[None]
    seen = output(v, 1, mask.len_q, **fields(mask))[0] > 0
    drawn = [[mask.sees(i, j) for j in range(mask.len_k)] for i in range(mask.len_q)]
    np.testing.assert_array_equal(seen, drawn)


@pytest.mark.parametrize("heads_q, heads_kv", draw.HEAD_MAPS)
def test_heads(heads_q, heads_kv):
    """The values of head n are n everywhere."""
    v = np.arange(heads_kv, dtype=np.float32)[:, None, None] * np.ones((1, 3, 4), np.float32)
    read = output(v, heads_q, 1)[:, 0, 0]
    np.testing.assert_allclose(read, [draw.kv_head(h, heads_q, heads_kv) for h in range(heads_q)])


def run_script(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], text=True, capture_output=True)


def test_committed_pictures_are_current():
    run = run_script("--check")
    assert run.returncode == 0, run.stderr


def test_check_finds_a_stale_picture(tmp_path):
    assert run_script("--output", tmp_path).returncode == 0
    assert run_script("--output", tmp_path, "--check").returncode == 0
    picture = tmp_path / "heads.svg"
    picture.write_text(picture.read_text().replace("multi-query", "many-query"))
    run = run_script("--output", tmp_path, "--check")
    assert run.returncode == 1 and "heads.svg: stale" in run.stderr
