#!/usr/bin/env python3
"""The shared library shows exactly the header's functions and depends on nothing it should not."""
from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

# A machine without a driver must load the library, and one with another CUDA toolkit too.
FORBIDDEN_LIBRARIES = ("libcuda.so", "libcudart.so")


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def exported(library: Path) -> dict[str, str]:
    """Symbol with version -> nm's type letter, without the version nodes themselves."""
    listing = output("nm", "-D", "--defined-only", "--with-symbol-versions", str(library))
    symbols = (line.split()[-2:] for line in listing.splitlines())
    return {name: letter for letter, name in symbols if letter != "A"}


def problems(library: Path, api: dict) -> list[str]:
    found = []
    symbols = exported(library)
    wanted = {f"{f['name']}@@{f['elf_node']}" for f in api["functions"]}
    found += [f"not exported: {name}" for name in sorted(wanted - symbols.keys())]
    found += [f"not in the header: {name}" for name in sorted(symbols.keys() - wanted)]
    found += [f"{name} is of type {letter}, not a plain function (T)"
              for name, letter in symbols.items() if letter != "T"]

    dynamic = output("readelf", "--dynamic", "--wide", str(library))
    soname = re.findall(r"\(SONAME\).*\[(.*)\]", dynamic)
    if soname != ["libcuflash.so.0"]:
        found.append(f"SONAME is {soname}")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    found += [f"needs {name}" for name in needed if name.startswith(FORBIDDEN_LIBRARIES)]
    if re.search(r"\((RUNPATH|RPATH)\)", dynamic):
        found.append("has a run path")
    # Unloading would leave CUDA with pointers to the kernels registered with it.
    if "NODELETE" not in dynamic:
        found.append("lacks the flag NODELETE")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("api", type=Path, help="bindings/cuflash.json")
    arguments = parser.parse_args()
    api = json.loads(arguments.api.read_text())
    found = problems(arguments.library, api)
    print("\n".join(found) or f"{len(api['functions'])} functions exported, nothing else")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
