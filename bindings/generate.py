#!/usr/bin/env python3
"""Regenerates what must agree with the public header.

    bindings/generate.py                     rewrite the committed outputs
    bindings/generate.py --check             fail, with a diff, if one of them is stale
    bindings/generate.py --header FILE --output DIR    work on a copy

libclang reads the header into cuflash.json; everything else is made from that JSON alone.
"""
from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

from generator import every_name, julia, layout_asserts, python, rust, version_script
from generator.header import HeaderError, read_header

ROOT = Path(__file__).resolve().parent.parent


def to_json(value: object, indent: str = "") -> str:
    """JSON with what fits on a line on one line, so that a diff shows one line a declaration."""
    flat = json.dumps(value)
    if len(indent + flat) <= 100 or not isinstance(value, (dict, list)):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {to_json(item, inner)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        items = [to_json(item, inner) for item in value]
        opening, closing = "[", "]"
    body = f",\n{inner}".join(items)
    return f"{opening}\n{inner}{body}\n{indent}{closing}"


def outputs(api: dict) -> dict[str, str]:
    """Path below the output directory -> content."""
    return {
        "bindings/cuflash.json": to_json(api) + "\n",
        "bindings/julia/CUFlash.jl/src/raw.jl": julia.emit(api),
        "bindings/julia/CUFlash.jl/test/layouts.jl": julia.emit_layout(api),
        "bindings/python/cuflash/_raw.py": python.emit(api),
        "bindings/rust/cuflash-sys/src/bindings.rs": rust.emit(api),
        "bindings/rust/cuflash/src/enums.rs": rust.emit_enums(api),
        "src/api/cuflash.map": version_script.emit(api),
        "tests/abi/every_name.c": every_name.emit(api),
        "tests/abi/layout_asserts.c": layout_asserts.emit(api),
    }


def stale_diff(path: Path, name: str, wanted: str) -> str:
    committed = path.read_text() if path.exists() else ""
    return "".join(difflib.unified_diff(
        committed.splitlines(keepends=True), wanted.splitlines(keepends=True),
        f"{name} (committed)", f"{name} (from the header)"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    parser.add_argument("--header", type=Path, default=ROOT / "include" / "cuflash.h")
    parser.add_argument("--output", type=Path, default=ROOT, help="root to write below")
    arguments = parser.parse_args()
    try:
        files = outputs(read_header(arguments.header.resolve()))
    except HeaderError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.check:
        diff = "".join(stale_diff(arguments.output / name, name, text)
                       for name, text in files.items())
        if diff:
            print(diff + "\nstale: run bindings/generate.py", file=sys.stderr)
        return 1 if diff else 0
    for name, text in files.items():
        path = arguments.output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
