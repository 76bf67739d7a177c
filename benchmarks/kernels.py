"""Every op against the best that NumPy and plain MLX offer, over sizes.

An op takes part through a function decorated with `@op(name)` that makes its calls for about n
values; of several ways to do the same, the fastest stands in the table. A way that would take
longer than --limit at a size is left out there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table
from timing import blas, milliseconds

from vqkv_ext import info, ops
from vqkv_ext.codecs import lloyd_max

Numpy = Callable[[], np.ndarray]
Mlx = Callable[[], mx.array]


@dataclass
class Calls:
    """Ways to compute the same thing. `agree` is the least share of equal results (rounding may
    decide between centroids that are equally near)."""

    ours: Mlx
    numpy: list[Numpy]
    mlx: list[Mlx]
    agree: float = 1.0


OPS: dict[str, Callable[[int], Calls]] = {}


def op(name: str, *arguments: object) -> Callable:
    """Register `make(n, *arguments)` under a name."""

    def register(make: Callable[..., Calls]) -> Callable[..., Calls]:
        OPS[name] = lambda n: make(n, *arguments)
        return make

    return register


# ---- ops ----


@op("pack_bits, 1 bit", 1)
@op("pack_bits, 2 bits", 2)
@op("pack_bits, 3 bits", 3)
@op("pack_bits, 4 bits", 4)
def pack_bits(n: int, bits: int) -> Calls:
    n = n // 8 * 8
    i = np.random.default_rng(0).integers(0, 1 << bits, n, np.uint8)
    a = mx.array(i)

    def np_packbits() -> np.ndarray:
        if bits == 1:
            return np.packbits(i, bitorder="little")
        stream = np.unpackbits(i[:, None], axis=1, bitorder="little", count=bits)
        return np.packbits(stream.reshape(-1), bitorder="little")

    def np_shift_or() -> np.ndarray:
        if 8 % bits == 0:
            v = i.reshape(-1, 8 // bits)
            out = v[:, 0].copy()
            for t in range(1, v.shape[1]):
                out |= v[:, t] << np.uint8(bits * t)
            return out
        v = i.reshape(-1, 8)
        words = v[:, 0].astype(np.uint32)
        for t in range(1, 8):
            words |= v[:, t].astype(np.uint32) << np.uint32(bits * t)
        return words.view(np.uint8).reshape(-1, 4)[:, :bits].reshape(-1)

    def mx_shift_or() -> mx.array:
        if 8 % bits == 0:
            v = a.reshape(-1, 8 // bits)
            out = v[:, 0]
            for t in range(1, v.shape[1]):
                out = out | (v[:, t] << mx.array(bits * t, mx.uint8))
            return out
        v = a.reshape(-1, 8).astype(mx.uint32)
        words = v[:, 0]
        for t in range(1, 8):
            words = words | (v[:, t] << mx.array(bits * t, mx.uint32))
        return words.view(mx.uint8).reshape(-1, 4)[:, :bits].reshape(-1)

    def mx_sum() -> mx.array:
        if 8 % bits == 0:
            shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
            return (a.reshape(-1, 8 // bits) << shifts).sum(-1).astype(mx.uint8)
        words = (a.reshape(-1, 8).astype(mx.uint32) << mx.arange(0, 8 * bits, bits)).sum(-1)
        return words.astype(mx.uint32).view(mx.uint8).reshape(-1, 4)[:, :bits].reshape(-1)

    return Calls(lambda: ops.pack_bits(a, bits), [np_packbits, np_shift_or], [mx_shift_or, mx_sum])


@op("quantize_scalar, 2 bits", 2)
@op("quantize_scalar, 4 bits", 4)
@op("quantize_scalar, 8 bits", 8)
def quantize_scalar(n: int, bits: int) -> Calls:
    n = n // 8 * 8
    x = np.random.default_rng(0).standard_normal(n, np.float32)
    c = lloyd_max.gaussian(bits).astype(np.float32)
    bounds = np.float32(0.5) * (c[:-1] + c[1:])
    a, book = mx.array(x), mx.array(c)
    mx_bounds = mx.array(bounds)
    per_byte = 8 // bits

    def np_pack(index: np.ndarray) -> np.ndarray:
        v = index.reshape(-1, per_byte)
        out = v[:, 0].copy()
        for t in range(1, per_byte):
            out |= v[:, t] << np.uint8(bits * t)
        return out

    def np_search() -> np.ndarray:
        return np_pack(np.searchsorted(bounds, x).astype(np.uint8))

    def np_count() -> np.ndarray:
        index = np.zeros(n, np.uint8)
        for b in bounds:
            index += x > b
        return np_pack(index)

    def mx_pack(index: mx.array) -> mx.array:
        v = index.reshape(-1, per_byte)
        out = v[:, 0]
        for t in range(1, per_byte):
            out = out | (v[:, t] << mx.array(bits * t, mx.uint8))
        return out

    def mx_count() -> mx.array:
        index = mx.zeros((n,), mx.uint8)
        for b in bounds.tolist():
            index = index + (a > b)
        return mx_pack(index)

    def mx_bisect() -> mx.array:
        index = mx.zeros((n,), mx.uint8)
        for step in (1 << t for t in reversed(range(bits))):
            below = mx.take(mx_bounds, index + mx.array(step - 1, mx.uint8)) < a
            index = index + below * mx.array(step, mx.uint8)
        return mx_pack(index)

    def mx_broadcast() -> mx.array:
        return mx_pack((a[:, None] > mx_bounds).sum(-1).astype(mx.uint8))

    few = [mx_count] if bits <= 4 else []
    return Calls(
        lambda: ops.quantize_scalar(a, book, bits),
        [np_search, *([np_count] if bits <= 4 else [])],
        [mx_bisect, *few, *([mx_broadcast] if n << bits <= 1 << 28 else [])],
    )


@op("quantize_vq, 256 x 4", 256, 4)
def quantize_vq(n: int, rows: int, dims: int) -> Calls:
    rng = np.random.default_rng(0)
    n = n // dims * dims
    x, c = rng.standard_normal((n // dims, dims), np.float32), rng.standard_normal((rows, dims))
    c = c.astype(np.float32)
    a, book = mx.array(x), mx.array(c)
    half = 0.5 * (c * c).sum(-1)
    mx_half = mx.array(half)
    step = 1 << 16  # vectors whose distances are held at a time

    def np_matmul() -> np.ndarray:
        parts = [(half - x[i : i + step] @ c.T).argmin(-1) for i in range(0, len(x), step)]
        return np.concatenate(parts).astype(np.uint8)

    def mx_matmul() -> mx.array:
        parts = [
            mx.argmin(mx_half - a[i : i + step] @ book.T, axis=-1).astype(mx.uint8)
            for i in range(0, len(x), step)
        ]
        return mx.concatenate(parts)

    return Calls(lambda: ops.quantize_vq(a, book)[:, 0], [np_matmul], [mx_matmul], agree=0.999)


# ---- measuring ----


def without_result(call: Numpy) -> Callable[[], list]:
    def run() -> list:
        call()
        return []  # nothing for mx.eval

    return run


def check(name: str, calls: Calls) -> None:
    want = np.array(calls.ours())
    for call in [*calls.numpy, *calls.mlx]:
        share = (np.array(call()) == want).mean() if want.size else 1.0
        if share < calls.agree:
            raise SystemExit(f"{name}: {call.__name__} agrees only on {share:.4f} of the results")


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
                first = milliseconds(*ways, rounds=1, warmup=1)
                way = ways[first.index(min(first))]
                # about a second each at most
                again = max(1, min(rounds, int(1e3 / max(min(first), 1e-3))))
                best = milliseconds(way, rounds=again, warmup=0)[0]
                per_value[column] = best / n
            times[column].append(best)
    return times


def digits(x: float, decimals: int = 3) -> str:
    return "-" if math.isnan(x) else f"{x:.{decimals if x < 100 else 0}f}"


def show(results: dict[str, dict[str, list[float]]], sizes: list[int]) -> Table:
    table = Table(
        title=f"milliseconds, and times ours; {info()['executor']}, {info()['cpu_isa']}, {blas()}",
        pad_edge=False,
    )
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


def plot(results: dict[str, dict[str, list[float]]], sizes: list[int], path: Path) -> None:
    """Nanoseconds per value against the number of values, one panel per op."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.9 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).reshape(-1)
    styles = {"NumPy": ("#444444", "s"), "MLX": ("#D55E00", "D"), "vqkv_ext": ("#0072B2", "o")}
    for axes, (name, times) in zip(panels, results.items(), strict=False):
        for column, (color, marker) in styles.items():
            y = [1e6 * t / n for t, n in zip(times[column], sizes, strict=True)]
            label = "plain MLX" if column == "MLX" else column
            axes.loglog(sizes, y, color=color, marker=marker, label=label, markersize=5)
        axes.set_title(name, fontsize=11)
        axes.grid(alpha=0.3)
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False, fontsize=9)
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
    args = parser.parse_args()

    sizes = [10**e for e in range(args.smallest, args.largest + 1)]
    chosen = {name: make for name, make in OPS.items() if any(part in name for part in args.ops)}
    if not chosen:
        parser.error(f"--ops must name one of: {'; '.join(OPS)}")
    console = Console()
    results = {}
    for name, make in sorted(chosen.items()):
        check(name, make(10_000))
        with console.status(name):
            results[name] = measure(make, sizes, args.rounds, args.limit)
    console.print(show(results, sizes))
    if args.plot:
        plot(results, sizes, args.plot)
        console.print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
