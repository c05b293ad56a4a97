"""The Julia package: its own tests, its example and its README on a real Julia. Skipped where there
is none.
"""
from __future__ import annotations

import re

import pytest
from julia_process import JULIA, MISSING, PACKAGE, julia

pytestmark = pytest.mark.skipif(JULIA is None, reason=MISSING)


def test_package():
    total = re.search(r"CUFlash +\| +(\d+) +(\d+)$", julia(PACKAGE / "test" / "runtests.jl"),
                      re.MULTILINE)
    assert total and int(total[1]) == int(total[2]) > 500


def test_example():
    assert "largest error" in julia(PACKAGE / "examples" / "attention.jl")


def test_readme():
    """The first snippet works as it stands."""
    snippet = re.search(r"```julia\n(using CUFlash\n.*?)```", (PACKAGE / "README.md").read_text(),
                        re.DOTALL)[1]
    assert julia("-e", snippet + "print(size(dq))") == "(64, 100, 8, 2)"
