#!/usr/bin/env python3
"""cuflash against its peers: one process, the same tensors, rounds that alternate between them.

    compare.py --preset tokens16k --output benchmarks/results/DATE-GPU-compare.jsonl
    compare.py --head-dim 128 --mask causal --kernels auto,mma --peers sdpa_flash
    compare.py --preset few-blocks --graph 20
    compare.py --preset ragged --dtype f16,bf16
    compare.py --device cpu --preset tiny

Points that differ in dtype or key/value heads alone take turns in the same rounds. Beside ragged batches dense ones are
timed, of the same dtype, mask and heads: what the sequences would take at their speeds, to what they take, is a line's
dense_ratio.

Each result is compared with sampled rows in double precision before it is timed and after; a wrong one is not timed
but reported as such, and the exit status is 1. Data are normally distributed, times those of CUDA events. Lines of
JSON go to standard output or to --output: one that describes the run, then one for each contestant at each point.
Progress goes to standard error. report.py makes tables and figures of such files.

On a GPU the tensors are PyTorch's, and the peers what of PyTorch, flash_attn, flash_attn_interface, flash_attn.cute
and flashinfer can be imported; on the CPU NumPy and PyTorch. CUFLASH_LIBRARY names the library to measure.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TextIO

START = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "bindings" / "python")]

import cuflash  # noqa: E402
from comparison.contestants import cuflash_with, peers  # noqa: E402
from comparison.devices import DEVICES  # noqa: E402
from comparison.measuring import Plan, measure  # noqa: E402
from comparison.points import add_axes, groups, points  # noqa: E402

DISTRIBUTIONS = ("torch", "numpy", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn", "flash-attn-3", "fa3-fwd",
                 "flash-attn-4", "flashinfer-python")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_axes(parser)
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="where to compute (cuda)")
    parser.add_argument("--kernels", default="auto", metavar="LIST",
                        help="cuflash's: auto, or names or families to force, with commas (auto)")
    parser.add_argument("--peers", metavar="LIST", help="with commas, or none (all that can be imported)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for everything, from the start (120)")
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help=f"alternations ({Plan.rounds})")
    parser.add_argument("--calls", type=int, default=Plan.max_calls,
                        help=f"most of a contestant in a round ({Plan.max_calls})")
    parser.add_argument("--graph", type=int, default=0, metavar="N",
                        help="replay CUDA graphs of N calls, for calls shorter than their launch")
    parser.add_argument("--output", type=Path, help="for the lines of JSON (standard output)")
    parser.add_argument("--commit", help="of the library, where this is no checkout (git's HEAD)")
    options = parser.parse_args(argv)
    if min(options.rounds, options.calls) < 1 or options.graph < 0 or options.seconds <= 0:
        parser.error("--rounds, --calls, --seconds: positive; --graph: not negative")
    if options.graph and options.device == "cpu":
        parser.error("--graph: on CUDA devices only")
    options.flags = {name: value for name, value in vars(options).items()
                     if value != parser.get_default(name) and name not in ("output", "commit")}
    try:
        options.points = points(options)
        names = None if options.peers is None else [] if options.peers == "none" else options.peers.split(",")
        options.makers, options.missing = peers(options.device, names, options.points)
    except ValueError as error:
        parser.error(str(error))
    ours = {"cuflash" if kernel == "auto" else f"cuflash:{kernel}": cuflash_with(None if kernel == "auto" else kernel)
            for kernel in options.kernels.split(",")}
    options.makers = {**ours, **options.makers}
    return options


def commit() -> str | None:
    """With a + where files differ from it."""
    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "-uno").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    result = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return result


def describe(options: argparse.Namespace, device) -> dict:
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **device.describe(),
        "cuflash": cuflash.raw.cuflash_build_info().decode(),
        "commit": options.commit or commit(),
        "versions": versions(),
        "flags": options.flags,
        "forced_kernel": os.environ.get("CUFLASH_KERNEL"),
        "not_measured": options.missing,
    }


class Progress:
    """One line for each point, with the time that is left by what the points took so far."""

    def __init__(self, total: int, seconds: float, to: TextIO):
        self._total, self._seconds, self._to = total, seconds, to
        self._begin, self._done = time.monotonic() - START, 0

    def left(self) -> float:
        return self._seconds - (time.monotonic() - START)

    def share(self, points: int) -> float:
        """Of the time that is left, what the next points may take."""
        return self.left() * points / (self._total - self._done)

    def show(self, point, rows: list[dict]) -> None:
        self._done += 1
        results = [f"{row['contestant']} {row['tflops']:.4g}" if "ms" in row else f"{row['contestant']} FAILED"
                   for row in rows]
        ratios = [f"x{row['ratio']:.2f} of {row['best_peer']}" for row in rows if "ratio" in row]
        ratios += [f"x{row['dense_ratio']:.2f} of dense" for row in rows if "dense_ratio" in row]
        hidden = [row["contestant"] for row in rows if row.get("host_ms", 0) > 0.9 * row.get("ms", math.inf)]
        gone = time.monotonic() - START
        eta = min((gone - self._begin) / self._done * (self._total - self._done), max(self.left(), 0))
        print(f"[{self._done}/{self._total}] {point}: {', '.join(results)} TFLOP/s; {', '.join(ratios) or 'no ratio'}; "
              f"{gone:.0f} s gone, {eta:.0f} s to go", file=self._to, flush=True)
        for row in rows:
            for reason in ("failed", "dense_failed"):
                if reason in row:
                    print(f"    {row['contestant']}: {row[reason]}", file=self._to)
        if hidden:
            print(f"    {', '.join(hidden)}: as long as the host takes to launch; --graph measures the device alone",
                  file=self._to)


def main(argv: list[str]) -> int:
    options = arguments(argv)
    device = DEVICES[options.device]()
    plan = Plan(options.rounds, options.calls, options.graph)
    complete, ratios = True, []
    judged = next(iter(options.makers))
    with options.output.open("w") if options.output else contextlib.nullcontext(sys.stdout) as output:

        def write(line: dict) -> None:
            print(json.dumps(line), file=output, flush=True)

        for name, reason in options.missing.items():
            print(f"without {name}: {reason}", file=sys.stderr)
        write({"run": describe(options, device)})
        progress = Progress(len(options.points), options.seconds, sys.stderr)
        for group in groups(options.points):
            if progress.left() <= 0:
                measured = [[{"point": point.json(), "contestant": name, "failed": "no time left"}
                             for name in options.makers] for point in group]
            else:
                end = time.monotonic() + progress.share(len(group))
                measured = measure(group, options.makers, device, plan, lambda: end - time.monotonic())
            for point, rows in zip(group, measured):
                for row in rows:
                    write(row)
                progress.show(point, rows)
                complete &= not any({"failed", "dense_failed"} & row.keys() and row["contestant"].startswith("cuflash")
                                    for row in rows)
                ratios += [row["ratio"] for row in rows if row["contestant"] == judged and "ratio" in row]
    if ratios:
        print(f"{judged} to the best peer: geometric mean {statistics.geometric_mean(ratios):.3f}, smallest "
              f"{min(ratios):.3f} of {len(ratios)} points", file=sys.stderr)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
