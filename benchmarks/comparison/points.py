"""What is measured: points, and the axes that they are products of."""
from __future__ import annotations

import argparse
import functools
import itertools
import random
import re
from dataclasses import asdict, dataclass
from typing import Any

DTYPES = ("f32", "f16", "bf16")

#: What a preset sets, by the names of the flags; flags of the command line come on top of it.
PRESETS: dict[str, dict[str, Any]] = {
    "tokens16k": {},  # the axes' defaults: 16,384 tokens and 2,048 channels at every length and head dim
    "dtypes": {"dtype": ["f16", "bf16"]},  # the same of both, which take turns
    "few-blocks": {"batch": [1], "heads": [8], "len": [512, 1024, 2048]},
    "grouped": {"heads": [16], "heads_kv": [16, 2, 1], "len": [1024, 4096, 16384], "head_dim": [128]},
    "windows": {"batch": [1], "heads": [16], "len": [16384], "head_dim": [128], "mask": ["causal", "window 1023,0"]},
    "ragged": {"ragged": 1, "batch": [64], "heads": [16], "len": [4096]},
    "tiny": {"dtype": ["f32"], "batch": [2], "heads": [4], "heads_kv": [2], "len": [65, 130], "head_dim": [32]},
}


@functools.lru_cache(maxsize=None)
def drawn_lengths(batch: int, longest: int, seed: int) -> tuple[int, ...]:
    """1 + floor((longest - 1) u^3): many short sequences and a few long ones, the same in every Python."""
    drawn = random.Random(seed)
    return tuple(1 + int((longest - 1) * drawn.random()**3) for _ in range(batch))


