#!/usr/bin/env python3
"""Draws the pictures of the documentation.

    draw.py            rewrites the SVG files beside this script
    draw.py --check    fails if one of them is not what the script draws

What a picture says about masks and heads is data (MASKS, HEAD_MAPS): tests/docs compares it with what
the library computes.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent

SEEN, HIDDEN, CENTRE, EMPTY = "#3b6fb6", "#e9edf3", "#f0a020", "#f6dcdc"
INK, FAINT = "#222222", "#8a94a3"
HEADS = ["#3b6fb6", "#d9822b", "#4f9d69", "#9b5fb5", "#c0504d", "#5b8c99"]
CELL = 22


class Svg:
    """Collects shapes; the size of the picture is given at the end."""

    def __init__(self) -> None:
        self.shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str,
             stroke: str = "#ffffff", line: float = 1) -> None:
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
                           f'fill="{fill}" stroke="{stroke}" stroke-width="{line:g}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self.shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{fill}"/>')

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "middle",
             fill: str = INK, weight: str = "normal") -> None:
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
                           f'fill="{fill}" font-weight="{weight}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = INK, width: float = 1.5,
             arrow: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.shapes.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
                           f'stroke="{stroke}" stroke-width="{width:g}"{end}/>')

    def document(self, title: str, width: float, height: float) -> str:
        body = "\n".join(self.shapes)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
                f'width="{width:g}" height="{height:g}" role="img" font-family="sans-serif">\n'
                f"<title>{escape(title)}</title>\n"
                '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
                f'fill="{INK}"/></marker></defs>\n'
                f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{body}\n</svg>\n')


# ---- masks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A mask as the problem states it; align: "bottom-right", "top-left" or an offset."""
    title: str
    len_q: int
    len_k: int
    causal: bool
    align: str | int = "bottom-right"
    window: tuple[int, int] | None = None

    def centre(self, row: int) -> int:
        if self.align == "bottom-right":
            return row + self.len_k - self.len_q
        return row if self.align == "top-left" else row + self.align

    def sees(self, row: int, key: int) -> bool:
        c = self.centre(row)
        if self.causal and key > c:
            return False
        left, right = self.window or (-1, -1)
        return (left < 0 or key >= c - left) and (right < 0 or key <= c + right)

    def blind(self, row: int) -> bool:
        return not any(self.sees(row, key) for key in range(self.len_k))


CAUSAL = [
    Mask("bottom-right", 4, 7, True),
    Mask("top-left", 4, 7, True, "top-left"),
    Mask("offset 1", 4, 7, True, 1),
    Mask("bottom-right", 7, 4, True),
    Mask("top-left", 7, 4, True, "top-left"),
    Mask("offset -2", 7, 4, True, -2),
]
WINDOWS = [
    Mask("causal, window (2, -1)", 6, 8, True, window=(2, -1)),
    Mask("window (2, 0): the same", 6, 8, False, window=(2, 0)),
    Mask("window (1, 1)", 6, 8, False, window=(1, 1)),
    Mask("window (-1, 1)", 6, 8, False, window=(-1, 1)),
]
MASKS = CAUSAL + WINDOWS


def draw_mask(svg: Svg, mask: Mask, x: float, y: float) -> None:
    svg.text(x + mask.len_k * CELL / 2, y - 24, mask.title, 14, weight="bold")
    svg.text(x + mask.len_k * CELL / 2, y - 7, f"Sq = {mask.len_q}, Sk = {mask.len_k}", 11,
             fill=FAINT)
    for i in range(mask.len_q):
        for j in range(mask.len_k):
            fill = SEEN if mask.sees(i, j) else EMPTY if mask.blind(i) else HIDDEN
            svg.rect(x + j * CELL, y + i * CELL, CELL, CELL, fill)
        svg.text(x - 6, y + (i + 0.68) * CELL, str(i), 11, "end", FAINT)
        if 0 <= mask.centre(i) < mask.len_k:
            svg.dot(x + (mask.centre(i) + 0.5) * CELL, y + (i + 0.5) * CELL, 4, CENTRE)
    for j in range(mask.len_k):
        svg.text(x + (j + 0.5) * CELL, y + mask.len_q * CELL + 13, str(j), 11, fill=FAINT)


