"""Puts the bindings on the path and gives the tests the CPU device.

Run as `python -m pytest tests/python`; CUFLASH_LIBRARY names the library to test. Without a library
the import below fails, and with it every test.
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A folder of its own for each process of pytest-xdist: Julia locks no compiled package, and cargo a program only while
# it builds it.
BUILD = ROOT / "build" / os.environ.get("PYTEST_XDIST_WORKER", "")
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(Path(__file__).parent)]

import cuflash  # noqa: E402
from cuflash import raw  # noqa: E402


def pytest_report_header() -> str:
    return f"libcuflash: {cuflash.library_path()}"


@pytest.fixture(scope="session")
def api() -> dict:
    """The committed description of the header."""
    return json.loads((ROOT / "bindings" / "cuflash.json").read_text())


@pytest.fixture
def cpu():
    with cuflash.Handle(raw.CUFLASH_DEVICE_CPU) as handle:
        yield handle


@pytest.fixture
def cpu_by_default():
    """NULL handles mean the CPU device."""
    cuflash.check(raw.cuflash_set_default_device(raw.CUFLASH_DEVICE_CPU))
    yield
    cuflash.check(raw.cuflash_set_default_device(raw.CUFLASH_DEVICE_CURRENT))
