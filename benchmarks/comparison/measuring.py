"""Points that are compared with each other: every contestant at each is checked, then timed in rounds that alternate
between all of them."""
from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .check import Expected, Wrong
from .contestants import Contestant, Maker, Unavailable
from .points import Point

#: Rows of all sequences of a dense batch that ragged ones are held against, and the shortest length of one.
DENSE_TOKENS, SHORTEST_DENSE = 16384, 128


@dataclass
class Plan:
    """How long and how often; the same for all points of a run."""

    rounds: int = 5
    max_calls: int = 100  # in a round, of each contestant
    graph: int = 0  # calls in a CUDA graph that is replayed as one; 0: no graph


@dataclass
class Entry:
    """A contestant whose result is right, and its times."""

    name: str
    contestant: Contestant
    error: float = 0.0
    probe_ms: float = 0.0
    host_ms: float | None = None
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def round_ms(self) -> list[float]:
        return [statistics.median(times) for times in self.rounds]

    @property
    def all_ms(self) -> list[float]:
        return [ms for times in self.rounds for ms in times]

    @property
    def ms(self) -> float:
        return statistics.median(self.all_ms)


def calls_in_a_round(seconds: float, probes_ms: list[float], plan: Plan) -> int:
    """So many that `rounds` rounds of all contestants take about this time; at least one."""
    one_each = sum(probes_ms) * max(plan.graph, 1) * 1e-3
    return int(min(plan.max_calls, max(1, seconds / (plan.rounds * one_each))))


def prepare(name: str, make: Maker, point: Point, tensors: tuple[Any, Any, Any], expected: Expected, device: Any,
            plan: Plan) -> Entry | str:
    """Makes, runs and checks a contestant; or why it is not to be timed."""
    try:
        entry = Entry(name, make(point, *tensors, device))
        contestant = entry.contestant
        with contestant.around():
            contestant.call()
            device.synchronize()
            entry.error = expected.check(contestant.result(), contestant.lse)
            entry.probe_ms = float(np.median(device.times(contestant.call, 2)[0]))
            if plan.graph:
                contestant.call = device.graph(contestant.call, plan.graph)
        return entry
    except (Unavailable, Wrong) as reason:
        return str(reason)
    except Exception as error:  # of other people's code, which fails in its own ways
        return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def check_again(entry: Entry, expected: Expected) -> Entry | str:
    """What was timed was right too."""
    try:
        entry.error = max(entry.error, expected.check(entry.contestant.result(), entry.contestant.lse))
        return entry
    except Wrong as reason:
        return f"after {len(entry.all_ms)} calls: {reason}"


def run_rounds(entries: list[Entry], calls: int, device: Any, plan: Plan) -> None:
    """Each round another contestant first, so that none always follows the same one."""
    for number in range(plan.rounds):
        first = number % len(entries)
        for entry in entries[first:] + entries[:first]:
            with entry.contestant.around():
                times, host_ms = device.times(entry.contestant.call, calls)
            per = max(plan.graph, 1)
            entry.rounds.append([ms / per for ms in times])
            entry.host_ms = None if host_ms is None else host_ms / per


def ratio(peer: Entry, ours: Entry) -> float:
    """Of speeds, cuflash to the peer: the median over the rounds, in which both had the same clocks."""
    return statistics.median(theirs / mine for theirs, mine in zip(peer.round_ms, ours.round_ms))


def digits(value: float) -> float:
    """Five of them, which is more than a measurement holds."""
    return float(f"{value:.5g}")


def row(entry: Entry, point: Point, peers: list[Entry], plan: Plan) -> dict:
    """What a line says of it. Ratios above 1 say that cuflash is faster."""
    p20, median, p80 = np.percentile(entry.all_ms, [20, 50, 80])
    result = {
        "ms": digits(median), "p20_ms": digits(p20), "p80_ms": digits(p80),
        "tflops": digits(point.tflops(median)), "round_ms": [digits(ms) for ms in entry.round_ms],
        "calls": len(entry.all_ms) * max(plan.graph, 1), "error": digits(entry.error),
    }
    if entry.host_ms is not None:
        result["host_ms"] = digits(entry.host_ms)
    if entry.contestant.kernel:
        result["kernel"] = entry.contestant.kernel
        if peers:
            best = min(peers, key=lambda peer: peer.ms)
            result["best_peer"] = best.name
            result["ratio"] = digits(ratio(best, entry))
            result["ratios"] = {peer.name: digits(ratio(peer, entry)) for peer in peers}
    return result


