#!/usr/bin/env python3
"""Whether programs built with an older header still run: compares two bindings/cuflash.json.

    compare_api.py BASELINE NOW      one pair
    compare_api.py --gate NOW        NOW with each baseline, tests/abi/baselines/*.json

Nothing may go, change its type, value, place or ELF version; functions, enums, constants, structs and
fields at the end of a struct with struct_size may come. Prints what breaks; the status is 1 then.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

BASELINES = Path(__file__).resolve().parent / "baselines"
FIRST_RELEASE = (0, 7, 0)  # its header is the first baseline


def is_sized(struct: dict) -> bool:
    """Whether callers tell the size that they know, so that the struct may grow at its end."""
    return struct["fields"][0]["name"] == "struct_size"


def signature(function: dict) -> tuple:
    return function["return"], [parameter["type"] for parameter in function["parameters"]]


def compare_structs(before: dict, now: dict) -> list[str]:
    name, found = before["name"], []
    if before["name"] != now["name"] or before["alignment"] != now["alignment"]:
        found.append(f"{name}: renamed or aligned otherwise")
    kept = now["fields"][:len(before["fields"])]
    for position, old in enumerate(before["fields"]):
        new = kept[position] if position < len(kept) else None
        if new is None or new["name"] != old["name"]:
            found.append(f"{name}.{old['name']}: no longer at place {position}")
        elif any(new[key] != old[key] for key in ("type", "length", "offset", "size")):
            found.append(f"{name}.{old['name']}: other type, size or offset")
    if now["size"] < before["size"]:
        found.append(f"{name}: shrank from {before['size']} to {now['size']} bytes")
    if now["size"] > before["size"] and not is_sized(before):
        found.append(f"{name}: grew, but has no struct_size")
    return found


def compare_typedefs(before: dict, now: dict) -> list[str]:
    def meaning(typedef: dict) -> tuple:
        if typedef["kind"] == "callback":
            return "callback", signature(typedef)
        return typedef["kind"], typedef.get("tag"), typedef.get("type")

    return [] if meaning(before) == meaning(now) else [f"{before['name']}: another type"]


def compare_enums(before: dict, now: dict) -> list[str]:
    values = {constant["name"]: constant["value"] for constant in now["values"]}
    return [f"{old['name']}: {old['value']} before, now {values.get(old['name'], 'gone')}"
            for old in before["values"] if values.get(old["name"]) != old["value"]]


def compare_functions(before: dict, now: dict) -> list[str]:
    found = []
    if signature(before) != signature(now):
        found.append(f"{before['name']}: other parameters or result")
    if before["elf_node"] != now["elf_node"]:
        found.append(f"{before['name']}: moved from {before['elf_node']} to {now['elf_node']}")
    return found


KINDS = {  # list in the JSON: (what names an entry, how two entries of that name are compared)
    "typedefs": ("name", compare_typedefs),
    "enums": ("tag", compare_enums),
    "structs": ("tag", compare_structs),
    "functions": ("name", compare_functions),
}


def breaks(before: dict, now: dict) -> list[str]:
    found = [f"{name}: gone" for name in before["macros"] if name not in now["macros"]]
    for kind, (key, compare) in KINDS.items():
        entries = {entry[key]: entry for entry in now[kind]}
        for old in before[kind]:
            if old[key] in entries:
                found += compare(old, entries[old[key]])
            else:
                found.append(f"{old[key]}: gone")
    return found


def report(baseline: Path, now: dict) -> bool:
    before = json.loads(baseline.read_text())
    found = breaks(before, now)
    print("\n".join(found) or f"compatible with {baseline}: {len(before['functions'])} functions, "
                              f"{len(before['structs'])} structs, {len(before['enums'])} enums")
    return not found


def gate(path: Path, now: dict) -> bool:
    baselines = sorted(BASELINES.glob("*.json"))
    if baselines:
        return all([report(baseline, now) for baseline in baselines])
    version = tuple(now["macros"][f"CUFLASH_VERSION_{part}"] for part in ("MAJOR", "MINOR", "PATCH"))
    if version > FIRST_RELEASE:
        print(f"version {version} and no baseline in {BASELINES}: each release leaves one")
        return False
    print("no release yet, so no baseline: the header is compared with itself")
    return report(path, now)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", nargs="?", type=Path)
    parser.add_argument("now", type=Path)
    parser.add_argument("--gate", action="store_true")
    arguments = parser.parse_args()
    if arguments.gate == (arguments.baseline is not None):
        parser.error("name a baseline, or --gate")
    now = json.loads(arguments.now.read_text())
    right = gate(arguments.now, now) if arguments.gate else report(arguments.baseline, now)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
