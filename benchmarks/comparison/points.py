"""What is measured: points, and the axes that they are products of."""
from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import Any

DTYPES = ("f32", "f16", "bf16")
MASKS = ("full", "causal")

#: What a preset sets, by the names of the flags; flags of the command line come on top of it.
PRESETS: dict[str, dict[str, list]] = {
    "tokens16k": {},  # the axes' defaults: 16,384 tokens and 2,048 channels at every length and head dim
    "few-blocks": {"batch": [1], "heads": [8], "len": [512, 1024, 2048]},
    "grouped": {"heads": [16], "heads_kv": [16, 2, 1], "len": [1024, 4096, 16384], "head_dim": [128]},
    "tiny": {"dtype": ["f32"], "batch": [2], "heads": [4], "heads_kv": [2], "len": [65, 130], "head_dim": [32]},
}


@dataclass(frozen=True)
class Point:
    """Self-attention of `batch` sequences of one length."""

    dtype: str
    mask: str
    batch: int
    heads: int
    heads_kv: int
    length: int
    head_dim: int

    @property
    def shape_q(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.head_dim

    @property
    def shape_kv(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_kv, self.length, self.head_dim

    @property
    def flops(self) -> float:
        """Of the two products; the masked half counts as nothing."""
        both = 4.0 * self.batch * self.heads * self.length * self.length * self.head_dim
        return both / 2 if self.mask == "causal" else both

    def tflops(self, ms: float) -> float:
        return self.flops / ms * 1e-9

    def __str__(self) -> str:
        """In the words of cuflash-info."""
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads} Hkv{self.heads_kv}"
        return f"{self.dtype} {self.mask} B{self.batch} {heads} S{self.length} D{self.head_dim}"


def numbers(text: str) -> list[int]:
    values = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if 0 in values:
        raise argparse.ArgumentTypeError(f"{text!r}: positive whole numbers with commas between them")
    return values


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
    axes.add_argument("--mask", type=one_of(MASKS), help="full, causal (both)")
    axes.add_argument("--len", type=numbers, help="rows and keys of a sequence (512 to 16384)")
    axes.add_argument("--head-dim", type=numbers, help="channels of a head (64,128,256)")
    axes.add_argument("--batch", type=numbers, help="sequences (--tokens / length)")
    axes.add_argument("--heads", type=numbers, help="query heads (--hidden / head dim)")
    axes.add_argument("--heads-kv", type=numbers, help="key/value heads (as --heads)")
    axes.add_argument("--tokens", type=int, help="of all sequences (16384)")
    axes.add_argument("--hidden", type=int, help="channels of all query heads (2048)")


DEFAULTS: dict[str, Any] = {"dtype": ["bf16"], "mask": list(MASKS), "len": [512, 1024, 2048, 4096, 8192, 16384],
            "head_dim": [64, 128, 256], "batch": None, "heads": None, "heads_kv": None, "tokens": 16384,
            "hidden": 2048}


def points(options: argparse.Namespace) -> list[Point]:
    """Of the axes; ValueError where they do not fit together."""
    given = {name: value for name in DEFAULTS if (value := getattr(options, name)) is not None}
    axes = {**DEFAULTS, **PRESETS[options.preset], **given}
    result = []
    for dtype, head_dim, length, mask in itertools.product(
            axes["dtype"], axes["head_dim"], axes["len"], axes["mask"]):
        for batch, heads in itertools.product(axes["batch"] or [axes["tokens"] // length],
                                              axes["heads"] or [axes["hidden"] // head_dim]):
            if batch < 1 or heads < 1:
                raise ValueError(f"length {length}, head dim {head_dim}: more than --tokens {axes['tokens']}, "
                                 f"--hidden {axes['hidden']}")
            for heads_kv in axes["heads_kv"] or [heads]:
                if heads % heads_kv:
                    raise ValueError(f"{heads} query heads are no multiple of {heads_kv} key/value heads")
                result.append(Point(dtype, mask, batch, heads, heads_kv, length, head_dim))
    return result
