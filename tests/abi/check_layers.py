#!/usr/bin/env python3
"""Dependencies in src/ run one way, and what has one home stays there.

    check_layers.py src           check a tree
    check_layers.py --self-test   every rule finds a planted violation
"""
from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

OPERATIONS = ("forward", "backward", "decode", "cache", "merge", "cpu")
# What the files of each folder may include besides their own folder's.
MAY_INCLUDE = {
    "common": set(),
    "core": {"common"},
    "device": {"common"},
    "attention": {"common", "core", "device"},
    **{operation: {"common", "core", "device", "attention"} for operation in OPERATIONS},
    "api": {"common", "core", "device", "attention", *OPERATIONS},
}
# And these files of others: what merges the parts of decode merges those of forward too.
MAY_INCLUDE_FILES = {"forward": {"decode/combine.hpp"}}
# Headers that cost seconds in every unit, or write to streams that belong to the application.
BANNED_HEADERS = {"cooperative_groups.h", "cuda/barrier", "iostream"}

SOURCE_SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".in"}
# Comments and literals; the alternatives are tried in order at each place.
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)


def check_file(path: Path, source: Path) -> list[str]:
    text = path.read_text()
    relative = path.relative_to(source)
    folder = relative.parts[0]
    found = []
    if folder not in MAY_INCLUDE:
        found.append(f"{relative}: {folder}/ is not one of the layers")
    for header in INCLUDE.findall(text):
        target = header.split("/")[0] if "/" in header else ""
        if target in MAY_INCLUDE and target != folder and target not in MAY_INCLUDE.get(folder, set()) \
                and header not in MAY_INCLUDE_FILES.get(folder, set()):
            found.append(f"{relative}: {folder}/ may not include {header}")
        if header in BANNED_HEADERS:
            found.append(f"{relative}: includes {header}")
    code = NOT_CODE.sub(" ", text)
    if re.search(r"\b(asm|__asm__)\b", code) and relative.parts[:2] != ("device", "ptx"):
        found.append(f"{relative}: asm outside device/ptx/")
    if "<<<" in code:
        found.append(f"{relative}: a launch by <<<>>>, which loses the launch's error")
    if "cudaGetLastError" in code and relative.as_posix() != "device/runtime_cuda.cpp":
        found.append(f"{relative}: cudaGetLastError outside device/runtime_cuda.cpp")
    return found


def check_tree(source: Path) -> list[str]:
    files = sorted(p for p in source.rglob("*") if p.suffix in SOURCE_SUFFIXES)
    if not files:
        return [f"{source}: no source file"]
    return [problem for path in files for problem in check_file(path, source)]


# File -> content that breaks exactly one rule, or none.
PLANTED = {
    "common/a.hpp": '#include "core/problem.hpp"\n',
    "core/a.cpp": '#include "device/runtime.hpp"\n',
    "device/a.cuh": '#include "attention/key_range.hpp"\n',
    "attention/a.hpp": '#include "forward/reference/unit.hpp"\n',
    "forward/reference/a.cpp": '#include "backward/reference/unit.hpp"\n',
    "forward/reference/b.cuh": '#include "decode/tile.hpp"\n',
    "backward/reference/a.cuh": '#include "decode/combine.hpp"\n',
    "cpu/a.cpp": '  #  include "api/handle.hpp"\n',
    "other/a.cpp": "int a;\n",
    "forward/wmma/a.cuh": 'void f() { asm volatile("nop;"); }\n',
    "merge/a.cu": "void f() { kernel<<<1, 1>>>(); }\n",
    "decode/a.cu": "#include <cooperative_groups.h>\n",
    "decode/b.cu": "#include <cuda/barrier>\n",
    "api/a.cpp": "#include <iostream>\n",
    "api/b.cpp": "int f() { return cudaGetLastError(); }\n",
}
ALLOWED = {
    "forward/reference/c.cuh": '#include "decode/combine.hpp"\n',
    "device/ptx/b.cuh": '#include "common/integer.hpp"\nvoid f() { asm("nop;"); }\n',
    "api/c.cpp": '#include "forward/reference/variants.hpp"\n// asm and kernel<<<1>>>\n',
    "api/d.cpp": '/* cudaGetLastError\n asm */ const char* s = "asm \\" <<<";\n',
    "device/runtime_cuda.cpp": "int f() { return cudaGetLastError(); }\n",
}


def self_test() -> list[str]:
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory)
        for name, content in {**PLANTED, **ALLOWED}.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        for name in PLANTED:
            found = check_file(source / name, source)
            if len(found) != 1:
                wrong.append(f"planted in {name}: found {found}")
        for name in ALLOWED:
            wrong += check_file(source / name, source)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test == bool(arguments.source):
        parser.error("give a source folder or --self-test")
    found = self_test() if arguments.self_test else check_tree(arguments.source)
    print("\n".join(found) or "ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
