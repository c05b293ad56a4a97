#!/usr/bin/env python3
"""The objects of the CPU device's levels above the baseline share nothing but their tables.

A function that the compiler emits in several objects, such as an inline function of a header, is kept once, from
whichever object comes first: taken from the AVX-512 object it would end the program on a processor without.

    check_level_objects.py NM OBJECT ...
"""
from __future__ import annotations

import subprocess
import sys


def main() -> int:
    nm, *objects = sys.argv[1:]
    found = []
    for path in objects:
        table = subprocess.run([nm, "--defined-only", "--extern-only", "--demangle", path],
                               check=True, capture_output=True, text=True).stdout
        symbols = [line.split(maxsplit=2)[1:] for line in table.splitlines()]
        tables = [name for kind, name in symbols if kind in "RD"]
        found += [f"{path}: {kind} {name}" for kind, name in symbols if kind not in "RD"]
        if len(tables) != 1:
            found.append(f"{path}: {len(tables)} tables, not one: {', '.join(tables)}")
    if not objects:
        found.append("no objects to look at")
    print("\n".join(found) or f"ok: {len(objects)} objects")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