def draw_legend(svg: Svg, masks: list[Mask], x: float, y: float) -> None:
    meanings = [(SEEN, "key seen"), (HIDDEN, "key hidden")]
    if any(mask.blind(i) for mask in masks for i in range(mask.len_q)):
        meanings.append((EMPTY, "row that sees no key"))
    for fill, words in meanings:
        svg.rect(x, y, 14, 14, fill)
        svg.text(x + 20, y + 11, words, 12, "start")
        x += 40 + 7 * len(words)
    svg.dot(x + 7, y + 7, 4, CENTRE)
    svg.text(x + 20, y + 11, "centre c", 12, "start")


def causal() -> str:
    svg = Svg()
    for n, mask in enumerate(CAUSAL):
        draw_mask(svg, mask, 40 + n % 3 * 215, 45 if n < 3 else 205)
    draw_legend(svg, CAUSAL, 40, 395)
    return svg.document("Causal masks: rows are queries, columns are keys", 640, 425)


def windows() -> str:
    svg = Svg()
    for n, mask in enumerate(WINDOWS):
        draw_mask(svg, mask, 40 + n % 2 * 260, 45 + n // 2 * 210)
    draw_legend(svg, WINDOWS, 40, 425)
    return svg.document("Windows: rows are queries, columns are keys", 560, 455)


# ---- heads ----------------------------------------------------------------------------------------

# (query heads, key/value heads): their names in the literature.
HEAD_MAPS = {(6, 6): "multi-head", (6, 2): "grouped-query", (6, 1): "multi-query"}


def kv_head(head: int, heads_q: int, heads_kv: int) -> int:
    return head // (heads_q // heads_kv)


def heads() -> str:
    svg = Svg()
    for n, ((heads_q, heads_kv), name) in enumerate(HEAD_MAPS.items()):
        x = 30 + n * 220
        svg.text(x + 90, 24, name, 14, weight="bold")
        svg.text(x + 90, 41, f"Hq = {heads_q}, Hkv = {heads_kv}", 11, fill=FAINT)
        width_kv = 180 / heads_kv
        for h in range(heads_q):
            target = kv_head(h, heads_q, heads_kv)
            svg.rect(x + h * 30 + 3, 55, 24, 24, HEADS[target])
            svg.text(x + h * 30 + 15, 71, str(h), 12, fill="#ffffff")
            svg.line(x + h * 30 + 15, 80, x + (target + 0.5) * width_kv, 121, FAINT, 1.2)
        for h in range(heads_kv):
            svg.rect(x + (h + 0.5) * width_kv - 12, 122, 24, 24, HEADS[h])
            svg.text(x + (h + 0.5) * width_kv, 138, str(h), 12, fill="#ffffff")
    svg.text(6, 71, "q", 12, "start", FAINT)
    svg.text(6, 138, "kv", 12, "start", FAINT)
    return svg.document("Which key/value head a query head reads", 660, 160)


# ---- layout ---------------------------------------------------------------------------------------


def draw_strip(svg: Svg, y: float, title: str, order: str, strides: dict[str, int]) -> None:
    """Memory from left to right; a box is one row of D channels."""
    sizes, box = {"h": 2, "s": 4}, 70
    svg.text(20, y, title, 14, "start", weight="bold")
    for outer in range(sizes[order[0]]):
        for inner in range(sizes[order[1]]):
            at = {order[0]: outer, order[1]: inner}
            x = 20 + (outer * sizes[order[1]] + inner) * box
            svg.rect(x, y + 12, box, 26, HEADS[at["h"]])
            svg.text(x + box / 2, y + 30, f"h{at['h']} row {at['s']}", 12, fill="#ffffff")
    names = {"h": "head_stride", "s": "row_stride"}
    for level, axis in enumerate(reversed(order)):
        length = strides[axis] * box
        line_y = y + 52 + level * 24
        svg.line(20, line_y, 20 + length, line_y, arrow=True)
        factor = "D" if strides[axis] == 1 else f"{strides[axis]} D"
        svg.text(28 + length, line_y + 4, f"{names[axis]} = {factor}", 12, "start")


def strides() -> str:
    svg = Svg()
    draw_strip(svg, 24, "[batch, head, row, channel]: dense", "hs", {"s": 1, "h": 4})
    draw_strip(svg, 144, "[batch, row, head, channel]: as a projection leaves it", "sh",
               {"h": 1, "s": 2})
    return svg.document("The same tensor, 2 heads of 4 rows, in two orders of memory", 600, 250)


# ---- the forward pass by tiles ----------------------------------------------------------------------


def tiles() -> str:
    svg = Svg()
    x, y, tile_m, tile_n, rows, columns = 150, 110, 44, 52, 4, 5
    svg.text(x + columns * tile_n / 2, 20, "K and V: tiles of keys, one after the other", 13,
             weight="bold")
    for j in range(columns):
        svg.rect(x + j * tile_n, 32, tile_n, 50, "#d7e3f4", "#ffffff", 2)
        svg.text(x + (j + 0.5) * tile_n, 53, f"K{j}", 12)
        svg.text(x + (j + 0.5) * tile_n, 73, f"V{j}", 12)
    current = 2  # the tile of query rows that the picture follows
    for i in range(rows):
        svg.rect(40, y + i * tile_m, 80, tile_m, "#f4dfc6" if i == current else HIDDEN, "#ffffff", 2)
        svg.text(80, y + (i + 0.6) * tile_m, f"Q{i}", 12)
        for j in range(columns):
            # Causal, bottom-right, one tile more of keys than of rows.
            kind = "whole" if j <= i else "edge" if j == i + 1 else "skipped"
            fill = {"whole": SEEN, "edge": "#8fb0de", "skipped": HIDDEN}[kind]
            line = INK if i == current and kind != "skipped" else "#ffffff"
            svg.rect(x + j * tile_n + 1, y + i * tile_m + 1, tile_n - 2, tile_m - 2, fill, line, 2)
    row_y = y + (current + 0.5) * tile_m
    svg.line(x + columns * tile_n + 6, row_y, x + columns * tile_n + 60, row_y, arrow=True)
    left = x + columns * tile_n + 66
    svg.rect(left, row_y - 34, 172, 68, "#f4dfc6")
    svg.text(left + 86, row_y - 14, "kept for the tile's rows:", 12)
    svg.text(left + 86, row_y + 5, "O, maximum m, sum l", 12, weight="bold")
    svg.text(left + 86, row_y + 24, "at the end O / l, m + ln l", 12)
    svg.text(80, y - 12, "Q: tiles of rows", 13, weight="bold")
    bottom = y + rows * tile_m + 22
    for n, (fill, words) in enumerate(((SEEN, "computed"), ("#8fb0de", "computed and masked"),
                                       (HIDDEN, "skipped: no row sees a key in it"))):
        svg.rect(40 + (0, 110, 290)[n], bottom, 14, 14, fill)
        svg.text(60 + (0, 110, 290)[n], bottom + 11, words, 12, "start")
    return svg.document("The forward pass of one head, causal: the scores exist one tile at a time",
                        660, bottom + 28)


PICTURES = {"causal": causal, "windows": windows, "heads": heads, "strides": strides, "tiles": tiles}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is stale")
    parser.add_argument("--output", type=Path, default=HERE, help="another folder")
    arguments = parser.parse_args()
    stale = 0
    for name, draw in PICTURES.items():
        path, drawn = arguments.output / f"{name}.svg", draw()
        if not arguments.check:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            print(f"{path}: stale, run {Path(__file__).name}", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
