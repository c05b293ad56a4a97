"""The Julia package: its own tests, its example and its README on a real Julia. Skipped where there
is none.
"""
from __future__ import annotations

import re

import pytest
from julia_process import JULIA, MISSING, PACKAGE, julia, try_julia
from stub_library import build_stub

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


@pytest.mark.parametrize("stub, message", [
    ({"cuflash_abi_version": 1}, "has ABI 1; this package is for ABI 0"),
    ({"minor": 6}, "is version 0.6.0; this package needs 0.7 or newer"),
], ids=["newer ABI", "older version"])
def test_another_library(tmp_path, api, stub, message):
    library = build_stub(tmp_path, api, **stub)
    run = try_julia("-e", """
        using CUFlash
        println(CUFlash.functional(true))
        q = zeros(Float32, 8, 1, 1, 1)
        attention(q, q, q)
    """, CUFLASH_LIBRARY=str(library))
    assert run.returncode == 1 and run.stdout == "false\n"
    assert run.stderr.count(message) == 2  # by functional(true) and by the call
