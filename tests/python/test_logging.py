"""Log lines go to stderr, a file or a callback, and only as far as the level says."""
from __future__ import annotations

import cuflash
import pytest
from arrays import run_python
from cuflash import raw

CALLS = """
import os, numpy as np, cuflash
from arrays import problem
from cuflash import raw
q, k, v, o = (np.zeros((1, 2, 8, 64), np.float16) for _ in range(4))
given = problem(q, k, v, o)
with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as handle:
    raw.cuflash_attention_forward(handle, given, None)
    given.batch = -1
    raw.cuflash_attention_forward(handle, given, None)
print(os.getpid())
"""
ERROR = "problem.batch: -1"
INFO = "created a handle"
CALL = "fwd_cpu"


@pytest.mark.parametrize("level, shown, hidden", [
    ("", [], [ERROR, INFO, CALL]),
    ("0", [], [ERROR, INFO, CALL]),
    ("1", [ERROR], [INFO, CALL]),
    ("2", [ERROR, INFO], [CALL]),
    ("3", [ERROR, INFO, CALL], []),
])
def test_levels_on_stderr(level, shown, hidden):
    run = run_python(CALLS, CUFLASH_LOG_LEVEL=level)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().isdigit(), "the log must not touch stdout"
    for text in shown:
        assert text in run.stderr
    for text in hidden:
        assert text not in run.stderr


def test_file_of_the_process(tmp_path):
    run = run_python(CALLS, CUFLASH_LOG_LEVEL="3", CUFLASH_LOG_FILE=str(tmp_path / "log-%p.txt"))
    assert run.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == [f"log-{run.stdout.strip()}.txt"]
    text = next(tmp_path.iterdir()).read_text()
    assert ERROR in text and INFO in text and CALL in text


def test_callback():
    lines = []
    cuflash.set_log_callback(lambda level, text: lines.append((level, text)), raw.CUFLASH_LOG_INFO)
    try:
        cuflash.Handle(raw.CUFLASH_DEVICE_CPU).close()
        assert raw.cuflash_problem_init(None, 64) == raw.CUFLASH_ERROR_NULL_POINTER
    finally:
        cuflash.set_log_callback(None)
    levels = [level for level, _ in lines]
    assert raw.CUFLASH_LOG_INFO in levels and raw.CUFLASH_LOG_ERROR in levels
    assert any(INFO in text for _, text in lines)
    count = len(lines)
    cuflash.Handle(raw.CUFLASH_DEVICE_CPU).close()
    assert len(lines) == count, "the callback was called after it was taken back"
