#!/usr/bin/env python3
"""abidiff's view of the same question as compare_api.py: the debug information and the symbols of two
libraries.

    compare_libraries.py LIBRARY API                   LIBRARY with each tests/abi/baselines/*.abi
    compare_libraries.py LIBRARY API --save FILE.abi   writes a baseline

API is the library's bindings/cuflash.json; a baseline has its own beside it. Before the first release the library is compared with its
own dump, which shows that the tools see all of its interface. Exit status 77: they are not there.
"""
from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from compare_api import BASELINES, is_sized

EXPORTED = "--exported-interfaces-only"  # else a dump holds the whole library's types


def run(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


def why_blind(library: Path) -> str:
    """abidiff finds two libraries without debug information equal."""
    missing = [tool for tool in ("abidiff", "abidw") if not shutil.which(tool)]
    if missing:
        return f"no {' and '.join(missing)} (Debian package abigail-tools)"
    if ".debug_info" not in run("readelf", "--section-headers", "--wide", library).stdout:
        return f"no debug information in {library.name} (CMAKE_BUILD_TYPE=RelWithDebInfo gives it)"
    return ""


def suppressions(before: dict, now: dict) -> str:
    """Structs that tell their size may grow at the end. Only for those that did: abidiff's suppression
    also hides swapped and retyped fields of a struct that has no new ones."""
    fields = {struct["tag"]: len(struct["fields"]) for struct in now["structs"]}
    return "".join(f"[suppress_type]\n  name = {struct['tag']}\n  type_kind = struct\n"
                   "  has_data_member_inserted_at = end\n\n"
                   for struct in before["structs"]
                   if is_sized(struct) and fields.get(struct["tag"], 0) > len(struct["fields"]))


def dump(library: Path, target: Path) -> None:
    done = run("abidw", EXPORTED, "--no-corpus-path", "--no-comp-dir-path", "--type-id-style",
               "hash", "--out-file", target, library)
    if done.returncode:
        raise RuntimeError(done.stderr)


def unseen(baseline: Path, api: dict) -> list[str]:
    """Functions of the header that a dump holds no declaration of: the comparison ignores them."""
    text = baseline.read_text()
    functions = set(re.findall(r"<function-decl name='(\w+)'", text))
    structs = set(re.findall(r"<class-decl name='(\w+)'", text))  # -g1 leaves no types, and abidiff finds nothing to compare
    return [*(f["name"] for f in api["functions"] if f["name"] not in functions),
            *(s["tag"] for s in api["structs"] if s["tag"] not in structs)]


def difference(baseline: Path, before: dict, library: Path, now: dict) -> str:
    """abidiff's report where it exits with anything but 0: its bit 8, "incompatible", is not set for
    changed parameters or fields."""
    with tempfile.NamedTemporaryFile("w", suffix=".abignore") as file:
        file.write(suppressions(before, now))
        file.flush()
        done = run("abidiff", EXPORTED, "--no-added-syms", "--suppressions", file.name, baseline,
                   library)
    return "" if done.returncode == 0 else f"abidiff: {done.returncode}\n{done.stdout}{done.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("api", type=Path)
    parser.add_argument("--save", type=Path, metavar="FILE.abi")
    arguments = parser.parse_args()
    reason = why_blind(arguments.library)
    if reason:
        print(f"skipped: {reason}")
        return 77
    if arguments.save:
        dump(arguments.library, arguments.save)
        return 0
    api = json.loads(arguments.api.read_text())
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "now.abi"
        dump(arguments.library, own)
        found = [f"not in the debug information: {name}" for name in unseen(own, api)]
        baselines = sorted(BASELINES.glob("*.abi"))
        if not baselines:  # compare_api.py --gate fails where there should be some
            print("no release yet, so no baseline: the library is compared with its own dump")
            found += filter(None, [difference(own, api, arguments.library, api)])
        for baseline in baselines:
            before = json.loads(baseline.with_suffix(".json").read_text())
            found += filter(None, [difference(baseline, before, arguments.library, api)])
    print("\n".join(found) or f"no difference, {len(api['functions'])} functions seen")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
