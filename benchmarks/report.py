#!/usr/bin/env python3
"""Tables and figures of what compare.py or cuflash-bench measured, from their lines of JSON alone.

    report.py benchmarks/results/*-compare.jsonl
    report.py RESULTS --contestant cuflash:mma --against sdpa_flash --figures FOLDER > report.md

Markdown goes to standard output: speeds and ratios by length, geometric means, what failed; and for points that are
there: ragged batches to dense ones, f16 to bf16, fewer key/value heads to as many as query heads. --figures also
writes tflops.svg and ratios.svg into a folder and needs Matplotlib (benchmarks/requirements.txt).
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterable, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparison import points  # noqa: E402


@dataclass(frozen=True)
class Point(points.Point):
    """With the number of keys where it is not that of rows, as only cuflash-bench measures it."""

    length_k: int | None = None

    def __str__(self) -> str:
        return super().__str__() + (f" Sk{self.length_k}" if self.length_k else "")


class Results(NamedTuple):
    runs: list[dict]
    rows: dict[Point, dict[str, dict]]  # by contestant; what was measured last counts


class Series(NamedTuple):
    """Points that differ in their length alone (and in the batch that goes with it)."""

    dtype: str
    head_dim: int
    heads: int
    heads_kv: int
    mask: str
    length_k: int | None
    ragged: int | None

    @classmethod
    def of(cls, point: Point) -> Series:
        return cls(point.dtype, point.head_dim, point.heads, point.heads_kv, point.mask, point.length_k, point.ragged)

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads} Hkv{self.heads_kv}"
        keys = f" Sk{self.length_k}" if self.length_k else ""
        ragged = "" if self.ragged is None else f" ragged by seed {self.ragged}"
        return f"{self.dtype} D{self.head_dim} {heads} {self.mask}{keys}{ragged}"


def read(paths: Iterable[Path]) -> Results:
    results = Results([], defaultdict(dict))
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            line = json.loads(text)
            if "run" in line:
                if line["run"]["schema"] != 1:
                    raise ValueError(f"{path}:{number}: schema {line['run']['schema']}; 1 is known")
                results.runs.append(line["run"])
            else:
                results.rows[Point(**line["point"])][line["contestant"]] = line
    return results


def ratio(rows: dict[str, dict], contestant: str, against: str | None) -> float | None:
    """To the best peer or a certain one; None where one of the two has no time."""
    row = rows.get(contestant, {})
    return row.get("ratio") if against is None else row.get("ratios", {}).get(against)


def ratios_of(results: Results, contestant: str, against: str | None) -> dict[Point, float]:
    found = {point: ratio(rows, contestant, against) for point, rows in results.rows.items()}
    return {point: value for point, value in found.items() if value is not None}


def names(results: Results) -> list[str]:
    """All contestants that were timed, in the order of the lines."""
    return list(dict.fromkeys(name for rows in results.rows.values() for name, row in rows.items() if "ms" in row))


def series(points: Iterable[Point]) -> dict[Series, list[Point]]:
    result = defaultdict(list)
    for point in points:
        result[Series.of(point)].append(point)
    return {key: sorted(of_it, key=lambda point: (point.length, point.batch)) for key, of_it in result.items()}


# ---- Markdown --------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_run(run: dict) -> str:
    parts = [run["device"], run["date"][:10], *(f"{name} {run[name]}" for name in (
        "driver", "cuda", "power_limit", "max_clock", "matmul_tflops", "matrix_tflops", "copy_gb_s") if name in run)]
    parts += [f"{name} {version}" for name, version in run["versions"].items()]
    lines = [f"- {', '.join(map(str, parts))}", f"  - {run['cuflash']}, commit {run['commit'] or 'unknown'}",
             f"  - {run.get('program', 'compare.py')} with {json.dumps(run['flags'])}"]
    lines += [f"  - without {name}: {reason}" for name, reason in run["not_measured"].items()]
    return "\n".join(lines)


def speeds(results: Results, contestant: str, against: str | None) -> str:
    contestants = names(results)
    parts = []
    for key, points in series(results.rows).items():
        lines = []
        for point in points:
            rows = results.rows[point]
            row = rows.get(contestant, {})
            value = ratio(rows, contestant, against)
            lines.append([
                str(point.length), str(point.batch),
                *(f"{rows[name]['tflops']:.4g}" if "ms" in rows.get(name, {}) else "–" for name in contestants),
                "–" if value is None else f"{value:.3f}", (against or row.get("best_peer", "–")) if value else "–",
                f"`{row['kernel']}`" if "kernel" in row else "–"])
        parts.append(f"### {key}\n\n" + table(["S", "B", *contestants, "ratio", "to", "kernel"], lines))
    return "\n\n".join(parts)


def means(ratios: dict[Point, float]) -> str:
    lines = []
    for group in (lambda point: (point.dtype, f"D{point.head_dim}", point.mask),
                  lambda point: (point.dtype, f"D{point.head_dim}", "all"),
                  lambda point: (point.dtype, "all", "all")):
        grouped = defaultdict(list)
        for point, value in ratios.items():
            grouped[group(point)].append((value, point))
        for key, values in grouped.items():
            least, where = min(values, key=lambda each: each[0])
            lines.append([*key, str(len(values)), f"{statistics.geometric_mean(v for v, _ in values):.3f}",
                          f"{least:.3f}", str(where)])
    return table(["dtype", "head dim", "mask", "points", "geometric mean", "smallest", "at"], lines)


def times(results: Results, contestant: str) -> dict[Point, dict]:
    """The contestant's rows that have a time."""
    return {point: rows[contestant] for point, rows in results.rows.items() if "ms" in rows.get(contestant, {})}


