#!/usr/bin/env python3
"""More random problems than the tests draw, on every kernel of the CPU device, judged by the same rule.

    fuzz.py [--build FOLDER] [--cases N] [--seed S]

A seed always gives the same problems. Each run adds an entry to tests/fuzz_record.json: the seed, how many problems each
kernel ran, what failed, and the digest of the sources and tests. On a GPU: gpu_check --stage fuzz.
"""
from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

from record import ROOT, TESTS, digest, failure, kernel_in, outcome, per_kernel, run_draws, run_gtest

RECORD = ROOT / "tests" / "fuzz_record.json"
SOURCES = ["src/common", "src/core", "src/attention", "src/cpu", "src/api", "cmake/compile_options.cmake",
           "cmake/vector_levels.cmake"]


def kernels_of(build: Path) -> set[str]:
    program = next(build.glob("tests/**/test_kernels"), None)
    if program is None:
        sys.exit(f"no test_kernels in {build}: ./dev build makes it")
    cases, _ = run_gtest(program, "*Draws.Accurate/cpu_*", env={"CUFLASH_TEST_DRAWS": "0"})
    return {kernel for case in cases if (kernel := kernel_in(case, "cpu"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--cases", type=int, default=2000, help="problems in all (2000)")
    parser.add_argument("--seed", type=int, help="default: one more than the largest in the record; the tests take 1")
    parser.add_argument("--record", type=Path, default=RECORD, help="where to write (tests/fuzz_record.json)")
    options = parser.parse_args()
    entries = json.loads(options.record.read_text()) if options.record.exists() else []
    seed = options.seed or max([1, *(entry["seed"] for entry in entries)]) + 1

    kernels = kernels_of(options.build)
    share = -(-options.cases // len(kernels))
    draws = -(-share // 4) * 4  # each kernel's draws are spread over four shards
    cases = run_draws(options.build, "cpu", draws, seed)
    ran = per_kernel(cases, "cpu")
    failures = [failure(case).replace(f"{ROOT}/", "") for case in cases if outcome(case) == "failed"]
    failures += [f"{kernel}: did not run" for kernel in sorted(kernels - ran.keys())]
    entry = {
        "date": datetime.date.today().isoformat(),
        "seed": seed,
        "cases": sum(kernel["cases"] for kernel in ran.values()),
        "failures": failures,
        "kernels": ran,
        "digests": {"sources": digest(SOURCES), "tests": digest(TESTS)},
    }
    options.record.write_text(json.dumps([*entries, entry], indent=1) + "\n")
    print("\n".join(failures + [f"{kernel}: {result['cases']} problems, worst error {result['worst_error_ratio']} of the allowed"
                                for kernel, result in ran.items()]))
    print(f"seed {seed}: {entry['cases']} problems, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
