"""Every op against the best that NumPy and plain MLX offer, over sizes.

The ops are in kernel_cases/; of several ways to do the same, the fastest stands in the table. A
way that would take longer than --limit at a size is left out there. Times are the least of some
rounds: other work on the machine only adds.

On Linux, MLX asks for memory beyond 32 MB anew for every result, in pages of 4 KB, and NumPy in
pages of 2 MB. Writing 1e7 float32 then costs MLX, and so this package, three times what it costs
NumPy. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 gives both the large pages; the title tells.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from kernel_cases import OPS, Calls
from kernel_targets import speed_lines, without_result
from report import make_console
from rich.table import Table
from timing import blas, milliseconds

from vqkv_ext import info


def _arrays(result: object) -> list[np.ndarray]:
    """The one or several results of a call, bfloat16 as float32."""
    several = result if isinstance(result, tuple) else (result,)
    wide = (r.astype(mx.float32) if r.dtype == mx.bfloat16 else r for r in several)
    return [np.array(r) for r in wide]


def check(name: str, calls: Calls) -> None:
    """Whether all ways give the same.

    Raises:
        SystemExit: One does not.
    """
    want = _arrays(calls.ours())
    for call in [*calls.numpy, *calls.mlx]:
        for got, ours in zip(_arrays(call()), want, strict=True):
            if got.shape != ours.shape:
                raise SystemExit(f"{name}: {call.__name__} gives {got.shape}, not {ours.shape}")
            if ours.dtype.kind == "f":
                share = (abs(got - ours) <= calls.tolerance * abs(ours).max()).mean()
            else:
                share = (got == ours).mean()
            if share < calls.agree:
                raise SystemExit(f"{name}: {call.__name__} agrees only on {share:.4f} of results")


def measure(
    make: Callable[[int], Calls], sizes: list[int], rounds: int, limit: float
) -> dict[str, list[float]]:
    """Milliseconds of ours, NumPy and MLX at each size; NaN where a way takes too long."""
    times: dict[str, list[float]] = {"vqkv_ext": [], "NumPy": [], "MLX": []}
    per_value: dict[str, float] = {}
    for n in sizes:
        calls = make(n)
        for column, ways in (
            ("vqkv_ext", [calls.ours]),
            ("NumPy", [without_result(c) for c in calls.numpy]),
            ("MLX", calls.mlx),
        ):
            slow = per_value.get(column, 0.0) * n > 1e3 * limit
            best = math.nan
            if not slow:
                first = milliseconds(*ways, rounds=1, warmup=1, pick=min)
                if sum(first) < 100:
                    first = milliseconds(*ways, rounds=5, warmup=0, pick=min)
                way = ways[first.index(min(first))]
                # about a second each at most
                again = max(2, min(rounds, int(1e3 / max(min(first), 1e-3))))
                best = milliseconds(way, rounds=again, warmup=0, pick=min)[0]
                per_value[column] = best / n
            times[column].append(best)
    return times


def digits(x: float, decimals: int = 3) -> str:
    if math.isnan(x):
        return "-"
    return f"{x:.{decimals if x < 10 else 1 if x < 100 else 0}f}"


def machine() -> str:
    large = "glibc.malloc.hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "")
    pages = ["large pages"] if large else []
    return ", ".join([info()["executor"], info()["cpu_isa"], blas(), *pages])


def show(results: dict[str, dict[str, list[float]]], sizes: list[int]) -> Table:
    table = Table(title=f"milliseconds, and times ours; {machine()}", pad_edge=False)
    table.add_column("op", no_wrap=True)
    for column in ("values", "ours", "NumPy", "MLX", "NumPy x", "MLX x"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, times in results.items():
        for i, n in enumerate(sizes):
            ours, numpy, mlx = (times[c][i] for c in ("vqkv_ext", "NumPy", "MLX"))
            row = [digits(t) for t in (ours, numpy, mlx)]
            row += [digits(t / ours, 1) for t in (numpy, mlx)]
            table.add_row(name if i == 0 else "", f"{n:.0e}".replace("e+0", "e"), *row)
        table.add_section()
    return table


LABELS = {"vqkv_ext": "vqkv_ext", "NumPy": "NumPy, best way", "MLX": "plain MLX, best way"}


def plot(results: dict[str, dict[str, list[float]]], sizes: list[int], path: Path) -> None:
    """Nanoseconds per value against the number of values, one panel per op."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(results))
    rows = -(-(len(results) + 1) // columns)  # one place for the legend
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).reshape(-1)
    styles = {"NumPy": ("#444444", "s"), "MLX": ("#D55E00", "D"), "vqkv_ext": ("#0072B2", "o")}
    for axes, (name, times) in zip(panels, results.items(), strict=False):
        for column, (color, marker) in styles.items():
            y = [1e6 * t / n for t, n in zip(times[column], sizes, strict=True)]
            axes.loglog(sizes, y, color=color, marker=marker, label=LABELS[column], markersize=5)
        axes.set_title(name, fontsize=11)
        axes.grid(alpha=0.3)
    for i, axes in enumerate(panels):
        if i + columns >= len(results):
            axes.xaxis.set_tick_params(labelbottom=True)
        if i >= len(results):
            axes.set_axis_off()
    lines, labels = panels[0].get_legend_handles_labels()
    panels[len(results)].legend(
        lines, labels, loc="center left", frameon=False, fontsize=12, title=machine()
    )
    figure.supxlabel("values")
    figure.supylabel("nanoseconds per value")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=[""], help="parts of names to run")
    parser.add_argument("--smallest", type=int, default=3, help="power of ten")
    parser.add_argument("--largest", type=int, default=7, help="power of ten, up to 8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds a call may take")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture as well")
    parser.add_argument("--targets", action="store_true", help="check three promised speeds too")
    parser.add_argument("--strict", action="store_true", help="fail if one is missed")
    args = parser.parse_args()

    sizes = [10**e for e in range(args.smallest, args.largest + 1)]
    chosen = {name: make for name, make in OPS.items() if any(part in name for part in args.ops)}
    if not chosen:
        parser.error(f"--ops must name one of: {'; '.join(OPS)}")
    console = make_console()
    results = {}
    for name, make in sorted(chosen.items()):
        check(name, make(10_000))
        with console.status(name):
            results[name] = measure(make, sizes, args.rounds, args.limit)
    console.print(show(results, sizes))
    if args.plot:
        plot(results, sizes, args.plot)
        console.print(f"wrote {args.plot}")
    if args.targets or args.strict:
        lines, met = speed_lines(args.rounds)
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False)
        if args.strict and not met:
            sys.exit(1)


if __name__ == "__main__":
    main()