# ---- ragged batches beside dense ones --------------------------------------------------------------------


def dense_lengths(longest: int) -> list[int]:
    """Powers of two, the last of which no sequence is longer than."""
    lengths = [SHORTEST_DENSE]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return lengths


def dense_points(point: Point) -> list[Point]:
    """Dense batches whose speeds say what a ragged one could take."""
    return [replace(point, ragged=None, length=length, batch=max(1, DENSE_TOKENS // length))
            for length in dense_lengths(max(point.lengths))]


def dense_ms(point: Point, tflops: dict[int, float]) -> float:
    """What the sequences of a ragged batch take where each goes at the speed of a dense batch of its length, which is
    between those of known lengths linear in the logarithm."""
    lengths = sorted(tflops)
    speeds = np.interp(np.log(point.lengths), np.log(lengths), [tflops[length] for length in lengths])
    return float(sum(np.array([point.flops_of(length) for length in point.lengths]) / speeds) * 1e-9)


def beside_dense(ragged: Entry, point: Point, dense: dict[int, Entry]) -> dict:
    """What its line says of that: the ratio is above 1 where it is faster, the median over the rounds as all ratios."""
    points = {each.length: each for each in dense_points(point)}

    def tflops(ms_of) -> dict[int, float]:
        return {length: points[length].tflops(ms_of(entry)) for length, entry in dense.items()}

    of_rounds = [dense_ms(point, tflops(lambda entry: entry.round_ms[number])) / ms
                 for number, ms in enumerate(ragged.round_ms)]
    return {"dense_ratio": digits(statistics.median(of_rounds)),
            "dense_tflops": {str(length): digits(speed) for length, speed in tflops(lambda entry: entry.ms).items()}}


# ---- all of it -------------------------------------------------------------------------------------------


class Case:
    """A point, its tensors, and what became of each contestant: an entry, or why there is none."""

    def __init__(self, point: Point, makers: dict[str, Maker], device: Any, plan: Plan):
        self.point = point
        tensors = (device.normal(point.shape_q, point.dtype, 1), device.normal(point.shape_kv, point.dtype, 2),
                   device.normal(point.shape_kv, point.dtype, 3))
        self._expected = Expected(point, *tensors, device)
        self.outcomes: dict[str, Entry | str] = {
            name: prepare(name, make, point, tensors, self._expected, device, plan) for name, make in makers.items()}

    def timed(self) -> list[Entry]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, Entry)]

    def check_again(self) -> None:
        self.outcomes.update({entry.name: check_again(entry, self._expected) for entry in self.timed()})


def rows(case: Case, dense: list[Case], plan: Plan) -> list[dict]:
    peers = [entry for entry in case.timed() if not entry.contestant.kernel]
    result = []
    for name, outcome in case.outcomes.items():
        line = {"point": case.point.json(), "contestant": name}
        if isinstance(outcome, str):
            line["failed"] = outcome
        else:
            line.update(row(outcome, case.point, peers, plan))
            beside = {each.point.length: each.outcomes[name] for each in dense if name in each.outcomes}
            broken = {length: reason for length, reason in beside.items() if isinstance(reason, str)}
            if broken:
                line["dense_failed"] = "; ".join(f"length {length}: {reason}" for length, reason in broken.items())
            elif beside:
                line.update(beside_dense(outcome, case.point, beside))
        result.append(line)
    return result


def measure(points: list[Point], makers: dict[str, Maker], device: Any, plan: Plan, seconds_left) -> list[list[dict]]:
    """All rows of each point. seconds_left() is what of their time is left."""
    cases = [Case(point, makers, device, plan) for point in points]
    dense: dict[Point, list[Case]] = {}
    for case in cases:
        ours = {entry.name: makers[entry.name] for entry in case.timed() if entry.contestant.kernel}
        beside = dense_points(case.point) if case.point.ragged is not None and ours else []
        dense[case.point] = [Case(point, ours, device, plan) for point in beside]
    every = [*cases, *itertools.chain(*dense.values())]
    timed = [entry for case in every for entry in case.timed()]
    if timed:
        run_rounds(timed, calls_in_a_round(seconds_left(), [entry.probe_ms for entry in timed], plan), device, plan)
    for case in every:
        case.check_again()
    return [rows(case, dense[case.point], plan) for case in cases]
