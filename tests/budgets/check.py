#!/usr/bin/env python3
"""Registers, spills and shared memory of the library's kernels against a committed table, and the compiler's time.

usage: check.py BUILD_FOLDER [--update]

Reads the .ptxas files that cmake/nvcc_launcher.py leaves beside the objects. A kernel may need fewer resources
than its row; more, a new kernel or a lost one is a failure, to be accepted with --update after a look. The
table belongs to one nvcc version; with another one the comparison is skipped, not passed.
"""
from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).with_name("kernels.tsv")
WARN_SECONDS, FAIL_SECONDS = 20, 60
SKIPPED = 77

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
TIME = re.compile(r"cpu seconds: ([\d.]+)")

Kernels = dict[tuple[str, str], tuple[int, int, int]]  # (name, arch): registers, spill, shared


def demangle(names: list[str]) -> dict[str, str]:
    output = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    # Without the parameters: they follow from the name.
    lines = [re.sub(r"\([\w:]+\)(?=\d)", "", line) for line in output.stdout.splitlines()]  # types of template arguments
    short = [re.sub(r"^void ", "", line).split("(")[0] for line in lines]
    return dict(zip(names, short))


def measured(files: list[Path]) -> Kernels:
    raw: Kernels = {}
    for file in files:
        key, spill = None, 0
        for line in file.read_text().splitlines():
            if found := ENTRY.search(line):
                key, spill = (found[1], found[2]), 0
            elif key and (found := STACK.search(line)):
                spill = int(found[2]) + int(found[3])
            elif key and (found := USED.search(line)):
                shared = SHARED.search(line)
                raw[key] = (int(found[1]), spill, int(shared[1]) if shared else 0)
                key = None
    names = demangle(sorted({name for name, _ in raw}))
    return {(names[name], arch): values for (name, arch), values in raw.items()}


def read_table() -> tuple[str, Kernels]:
    version, kernels = "", {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("# nvcc "):
            version = line.split()[2]
        elif line and not line.startswith("#"):
            name, arch, *values = line.split("\t")
            kernels[name, arch] = tuple(map(int, values))
    return version, kernels


def write_table(version: str, kernels: Kernels) -> None:
    with TABLE.open("w") as file:
        file.write(f"# nvcc {version}\n# kernel\tarch\tregisters\tspill bytes\tstatic shared bytes\n")
        for (name, arch), values in sorted(kernels.items()):
            file.write("\t".join([name, arch, *map(str, values)]) + "\n")


def nvcc_version(build: Path) -> str:
    files = list(build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"))
    found = re.search(r'CMAKE_CUDA_COMPILER_VERSION "(\d+\.\d+)', files[0].read_text()) if files else None
    return found[1] if found else "none"


def check_times(files: list[Path]) -> list[str]:
    times = sorted(((float(TIME.search(f.read_text())[1]), f.name) for f in files), reverse=True)
    print("slowest translation units, CPU seconds:")
    for seconds, name in times[:5]:
        print(f"  {seconds:6.1f}  {name.removesuffix('.o.ptxas')}{'  (slow)' if seconds > WARN_SECONDS else ''}")
    return [f"{name}: {seconds:.0f} CPU seconds, over {FAIL_SECONDS}" for seconds, name in times if seconds > FAIL_SECONDS]


def compare(table: Kernels, kernels: Kernels, archs: set[str]) -> list[str]:
    failures = []
    for key in sorted(table.keys() | kernels.keys()):
        name, arch = key
        if arch not in archs:
            continue
        if key not in kernels:
            failures.append(f"{name} for {arch}: in the table, not in the build")
        elif key not in table:
            failures.append(f"{name} for {arch}: not in the table")
        else:
            labels = ("registers", "bytes of spills", "bytes of shared memory")
            failures += [
                f"{name} for {arch}: {now} {label}, the table has {was}"
                for label, now, was in zip(labels, kernels[key], table[key])
                if now > was
            ]
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--update", action="store_true", help="write the table from this build")
    options = parser.parse_args()

    files = sorted((options.build / "CMakeFiles").rglob("*.ptxas"))  # of the library
    of_tools = sorted((options.build / "tools").rglob("*.ptxas"))
    version = nvcc_version(options.build)
    if not files:
        print("SKIPPED: this build compiled no kernel for a GPU")
        return SKIPPED
    kernels = measured(files)
    if options.update:
        write_table(version, kernels)
        print(f"{len(kernels)} rows written to {TABLE.name}")
        return 0
    failures = check_times(files)
    # Those of the tools are few, and not in every build: they have no table, but may not spill.
    failures += [f"{name} for {arch}: {spill} bytes of spills"
                 for (name, arch), (_, spill, _) in measured(of_tools).items() if spill]
    table_version, table = read_table()
    if version != table_version:
        print(f"SKIPPED: the table is of nvcc {table_version}, this build of {version}")
        return 1 if failures else SKIPPED
    archs = {arch for _, arch in kernels}
    failures += compare(table, kernels, archs)
    print(f"{len(kernels)} kernels for {', '.join(sorted(archs))} compared with the table")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
