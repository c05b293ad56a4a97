"""What fuzz.py and gpu_check count of the draws."""
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import record  # noqa: E402
from record import Features  # noqa: E402


def test_pairs_of_all_cases_add_up():
    features = Features([
        {"name": "a", "features": "causal,window,bias", "pairs": "0 0 70,1 1 60,1 0 55,2 2 3,2 0 1,"},
        {"name": "did not draw"},
        {"name": "b", "features": "causal,window,bias", "pairs": "0 0 5,1 1 4,1 0 2,2 2 0,2 0 0,"},
    ])
    assert features.count("causal") == 75
    assert features.pairs[1, 0] == 57
    assert features.rare(50) == ["bias + causal: 1", "bias + bias: 3"]
    rows = features.table().splitlines()
    assert len(rows) == 4
    assert rows[1].split() == ["1", "window", "57", "64"]
    assert rows[2].split() == ["2", "bias", "1", "-", "3"]  # bias and window are never drawn together


def test_digests_are_of_what_a_file_says(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "ROOT", tmp_path)

    def digest_with(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        result = record.digest(["."])
        (tmp_path / name).unlink()
        return result

    assert digest_with("a.cpp", "int x = 1;\n") == digest_with("a.cpp", "int x =\n    1;")
    assert digest_with("a.cpp", "int x = 1;\n") == digest_with("a.cpp", "// one\nint x /* of */ = 1;  // two")
    assert digest_with("a.cpp", "int x = 1;\n") != digest_with("a.cpp", "int x = 2;\n")
    assert digest_with("a.cpp", 'f("http://a")') != digest_with("a.cpp", 'f("http://b")')
    assert digest_with("a.cpp", 'f("\\"//a")') != digest_with("a.cpp", 'f("\\"//b")')
    assert digest_with("a.cpp", "int x = 1;\n") != digest_with("b.cpp", "int x = 1;\n")
    assert digest_with("a.py", "if x:\n  y()\nz()\n") != digest_with("a.py", "if x:\n  y()\n  z()\n")


def test_a_program_that_is_killed_fails_with_its_signal(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho begun\nkill -9 $$\n")
    program.chmod(0o755)
    cases, output = record.run_gtest(program, "*")
    assert [record.outcome(case) for case in cases] == ["failed"] and "begun" in output
    assert "exit status -9" in record.failure(cases[0]) and "begun" in record.failure(cases[0])
