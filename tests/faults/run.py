#!/usr/bin/env python3
"""Builds the library with one fault at a time and requires that the tests find each.

The sources are copied, a fault replaces one piece of the copy, the units that it touches are compiled with the flags of
the build directory and linked with the build's other objects, and test_kernels runs with that library in place.
Without a fault all the tests in use must pass.

  run.py --build-dir build/cpu                              on this machine, CPU device
  run.py --build-dir build/release --device cuda            needs nvcc and a GPU
  run.py --build-dir build/release --device cuda --libraries D --build-only      here, where nvcc is
  run.py --device cuda --libraries D --tests T              there, where the GPU is; T is test_kernels
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from faults import CPU_UNITS, FAULTS, REFERENCE_UNITS, Fault

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Build:
    """Recompiles units of a finished Ninja build against a copy of the sources."""

    def __init__(self, directory: pathlib.Path, device: str) -> None:
        self.directory = directory.resolve()
        self.device = device
        commands = json.loads((self.directory / "compile_commands.json").read_text())
        self.commands = {entry["file"]: entry["command"] for entry in commands}
        ninja = shutil.which("ninja") or shutil.which("ninja-build")
        if not (self.directory / "build.ninja").exists() or ninja is None:
            sys.exit(f"{self.directory} is no Ninja build, or ninja is not installed")
        listed = subprocess.run([ninja, "-C", self.directory, "-t", "commands", "libcuflash.so"],
                                check=True, capture_output=True, text=True).stdout
        # The link is the last command; what follows it makes symbolic links.
        link = [line for line in listed.splitlines() if " -shared " in line][-1]
        self.link = next(part for part in link.split("&&") if " -shared " in part).strip() + " "

    def units_of(self, fault: Fault) -> list[str]:
        """Absolute names of the units to compile again."""
        if self.device == "cpu":
            units = [str(ROOT / unit) for unit in fault.units or CPU_UNITS]
            return [unit for unit in units if unit in self.commands]
        if fault.kernels:
            return [file for file in self.commands if re.search(rf"/{fault.kernels}_\w+\.cu$", file)]
        units = [str(ROOT / unit) for unit in REFERENCE_UNITS + fault.units]
        return [unit for unit in dict.fromkeys(units) if unit in self.commands]

    def library_with(self, fault: Fault, work: pathlib.Path, library: pathlib.Path) -> None:
        """Compiles and links `library`; raises CalledProcessError with the compiler's words."""
        shutil.copytree(ROOT / "src", work / "src")
        source = work / fault.file
        source.write_text(apply(fault))
        link = self.link
        units = self.units_of(fault)
        if not units:
            raise RuntimeError(f"{fault.name}: the build holds none of the kernels that it touches")
        for n, unit in enumerate(units):
            command = self.commands[unit]
            original = re.search(r" -o (\S+)", command)[1]
            compiled = work / f"{n}.o"
            command = command.replace(f" -o {original}", f" -o {compiled}")
            command = command.replace(f"-I{ROOT}/src", f"-I{work}/src")
            command = command.replace(unit, unit.replace(f"{ROOT}/src", f"{work}/src"))
            command = command.replace(",-Werror", "").replace(" -Werror", "")
            if self.device == "cpu":
                command = command.replace(" -O3 ", " -O1 ")  # the compiler takes most of the time
            subprocess.run(command, shell=True, cwd=self.directory, check=True, capture_output=True,
                           text=True)
            if f" {original} " not in link:
                raise RuntimeError(f"{original} is not an object of the library")
            link = link.replace(f" {original} ", f" {compiled} ")
        link = re.sub(r" -o \S+", f" -o {shlex.quote(str(library))}", link)
        subprocess.run(link, shell=True, cwd=self.directory, check=True, capture_output=True, text=True)


def apply(fault: Fault) -> str:
    """The faulty text of the fault's file."""
    text = (ROOT / fault.file).read_text()
    count = text.count(fault.old)
    if count != 1:
        sys.exit(f"{fault.name}: its text occurs {count} times in {fault.file}, not once:\n  {fault.old}")
    return text.replace(fault.old, fault.new)


