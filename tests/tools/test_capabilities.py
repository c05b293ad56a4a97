"""docs/capabilities.md is what the library says of itself."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_current():
    run = subprocess.run([sys.executable, ROOT / "tools" / "capabilities.py", "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_page_has_no_hole_in_the_reference():
    """A feature that a fast family has and the reference has not could not be tested against it."""
    header: list[str] = []
    rows = 0
    for line in (ROOT / "docs" / "capabilities.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        if "reference (CUDA)" in cells:
            header = cells
        elif "yes" in cells:
            rows += 1
            assert [cell for name, cell in zip(header, cells) if name.startswith("reference")] == ["yes", "yes"], line
    assert rows > 50