@dataclass(frozen=True)
class Point:
    """Self-attention of `batch` sequences: dense [B, H, S, D] of one length, or packed [T, H, D] of drawn ones."""

    dtype: str
    mask: str  # "full", "causal", or "window LEFT,0" as cuflash-info has it
    batch: int
    heads: int
    heads_kv: int
    length: int  # of the longest that may be drawn, where they are ragged
    head_dim: int
    ragged: int | None = None  # the seed of the lengths

    @property
    def window(self) -> int | None:
        """How many keys a row sees at most, itself the last."""
        found = re.fullmatch(r"window (\d+),0", self.mask)
        return int(found[1]) + 1 if found else None

    @property
    def lengths(self) -> tuple[int, ...]:
        if self.ragged is None:
            return (self.length,) * self.batch
        return drawn_lengths(self.batch, self.length, self.ragged)

    @property
    def starts(self) -> list[int]:
        """Where the sequences begin among the rows of all, and where the last ends."""
        return [0, *itertools.accumulate(self.lengths)]

    def _shape(self, heads: int) -> tuple[int, ...]:
        if self.ragged is None:
            return self.batch, heads, self.length, self.head_dim
        return self.starts[-1], heads, self.head_dim

    @property
    def shape_q(self) -> tuple[int, ...]:
        return self._shape(self.heads)

    @property
    def shape_kv(self) -> tuple[int, ...]:
        return self._shape(self.heads_kv)

    @property
    def shape_lse(self) -> tuple[int, ...]:
        return self.shape_q[:3] if self.ragged is None else (self.heads, self.starts[-1])

    def head(self, x, batch: int, head: int):
        """[S, D] of a tensor of this point."""
        return x[batch, head] if self.ragged is None else x[self.starts[batch]:self.starts[batch + 1], head]

    def head_lse(self, x, batch: int, head: int):
        """[S] of an LSE of this point."""
        return x[batch, head] if self.ragged is None else x[head, self.starts[batch]:self.starts[batch + 1]]

    def pairs(self, length: int) -> float:
        """Of a row and a key that it sees, in one head of a sequence. As speeds of attention are commonly given, a
        causal problem is half of the full one; pairs of a window are counted exactly."""
        if self.window:
            short = min(self.window, length)
            return short * (short + 1) / 2 + (length - short) * short
        return length * length / (2 if self.mask == "causal" else 1)

    def flops_of(self, length: int) -> float:
        """Of the two products, for one sequence."""
        return 4.0 * self.heads * self.head_dim * self.pairs(length)

    @property
    def flops(self) -> float:
        return sum(map(self.flops_of, self.lengths))

    def tflops(self, ms: float) -> float:
        return self.flops / ms * 1e-9

    def json(self) -> dict:
        """As lines have it: without what does not apply."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        """In the words of cuflash-info."""
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads} Hkv{self.heads_kv}"
        ragged = "" if self.ragged is None else f" ragged by seed {self.ragged}"
        return f"{self.dtype} {self.mask} B{self.batch} {heads} S{self.length} D{self.head_dim}{ragged}"


def numbers(text: str) -> list[int]:
    values = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if 0 in values:
        raise argparse.ArgumentTypeError(f"{text!r}: positive whole numbers with commas between them")
    return values


def mask_of(text: str) -> str:
    window = re.fullmatch(r"window:([1-9]\d*)", text)
    if not window and text not in ("full", "causal"):
        raise argparse.ArgumentTypeError(f"{text!r}: of full, causal, window:N")
    return f"window {int(window[1]) - 1},0" if window else text


def masks(text: str) -> list[str]:
    return [mask_of(part) for part in text.split(",")]


def one_of(allowed: tuple[str, ...]):
    def parse(text: str) -> list[str]:
        values = text.split(",")
        unknown = [value for value in values if value not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: of {', '.join(allowed)}")
        return values

    return parse


def add_axes(parser: argparse.ArgumentParser) -> None:
    axes = parser.add_argument_group("axes", "Lists with commas; every combination is a point.")
    axes.add_argument("--preset", choices=PRESETS, default="tokens16k", help="axes by name (tokens16k)")
    axes.add_argument("--dtype", type=one_of(DTYPES), help="f32, f16, bf16 (bf16)")
    axes.add_argument("--mask", type=masks, metavar="LIST",
                      help="full, causal, window:N, where a row sees its last N keys, itself the last (full,causal)")
    axes.add_argument("--len", type=numbers, help="rows and keys of a sequence (512 to 16384)")
    axes.add_argument("--head-dim", type=numbers, help="channels of a head (64,128,256)")
    axes.add_argument("--batch", type=numbers, help="sequences (--tokens / length)")
    axes.add_argument("--heads", type=numbers, help="query heads (--hidden / head dim)")
    axes.add_argument("--heads-kv", type=numbers, help="key/value heads (as --heads)")
    axes.add_argument("--tokens", type=int, help="of all sequences (16384)")
    axes.add_argument("--hidden", type=int, help="channels of all query heads (2048)")
    axes.add_argument("--ragged", type=int, metavar="SEED", help="packed sequences of 1 to --len rows, drawn by it")


DEFAULTS: dict[str, Any] = {"dtype": ["bf16"], "mask": ["full", "causal"], "len": [512, 1024, 2048, 4096, 8192, 16384],
            "head_dim": [64, 128, 256], "batch": None, "heads": None, "heads_kv": None, "tokens": 16384,
            "hidden": 2048, "ragged": None}


def points(options: argparse.Namespace) -> list[Point]:
    """Of the axes; ValueError where they do not fit together."""
    given = {name: value for name in DEFAULTS if (value := getattr(options, name)) is not None}
    axes = {**DEFAULTS, **PRESETS[options.preset], **given}
    result = []
    for head_dim, length, mask in itertools.product(axes["head_dim"], axes["len"], axes["mask"]):
        for batch, heads in itertools.product(axes["batch"] or [axes["tokens"] // length],
                                              axes["heads"] or [axes["hidden"] // head_dim]):
            if batch < 1 or heads < 1:
                raise ValueError(f"length {length}, head dim {head_dim}: more than --tokens {axes['tokens']}, "
                                 f"--hidden {axes['hidden']}")
            for heads_kv, dtype in itertools.product(axes["heads_kv"] or [heads], axes["dtype"]):
                if heads % heads_kv:
                    raise ValueError(f"{heads} query heads are no multiple of {heads_kv} key/value heads")
                result.append(Point(dtype, mask, batch, heads, heads_kv, length, head_dim, axes["ragged"]))
    return result


def groups(points: list[Point]) -> list[list[Point]]:
    """Neighbours that differ in dtype and key/value heads alone: those are compared with each other."""
    return [list(group) for _, group in itertools.groupby(
        points, lambda point: (point.head_dim, point.length, point.mask, point.batch, point.heads))]
