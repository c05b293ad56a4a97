#!/usr/bin/env python3
"""The public header compiles alone, in every dialect, by every compiler found, without a warning
and without any header but stddef.h and stdint.h."""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DIALECTS = {
    "gcc": ("c", ["c89", "c99", "c17"]),
    "clang": ("c", ["c89", "c99", "c17"]),
    "g++": ("c++", ["c++98", "c++20"]),
    "clang++": ("c++", ["c++98", "c++20"]),
}
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
ALLOWED = {"stddef.h", "stdint.h"}


def included_by_header(trace: str) -> set[str]:
    """Names that cuflash.h itself includes, from the output of -H (one dot a level)."""
    lines = [line.split(" ", 1) for line in trace.splitlines() if line.startswith(".")]
    return {Path(path).name for dots, path in lines if dots == ".."}


def check(compiler: str, language: str, dialect: str, include: Path) -> str:
    """What is wrong, or nothing."""
    command = [compiler, "-x", language, f"-std={dialect}", f"-I{include}", *STRICT]
    alone = subprocess.run([*command, "-H", "-"], input="#include <cuflash.h>\n", text=True,
                           capture_output=True)
    if alone.returncode:
        return alone.stderr
    others = included_by_header(alone.stderr)
    if others != ALLOWED:
        return f"cuflash.h includes {sorted(others)}, not {sorted(ALLOWED)}"
    used = subprocess.run([*command, str(HERE / "every_name.c")], text=True, capture_output=True)
    return used.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("include", type=Path, help="the folder of cuflash.h")
    include = parser.parse_args().include
    found, failed = 0, 0
    for compiler, (language, dialects) in DIALECTS.items():
        if not shutil.which(compiler):
            print(f"{compiler}: skipped, not installed")
            continue
        for dialect in dialects:
            found += 1
            wrong = check(compiler, language, dialect, include)
            print(f"{compiler} -std={dialect}: {wrong or 'ok'}")
            failed += bool(wrong)
    print(f"{found - failed} of {found} passed")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