def failed_tests(tests: pathlib.Path, pattern: str, device: str, library: pathlib.Path | None,
                 timeout: float) -> list[str]:
    """Runs the filtered tests of a device and gives the names of those that failed. With a library, a faulty one, it
    ends at the first failure: before the judge lets one stand it takes up to 256 samples of what is allowed, and of the
    time for all failures that was most."""
    environment = dict(os.environ)
    options = ["--gtest_brief=1"]
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
        options = ["--gtest_break_on_failure"]
    chosen = ":".join(f"{part}/{device}" if part.endswith("*") and "/" not in part else part for part in pattern.split(":"))
    try:
        done = subprocess.run([tests, f"--gtest_filter={chosen}", *options], env=environment,
                              capture_output=True, text=True, timeout=timeout, errors="replace")
    except subprocess.TimeoutExpired:
        return ["timeout"]
    if "no CUDA device" in done.stdout:
        sys.exit("no CUDA device: the faults were not looked for")
    if re.search(r"0 tests from 0 test suites ran", done.stdout):
        sys.exit(f"no test matches {chosen}")
    if done.returncode == 0:
        return []
    failed = list(dict.fromkeys(re.findall(r"\[  FAILED  \] (\w+\.\w+)", done.stdout)))
    if not failed and re.search(r": Failure$", done.stdout, re.MULTILINE):
        failed = re.findall(r"\[ RUN      \] (\w+\.\w+)", done.stdout)[-1:]
    return failed or [f"crash (exit status {done.returncode})"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=pathlib.Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--libraries", type=pathlib.Path, help="keep the faulty libraries here, or take them from here")
    parser.add_argument("--build-only", action="store_true", help="build the libraries, run no test")
    parser.add_argument("--tests", type=pathlib.Path, help="the test_kernels program")
    parser.add_argument("--only", help="a regular expression of fault names")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th fault")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at a time")
    options = parser.parse_args()
    if options.build_dir is None and options.libraries is None:
        parser.error("one of --build-dir and --libraries is needed")
    tests = options.tests or (options.build_dir and options.build_dir / "tests/kernels/test_kernels")
    build = Build(options.build_dir, options.device) if options.build_dir else None
    faults = [fault for fault in FAULTS
              if options.device in fault.devices and re.search(options.only or "", fault.name)]
    total = len(faults)
    faults = faults[::options.every]
    for fault in FAULTS:
        apply(fault)  # each must match, for whatever device
    started = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
    if not options.build_only:
        used = dict.fromkeys(part for fault in faults for part in fault.tests.split(":"))
        red = sum(pool.map(lambda part: failed_tests(tests, part, options.device, None, 600), used), [])
        if red:
            print("without a fault these fail:", ", ".join(red))
            return 1
        print(f"without a fault: green ({time.monotonic() - started:.0f} s)", flush=True)

    def try_fault(fault: Fault) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="cuflash-fault-") as scratch:
            work = pathlib.Path(scratch)
            kept = options.libraries and (options.libraries / fault.name).resolve()
            folder = kept or work / "lib"
            folder.mkdir(parents=True, exist_ok=True)
            library = folder / "libcuflash.so.0"
            if build is not None:
                build.library_with(fault, work, library)
            elif not library.exists():  # the tests would not start, which is no find
                raise RuntimeError(f"{fault.name}: {library} is missing")
            if options.build_only:
                return []
            return failed_tests(tests, fault.tests, options.device, folder, 300)

    missed = []
    width = max(len(fault.name) for fault in faults)
    for fault, red in zip(faults, pool.map(try_fault, faults)):
        if options.build_only:
            continue
        print(f"{fault.name:{width}}  {red[0] if red else 'NOT FOUND'}", flush=True)
        if not red:
            missed.append(fault.name)
    seconds = time.monotonic() - started
    if options.build_only:
        print(f"{len(faults)} faulty libraries built in {seconds:.0f} s")
        return 0
    chosen = "" if len(faults) == total else f" (every {options.every}th of {total}; all of them without --every)"
    print(f"{len(faults) - len(missed)} of {len(faults)} faults found in {seconds:.0f} s{chosen}")
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stdout}\n{error.stderr}")
    except RuntimeError as error:
        sys.exit(str(error))
