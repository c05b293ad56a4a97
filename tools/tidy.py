"""clang-tidy over the library's sources, host and CUDA, as .clang-tidy in the root asks:

    tidy.py BUILD_FOLDER [TEXT]

reads what is compiled from compile_commands.json of a configured build folder (nothing needs to be
built); with TEXT only sources with it in their paths. Exit status 1: findings, 77: no clang-tidy 22.

Of the CUDA units that CMake makes from one template, one is looked at: they differ in a dtype and
in constants. All run on the host side of the compilation, where clang parses whole kernels.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIDY = "clang-tidy-22"
# gcc's and nvcc's compilations know these, or do not mind them.
COMMON = ["-Wno-unknown-warning-option", "-Wno-unused-private-field", "-Wno-c2y-extensions"]
# In kernels, on either device, indices within a tile are int on purpose.
TILE_CHECKS = "-bugprone-implicit-widening-of-multiplication-result,-bugprone-integer-division"
# Where clang compiles for the host it sees no asm: loops that wait for it look endless, and its
# variants look alike.
CUDA_CHECKS = f"{TILE_CHECKS},-bugprone-infinite-loop,-bugprone-branch-clone"


def family(unit: Path) -> str:
    """What the generated units of one template share: fwd_wmma_f16_d64 -> fwd_wmma."""
    return re.sub(r"_(f32|f16|bf16)_d\d+$", "", unit.stem)


def cuda_command(entry: dict) -> list[str]:
    """clang's command for a unit that nvcc compiles."""
    words = shlex.split(entry["command"])
    nvcc = next(word for word in words if Path(word).name == "nvcc")
    kept = [word for word in words if word.startswith(("-D", "-I", "-std="))]
    return [TIDY, "--quiet", f"--checks={CUDA_CHECKS}", entry["file"], "--", "-x", "cuda",
            "--cuda-host-only", f"--cuda-path={Path(nvcc).resolve().parents[1]}", "-nocudalib",
            "-Wno-unknown-cuda-version", *COMMON, *kept]


def host_command(entry: dict, build: Path) -> list[str]:
    kernel = ROOT / "src" / "cpu" in Path(entry["file"]).parents
    return [TIDY, "--quiet", "-p", str(build), *([f"--checks={TILE_CHECKS}"] if kernel else []),
            "--removed-arg=-fno-gnu-unique", *(f"--extra-arg={word}" for word in COMMON),
            entry["file"]]


def commands(build: Path) -> dict[str, list[str]]:
    """Source -> command."""
    found: dict[str, list[str]] = {}
    families: set[str] = set()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if build / "generated" in source.parents:
            if family(source) in families:
                continue
            families.add(family(source))
        elif ROOT / "src" not in source.parents:
            continue
        command = host_command(entry, build) if source.suffix == ".cpp" else cuda_command(entry)
        found[entry["file"]] = command
    return found


def main() -> int:
    build, text = Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else ""
    if not shutil.which(TIDY):
        print(f"skipped: no {TIDY}")
        return 77
    chosen = {source: command for source, command in commands(build).items() if text in source}
    if not chosen:
        print(f"no source of {build} has {text!r} in its path")
        return 1

    def run(command: list[str]) -> subprocess.CompletedProcess:
        return subprocess.run(command, cwd=build, text=True, capture_output=True)

    failed = 0
    printed: set[str] = set()  # a header's findings come once with each source
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, done in zip(chosen, pool.map(run, chosen.values())):
            failed += done.returncode != 0
            if done.returncode and done.stdout + done.stderr not in printed:
                printed.add(done.stdout + done.stderr)
                print(f"{source}:\n{done.stdout}{done.stderr}")
    print(f"clang-tidy: {len(chosen) - failed} of {len(chosen)} sources are clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
