#!/usr/bin/env python3
"""The table of cases and properties, cases.md, has every row, and each row a test that exists or the reason why not.

    check_cases.py PROGRAM...      the GoogleTest programs of this build

Tests of a GPU that this build left out are looked up in their sources.
"""
from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = 117  # rows of the list of reports; its numbers have gaps
PROPERTIES = [f"P{n}" for n in range(1, 47)]


def tests_of(program: str) -> set[str]:
    """Suite.Name of each test, without parameters."""
    names, suite = set(), ""
    for line in subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith(" "):
            names.add(suite + line.split("#")[0].strip().partition("/")[0])
        elif line.rstrip().partition(" ")[0].endswith("."):
            suite = line.split()[0]
    return names


def tests_in_sources() -> set[str]:
    found = (re.findall(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", source.read_text(), re.M) for source in (HERE / "cuda").glob("*.cpp"))
    return {f"{suite}.{name}" for tests in found for suite, name in tests}


def mistakes(text: str, tests: set[str]) -> list[str]:
    rows = re.findall(r"^\| ([BP]\d+) \|.* \| (.*) \|$", text, re.M)
    wrong = []
    numbers = [number for number, _ in rows]
    cases = {number for number in numbers if number[0] == "B"}
    if len(numbers) != len(set(numbers)):
        wrong.append("a row is there twice")
    if len(cases) != CASES:
        wrong.append(f"{len(cases)} cases, not {CASES}")
    wrong += [f"{number}: is missing" for number in PROPERTIES if number not in numbers]
    for number, cell in rows:
        names = [name for name in re.findall(r"`([^`]+)`", cell) if re.fullmatch(r"\w+\.[\w*]+", name)]
        wrong += [f"{number}: no test {name}" for name in names if not fnmatch.filter(tests, name)]
        if not names and not cell.startswith("reason: "):
            wrong.append(f"{number}: neither a test nor a reason")
    return wrong


def main() -> int:
    tests = tests_in_sources().union(*map(tests_of, sys.argv[1:]))
    wrong = mistakes((HERE / "cases.md").read_text(), tests)
    print("\n".join(wrong) or f"{CASES} cases and {len(PROPERTIES)} properties: each has a test or a reason")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
