"""What gpu_check and fuzz share: digests of sources, and runs of the GoogleTest programs."""
from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/support", "tests/kernels"]
CPP = {".h", ".hpp", ".cpp", ".cuh", ".cu", ".in"}
COMMENT_OR_STRING = re.compile(rb'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def digest(paths: list[str]) -> str:
    """Of the contents and relative names of all files below the paths."""
    files = []
    for path in map(ROOT.joinpath, paths):
        files += [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    total = hashlib.sha256()
    for file in sorted(f for f in files if f.suffix != ".md" and "__pycache__" not in f.parts):
        total.update(str(file.relative_to(ROOT)).encode())
        total.update(hashlib.sha256(content(file)).digest())
    return total.hexdigest()[:16]


def content(file: Path) -> bytes:
    """What of a file counts: of C++ neither comments nor white space."""
    data = file.read_bytes()
    if file.suffix not in CPP:
        return data
    return b"".join(COMMENT_OR_STRING.sub(lambda found: found[0] if found[0].startswith(b'"') else b"", data).split())


def run_gtest(program: Path, test_filter: str, wrapper: list[str] = [], env: dict[str, str] = {}) -> tuple[list[dict], str]:
    """The test cases of a run as GoogleTest reports them, and what the program printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*wrapper, str(program), f"--gtest_filter={test_filter}", f"--gtest_output=json:{report}"]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, errors="replace")
        output = done.stdout + done.stderr
        if not report.exists():
            # A negative status is a signal: -9 of a machine out of memory, -11 of a program that is wrong.
            ended = f"exit status {done.returncode}, no report; the end of its output:\n{output[-3000:]}"
            print(ended)
            return [{"name": str(program), "result": "CRASHED", "failures": [{"failure": ended}]}], output
        suites = json.loads(report.read_text())["testsuites"]
        return [{**case, "suite": suite["name"]} for suite in suites for case in suite["testsuite"]], output


@functools.lru_cache(None)
def gpu_count() -> int:
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def spread_over_gpus(index: int) -> dict[str, str]:
    """The environment of the index-th process: it sees all GPUs, another one first each time."""
    gpus = gpu_count()
    return {"CUDA_VISIBLE_DEVICES": ",".join(str((index + i) % gpus) for i in range(gpus))} if gpus > 1 else {}


def run_sharded(program: Path, test_filter: str, env: dict[str, str] = {}) -> list[dict]:
    """As run_gtest, in several processes: the tests' own fp64 reference takes most of the time."""
    shards = min(64, 2 * (os.cpu_count() or 1))  # more than processors: they wait for the GPU as well

    def shard(index: int) -> list[dict]:
        sharding = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(index)}
        return run_gtest(program, test_filter, env={**env, **sharding, **spread_over_gpus(index)})[0]

    with concurrent.futures.ThreadPoolExecutor(shards) as pool:
        return [case for cases in pool.map(shard, range(shards)) for case in cases]


def outcome(case: dict) -> str:
    if case.get("failures"):
        return "failed"
    return "skipped" if case["result"] == "SKIPPED" else "passed"


def failure(case: dict) -> str:
    """What failed, and how to repeat it, cut."""
    return "\n".join(each.get("failure", "") for each in case["failures"][:3])[:1500]


def count(cases: list[dict]) -> dict[str, int]:
    return {kind: sum(outcome(case) == kind for case in cases) for kind in ("passed", "failed", "skipped")}


def kernel_in(case: dict, device: str) -> str | None:
    """The kernel that a parametrised case names: Draws.Accurate/cuda_<kernel>_shard0."""
    parameter = case["name"].partition("/")[2]
    return parameter.removeprefix(f"{device}_").rpartition("_shard")[0] if parameter.startswith(f"{device}_") else None


def run_draws(build: Path, device: str, draws: int, seed: int, kernels: str = "*") -> list[dict]:
    """The seeded random problems of tests/kernels, `draws` for each kernel of the device whose name matches one of `kernels`
    (patterns, with commas between), and as many invalid ones for each operation."""
    program = next(build.glob("tests/**/test_kernels"))
    env = {"CUFLASH_TEST_DRAWS": str(draws), "CUFLASH_TEST_SEED": str(seed), "CUFLASH_TEST_INVALID_DRAWS": str(draws)}
    accurate = [f"*Draws.Accurate/{device}_{pattern}_shard*" for pattern in kernels.split(",")]
    return run_sharded(program, ":".join([*accurate, f"InvalidDraws.Refused/{device}_*"]), env)


class Features:
    """What the draws of tests/kernels/grid.cpp had: how often each feature, and each pair that can be drawn together."""

    def __init__(self, cases: list[dict]) -> None:
        self.names: list[str] = []
        self.pairs: dict[tuple[int, int], int] = {}
        for case in cases:
            if "pairs" not in case:
                continue
            self.names = case["features"].split(",")
            for entry in filter(None, case["pairs"].split(",")):
                a, b, number = map(int, entry.split())
                self.pairs[a, b] = self.pairs.get((a, b), 0) + number

    def count(self, name: str) -> int:
        index = self.names.index(name)
        return self.pairs[index, index]

    def rare(self, fewest: int) -> list[str]:
        return [f"{self.names[a]} + {self.names[b]}: {number}" for (a, b), number in sorted(self.pairs.items()) if number < fewest]

    def table(self) -> str:
        width = max(map(len, self.names))
        rows = [f"{b:>3} {name:<{width}} " + " ".join(f"{self.pairs.get((b, a), '-'):>5}" for a in range(b + 1))
                for b, name in enumerate(self.names)]
        return "\n".join([*rows, " " * (width + 5) + " ".join(f"{a:>5}" for a in range(len(self.names)))])


def per_kernel(cases: list[dict], device: str) -> dict[str, dict]:
    """Kernel -> problems run and the largest error, as a part of the error allowed."""
    kernels: dict[str, dict] = {}
    for case in cases:
        kernel = kernel_in(case, device)
        if kernel and "ran" in case:
            entry = kernels.setdefault(kernel, {"cases": 0, "worst_error_ratio": 0.0})
            entry["cases"] += int(case["ran"])
            entry["worst_error_ratio"] = round(max(entry["worst_error_ratio"], float(case["worst_ratio"])), 3)
    return dict(sorted(kernels.items()))
