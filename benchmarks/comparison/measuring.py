"""One point: every contestant is checked, then timed in rounds that alternate between them."""
from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .check import Expected, Wrong
from .contestants import Contestant, Maker, Unavailable
from .points import Point


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


def measure(point: Point, makers: dict[str, Maker], device: Any, plan: Plan, seconds_left) -> list[dict]:
    """All rows of a point. seconds_left() is what of the point's time is left."""
    tensors = (device.normal(point.shape_q, point.dtype, 1), device.normal(point.shape_kv, point.dtype, 2),
               device.normal(point.shape_kv, point.dtype, 3))
    expected = Expected(point, *tensors, device)
    outcomes = {name: prepare(name, make, point, tensors, expected, device, plan) for name, make in makers.items()}
    timed = [outcome for outcome in outcomes.values() if isinstance(outcome, Entry)]
    if timed:
        run_rounds(timed, calls_in_a_round(seconds_left(), [entry.probe_ms for entry in timed], plan), device, plan)
    outcomes.update({entry.name: check_again(entry, expected) for entry in timed})
    peers = [outcome for outcome in outcomes.values() if isinstance(outcome, Entry) and not outcome.contestant.kernel]
    return [{"point": asdict(point), "contestant": name,
             **({"failed": outcome} if isinstance(outcome, str) else row(outcome, point, peers, plan))}
            for name, outcome in outcomes.items()]
