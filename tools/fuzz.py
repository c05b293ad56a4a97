#!/usr/bin/env python3
"""More random problems than the tests draw, on every kernel of the CPU device, judged by the same rule.

    fuzz.py [--build FOLDER] [--cases N] [--seed S]

A seed always gives the same problems. Each run adds an entry to tests/fuzz_record.json: the seed, how many problems each
kernel ran, how many invalid ones were refused, what failed, how often the rarest pair of features was drawn and which
pairs fewer than 50 times, and the digest of the sources and tests. The table of all pairs is printed. On a GPU: gpu_check
--stage fuzz.
"""
from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

from record import ROOT, TESTS, Features, digest, failure, kernel_in, outcome, per_kernel, run_draws, run_gtest

RECORD = ROOT / "tests" / "fuzz_record.json"
RARE = 50
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
    features = Features(cases)
    total = sum(kernel["cases"] for kernel in ran.values())
    failures = [failure(case).replace(f"{ROOT}/", "") for case in cases if outcome(case) == "failed"]
    failures += [f"{kernel}: did not run" for kernel in sorted(kernels - ran.keys())]
    entry = {
        "date": datetime.date.today().isoformat(),
        "seed": seed,
        "cases": total,
        "invalid_cases": sum(int(case.get("refused_draws", 0)) for case in cases),
        "failures": failures,
        "kernels": ran,
        "pairs": {"number": len(features.pairs), "smallest": min(features.pairs.values()), f"below_{RARE}": features.rare(RARE)},
        "shares": {name: round(features.count(name) / total, 3) for name in ("more than 1024 keys", "head_dim above 128")},
        "digests": {"sources": digest(SOURCES), "tests": digest(TESTS)},
    }
    options.record.write_text(json.dumps([*entries, entry], indent=1) + "\n")
    print("\n".join(failures + [f"{kernel}: {result['cases']} problems, worst error {result['worst_error_ratio']} of the allowed"
                                for kernel, result in ran.items()]))
    print(features.table())
    print(*(f"drawn fewer than {RARE} times: {pair}" for pair in features.rare(RARE)), sep="\n")
    print(f"seed {seed}: {total} problems, {entry['invalid_cases']} invalid ones, {len(failures)} failures; "
          f"of {len(features.pairs)} pairs of features the rarest {entry['pairs']['smallest']} times; shares {entry['shares']}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
