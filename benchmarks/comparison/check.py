"""Whether a result is right, on sampled rows in double precision, and everywhere finite.

A kernel for f16 or bf16 rounds the probabilities, each by itself, and the result. The error that this makes of
channel d is of the size of u sqrt(sum_j (p_j v_jd)^2 + o_d^2), u being half the distance of 1 to the next number:
far less than the size of v where many keys share the weight, so that even one lost tile of keys shows.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .points import Point

#: u; that of f32 leaves room for the sums, which are in f32 as well
ROUNDING = {"f32": 2.0**-20, "f16": 2.0**-11, "bf16": 2.0**-8}
LIMIT = 4.0  # correct kernels reach about 1.5 in some thousand channels
LSE_LIMIT = 1e-3
HEADS, ROWS = 4, 16  # sampled of a point (two more of a ragged one), and of each of its sampled heads


class Wrong(Exception):
    """A result that may not be timed."""


class Sampled(NamedTuple):
    """Rows of one head, and what they should hold."""

    batch: int
    head: int
    rows: list[int]
    o: np.ndarray
    noise: np.ndarray
    lse: np.ndarray


class Expected:
    """Rows of the result, from the tensors that the contestants read."""

    def __init__(self, point: Point, q, k, v, device):
        random = np.random.default_rng(point.length)
        every = point.batch * point.heads
        heads = {0, every - 1, *random.integers(every, size=HEADS - 2).tolist()}
        if point.ragged is not None:  # the first of the shortest and of the longest sequences
            heads |= {point.lengths.index(choose(point.lengths)) * point.heads for choose in (min, max)}
        self._point, self._unit, self._device = point, ROUNDING[point.dtype], device
        self._samples = [self._of_head(q, k, v, *divmod(index, point.heads), random) for index in sorted(heads)]

    def _of_head(self, q, k, v, batch: int, head: int, random) -> Sampled:
        point, length = self._point, self._point.lengths[batch]
        rows = sorted({0, length - 1, *random.integers(length, size=ROWS - 2).tolist()})
        head_kv = head // (point.heads // point.heads_kv)
        keys, values = (self._device.doubles(point.head(x, batch, head_kv)) for x in (k, v))
        scores = self._device.doubles(point.head(q, batch, head)[rows]) @ keys.T / np.sqrt(point.head_dim)
        if point.mask != "full":
            behind = np.array(rows)[:, None] - np.arange(length)  # how far a key is before its row
            scores[(behind < 0) | (behind >= (point.window or length))] = -np.inf
        largest = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        weights /= total
        o = weights @ values
        noise = np.sqrt(np.square(weights) @ np.square(values) + np.square(o))
        return Sampled(batch, head, rows, o, noise, (largest + np.log(total))[:, 0])

    def check(self, o, lse=None) -> float:
        """The worst error of a channel, in units of what rounding makes; Wrong if it is above LIMIT."""
        for name, x in (("result", o), ("LSE", lse)):
            if x is not None and not self._device.all_finite(x):
                raise Wrong(f"wrong {name}: NaN or infinity, or rows not written")
        worst = 0.0
        for at in self._samples:
            found = self._device.doubles(self._point.head(o, at.batch, at.head)[at.rows])
            error = np.abs(found - at.o) / (self._unit * at.noise)
            worst = max(worst, float(error.max()))
            if worst > LIMIT:
                row = at.rows[int(error.max(axis=1).argmax())]
                raise Wrong(f"wrong result: batch {at.batch} head {at.head} row {row}: error {worst:.3g} times what "
                            f"rounding makes, {LIMIT:g} allowed")
            if lse is not None:
                found = self._device.doubles(self._point.head_lse(lse, at.batch, at.head)[at.rows])
                lse_error = np.abs(found - at.lse)
                if lse_error.max() > LSE_LIMIT:
                    row = at.rows[int(lse_error.argmax())]
                    raise Wrong(f"wrong LSE: batch {at.batch} head {at.head} row {row}: error {lse_error.max():.3g}, "
                                f"{LSE_LIMIT:g} allowed")
        return worst