def ragged_batches(results: Results, contestant: str) -> str | None:
    """What the sequences take at the speeds of dense batches of their lengths, to what they take."""
    lines = [[str(point), str(sum(point.lengths)), f"{row['tflops']:.4g}", f"{row['dense_ratio']:.3f}",
              ", ".join(f"{length}: {speed:.4g}" for length, speed in row["dense_tflops"].items())]
             for point, row in times(results, contestant).items() if "dense_ratio" in row]
    return table(["point", "tokens", "TFLOP/s", "to dense", "dense TFLOP/s by length"], lines) if lines else None


def speeds_of_pairs(pairs: list[tuple[str, dict, dict]], head: tuple[str, str, str]) -> str | None:
    """Of each point's two rows, and of the first to the second; with their mean and the smallest."""
    if not pairs:
        return None
    ratios = [(first["tflops"] / second["tflops"], point) for point, first, second in pairs]
    lines = [[point, f"{first['tflops']:.4g}", f"{second['tflops']:.4g}", f"{ratio:.3f}"]
             for (point, first, second), (ratio, _) in zip(pairs, ratios)]
    least, where = min(ratios)
    mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
    return (table(["point", *head], lines) +
            f"\n\nGeometric mean {mean:.3f}, smallest {least:.3f} of {len(ratios)}, at {where}.")


def f16_to_bf16(results: Results, contestant: str) -> str | None:
    timed = times(results, contestant)
    pairs = [(str(point).partition(" ")[2], row, timed[other]) for point, row in timed.items()
             if point.dtype == "f16" and (other := replace(point, dtype="bf16")) in timed]
    return speeds_of_pairs(pairs, ("f16", "bf16", "f16 / bf16"))


def grouped_heads(results: Results, contestant: str) -> str | None:
    timed = times(results, contestant)
    pairs = [(str(point), row, timed[other]) for point, row in timed.items()
             if point.heads_kv < point.heads and (other := replace(point, heads_kv=point.heads)) in timed]
    return speeds_of_pairs(pairs, ("TFLOP/s", "MHA", "to MHA"))


def failures(results: Results) -> list[str]:
    return [f"- {point}: {name}: {row['failed']}" for point, rows in results.rows.items()
            for name, row in rows.items() if "failed" in row] + [
        f"- {point}: {name}: dense batches: {row['dense_failed']}" for point, rows in results.rows.items()
        for name, row in rows.items() if "dense_failed" in row]


