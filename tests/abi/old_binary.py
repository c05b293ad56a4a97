#!/usr/bin/env python3
"""A program of another release on today's library: old_binary.py LIBRARY.

old_binary.c is compiled against a header, linked with an empty library that has the ELF versions of that
time, and run with LIBRARY. The headers are those of past releases, tests/abi/baselines/*.h with the JSON
beside them, and today's: as it is, with structs that end 8 bytes earlier, with structs of a field more, and
with incompatible ones, whose program must fail.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Callable

from compare_api import BASELINES, is_sized

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEADER = (ROOT / "include" / "cuflash.h").read_text()
API = json.loads((ROOT / "bindings" / "cuflash.json").read_text())


def with_structs(edit: Callable[[str, dict], str]) -> str:
    """Today's header, without comments, with edit(its fields, the struct) as each sized struct's fields."""
    text = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    for struct in filter(is_sized, API["structs"]):
        text, count = re.subn(rf"(struct {struct['tag']} {{)(.*?)(}} {struct['name']};)",
                              lambda found: found[1] + edit(found[2], struct) + found[3], text, flags=re.DOTALL)
        assert count == 1, struct["name"]
    return text


def shorter(fields: str, struct: dict) -> str:
    gone = {field["name"] for field in struct["fields"] if field["offset"] >= struct["size"] - 8}
    return "".join(f"{field};" for field in fields.split(";")[:-1] if field.split()[-1] not in gone)


def longer(fields: str, _: dict) -> str:
    return fields + "int64_t from_the_future;\n"


def incompatible(fields: str, struct: dict) -> str:
    return fields.replace("uint32_t flags;", "uint32_t flags; int64_t inserted;")


def empty_library(api: dict, folder: Path) -> Path:
    """What programs of that time were linked with, as far as the linker looks."""
    nodes = defaultdict(list)
    for function in api["functions"]:
        nodes[function["elf_node"]].append(function["name"])
    (folder / "empty.map").write_text("\n".join(
        f"{node} {{ {' '.join(f'{name};' for name in names)} }};" for node, names in nodes.items()))
    (folder / "empty.c").write_text("\n".join(
        f"void {function['name']}(void) {{}}" for function in api["functions"]))
    library = folder / "libcuflash.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuflash.so.0",
                    f"-Wl,--version-script={folder / 'empty.map'}", folder / "empty.c", "-o", library], check=True)
    return library


def run(header: str, api: dict, library: Path, *flags: str) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "cuflash.h").write_text(header)
        program = folder / "program"
        subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", *flags, f"-I{folder}", HERE / "old_binary.c",
                        empty_library(api, folder), "-lm", "-o", program], check=True)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library.resolve().parent)}
        return subprocess.run([program], env=environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    library = parser.parse_args().library
    programs = {  # of which header: how it ran
        "today's": run(HEADER, API, library),
        "shorter structs": run(with_structs(shorter), API, library),
        "longer structs": run(with_structs(longer), API, library, "-DFROM_THE_FUTURE"),
    }
    for baseline in sorted(BASELINES.glob("*.json")):
        programs[baseline.stem] = run(baseline.with_suffix(".h").read_text(), json.loads(baseline.read_text()), library)
    failed = 0
    for name, done in programs.items():
        failed += done.returncode != 0
        print(f"{name}: {'runs' if done.returncode == 0 else f'FAILED, status {done.returncode}'}\n{done.stdout}",
              end="")
    if run(with_structs(incompatible), API, library).returncode == 0:
        failed += 1
        print("FAILED: a program with other structs runs too")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
