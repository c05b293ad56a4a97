"""What the pages quote from the library is what it says."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings" / "python"))

import cuflash  # noqa: E402
from cuflash import raw  # noqa: E402


def test_message_of_the_errors_page():
    with pytest.raises(cuflash.Error) as error:
        cuflash.check(raw.cuflash_attention_forward_gqa_f32(
            None, None, None, None, None, 1, 1, 1, 1, 1, 8, 1.0, 3, None))
    quoted = f"\n{error.value.name}: {error.value.message}\n"
    assert quoted in (ROOT / "docs" / "errors.md").read_text()