def markdown(results: Results, contestant: str, against: str | None, figures: list[str]) -> str:
    ratios = ratios_of(results, contestant, against)
    to = against or "the best peer of the point"
    parts = [f"# {contestant} and its peers", "\n".join(map(of_run, results.runs)),
             f"Speeds in TFLOP/s, of the median; ratios above 1: {contestant} is faster than {to}."]
    parts += [f"![{name}]({name})" for name in figures]
    if ratios:
        parts += ["## Means", means(ratios)]
    parts += ["## Speeds", speeds(results, contestant, against)]
    for title, text in (("Ragged batches", ragged_batches(results, contestant)),
                        ("f16 to bf16", f16_to_bf16(results, contestant)),
                        ("Grouped heads to as many key/value heads", grouped_heads(results, contestant))):
        if text:
            parts += [f"## {title}", text]
    if failed := failures(results):
        parts += ["## Not measured", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


# ---- figures ---------------------------------------------------------------------------------------------


def draw(results: Results, contestant: str, against: str | None, folder: Path) -> list[str]:
    """The names of the files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "cuflash", "svg.fonttype": "none", "font.size": 9,
                                "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(parents=True, exist_ok=True)
    written = {"tflops.svg": draw_speeds(results)}
    ratios = ratios_of(results, contestant, against)
    if ratios:
        written["ratios.svg"] = draw_ratios(ratios, contestant, against)
    for name, figure in written.items():
        figure.savefig(folder / name, metadata={"Date": None}, bbox_inches="tight")  # the same bytes each time
    return list(written)


def draw_speeds(results: Results):
    from matplotlib.figure import Figure

    of_series = series(results.rows)
    columns = min(len(of_series), 2)  # full and causal
    lines = -(-len(of_series) // columns)
    figure = Figure(figsize=(4 * columns, 2.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axis, (key, points) in zip(axes, of_series.items()):
        axis.set_title(str(key))
        for number, name in enumerate(names(results)):
            timed = [(point.length, results.rows[point][name]["tflops"]) for point in points
                     if "ms" in results.rows[point].get(name, {})]
            axis.plot(*zip(*timed) if timed else ((), ()), marker="o", markersize=3, label=name,
                      color=f"C{number}", linewidth=2 if name.startswith("cuflash") else 1)
        axis.set_xscale("log")
        axis.set_xticks([point.length for point in points], [str(point.length) for point in points])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    for axis in axes[len(of_series):]:
        axis.set_axis_off()
    axes[0].set_ylim(0, 1.05 * max(row.get("tflops", 0) for rows in results.rows.values() for row in rows.values()))
    figure.supxlabel("length of a sequence")
    figure.supylabel("TFLOP/s")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(handles[1]), frameon=False)
    return figure


def draw_ratios(ratios: dict[Point, float], contestant: str, against: str | None):
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    of_series = series(ratios)
    columns = sorted({(point.length, point.batch) for point in ratios})
    grid = [[float("nan")] * len(columns) for _ in of_series]
    for row, points in zip(grid, of_series.values()):
        for point in points:
            row[columns.index((point.length, point.batch))] = ratios[point]
    spread = max(1.05, *(max(value, 1 / value) for value in ratios.values()))
    figure = Figure(figsize=(1.6 + 0.8 * len(columns), 1.2 + 0.3 * len(of_series)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(grid, cmap="RdBu", norm=LogNorm(1 / spread, spread), aspect="auto")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            if value == value:
                axis.text(x, y, f"{value:.2f}", ha="center", va="center",
                          color="white" if max(value, 1 / value) > spread**0.6 else "black")
    axis.set_xticks(range(len(columns)), [f"{length}\nB{batch}" for length, batch in columns])
    axis.set_yticks(range(len(of_series)), [str(key) for key in of_series])
    axis.set_title(f"{contestant} to {against or 'the best peer'}: blue is faster")
    axis.tick_params(length=0)
    bar = figure.colorbar(image, ax=axis, ticks=[1 / spread, 1, spread], format="%.2f")
    bar.minorticks_off()
    return figure


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files of compare.py or cuflash-bench")
    parser.add_argument("--contestant", default="cuflash", help="whose ratios (cuflash)")
    parser.add_argument("--against", metavar="PEER", help="ratios to this one (the best of each point)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw, too")
    options = parser.parse_args(argv)
    results = read(options.results)
    for name in filter(None, (options.contestant, options.against)):
        if name not in names(results):
            parser.error(f"{name}: has no time in these files; those that have: {', '.join(names(results))}")
    figures = draw(results, options.contestant, options.against, options.figures) if options.figures else []
    print(markdown(results, options.contestant, options.against, figures), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
