"""Coding and bit streams at sizes that fill a GPU: share of the copy bandwidth, memory, plain MLX.

kernels.py compares all ops with NumPy and MLX over sizes; this is about one large size each and
what the device could do: the bytes of inputs and results at the bandwidth of an elementwise copy of
1 GiB, and a copy of as many bytes that is timed like the op, in turns with it.
The first row has the shape of one layer of a model with 4 KV heads of 256 and 4096 tokens; its
naive graph computes distances by broadcasting, 4096 vectors at a time so that it fits in memory. A
trellis code is searched for block by block: its rows, and one of hadamard_quantize beside them, are
a block of 64 tokens of 8 heads. Of several ways to do the same in plain MLX the fastest stands in
the table. Memory is MLX's peak during a call beyond what was held before it, the result included.
On a CPU small results stay in its caches, and shares may exceed 100 %. On a GPU 20 calls are
evaluated at once and three such evaluations are in flight; `waited ms` is the time of ours where
each evaluation is waited for, which adds the host's time to start one and to hear of its end.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from attention import where
from kernel_cases import Calls, bits, hadamard, qjl, trellis, vq
from report import (
    COLORS,
    Results,
    Row,
    Target,
    add_options,
    check_options,
    finish,
    lacks,
    make_console,
    obtain,
    on_gpu,
    released,
    say_lacking,
)
from rich.console import Console
from rich.table import Table
from timing import copy_bandwidth, extra_bytes, milliseconds

VQ = "quantize_vq, 256 x 4"
NAIVE = "naive graph"
TOGETHER = 20  # calls in one eval on a GPU
AHEAD = 3  # evals in flight there
BLOCK = 64 * 8 * 128  # values of a block of tokens: 64 tokens of 8 heads of 128
SEARCHED, SCALAR = "trellis_encode, 2 bits", "hadamard_quantize, 4 bits, a block"


@dataclass(frozen=True)
class Op:
    """``make(n)`` for about n values, of a block of tokens at most n = ``BLOCK``; targets are a
    share of the copy bandwidth, or times as fast as plain MLX and the naive graph. ``others`` get
    the inputs of ours and stand in rows of their own."""

    name: str
    make: Callable[[int], Calls]
    block: bool = False
    share: float | None = None
    over_mlx: float | None = None
    over_naive: float | None = None
    others: Mapping[str, Callable[..., mx.array]] = field(default_factory=dict)


def naive(x: mx.array, book: mx.array) -> mx.array:
    """Distances of vectors ``[N, d]`` to all rows by broadcasting."""
    parts = [
        mx.argmin((x[i : i + 4096, None] - book).square().sum(-1), axis=-1).astype(mx.uint8)
        for i in range(0, x.shape[0], 4096)
    ]
    return mx.concatenate(parts)


def matmul_argmin(x: mx.array, book: mx.array) -> mx.array:
    """``argmin(|c|^2 / 2 - x . c)`` with an intermediate result of N x rows."""
    return mx.argmin(0.5 * book.square().sum(-1) - x @ book.T, axis=-1).astype(mx.uint8)


HADAMARD = [
    Op(
        f"hadamard_quantize, {b} bits, {dtype}",
        partial(hadamard.hadamard_quantize, bits=b, dtype=getattr(mx, dtype)),
        share=0.6 if b == 4 else None,
    )
    for b in (4, 3, 2)
    for dtype in ("float16", "float32")
]
BLOCKS = [
    Op(SCALAR, partial(hadamard.hadamard_quantize, bits=4, dtype=mx.float16), block=True),
    *[
        Op(
            f"trellis_encode, {b} bit{'s' if b > 1 else ''}",
            partial(trellis.trellis_encode, bits=b),
            block=True,
        )
        for b in (1, 2, 3, 4)
    ],
]
STREAMS = [
    Op(f"{name}, {b} bit{'s' if b > 1 else ''}", partial(make, bits=b), share=0.6)
    for name, make in (("pack_bits", bits.pack_bits), ("unpack_bits", bits.unpack_bits))
    for b in (1, 2, 3, 4)
]
OPS = [
    Op(
        VQ,
        vq.quantize_vq,
        over_mlx=20,
        over_naive=500,
        others={"matmul + argmin, whole": matmul_argmin, NAIVE: naive},
    ),
    *HADAMARD,
    *BLOCKS,
    *STREAMS,
    Op("qjl_encode, m=128, float32", qjl.qjl_encode),
]


def _several(result: mx.array | tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    return result if isinstance(result, tuple) else (result,)


def fastest(calls: Calls) -> tuple[Callable[[], Any] | None, dict[str, str]]:
    """The fastest way in plain MLX, and why others are not there."""
    missing, able = {}, []
    for way in calls.mlx:
        if why := lacks(way):
            missing[way.__name__] = why
        else:
            able.append(way)
        mx.clear_cache()
    if not able:
        return None, missing
    times = milliseconds(*able, rounds=2, warmup=0, pick=min)
    return able[times.index(min(times))], missing


def measure_op(op: Op, values: int, rounds: int, bandwidth: float) -> Row:
    calls = op.make(values)
    mx.eval(calls.reads)
    best, missing = fastest(calls)
    row: Row = {"case": op.name, "values": values, "not_there": missing}
    if why := lacks(calls.ours):
        missing["vqkv_ext"] = why
        return row
    results = _several(calls.ours())
    moved = sum(a.nbytes for a in (*calls.reads, *results))
    half = mx.zeros((moved // 8,), mx.float32)
    ways = [calls.ours, lambda: half + 1, *([best] if best else [])]
    together, ahead = (TOGETHER, AHEAD) if on_gpu() else (1, 1)
    (alone,) = milliseconds(calls.ours, rounds=rounds, together=together)
    ms, copy, *theirs = milliseconds(*ways, rounds=rounds, together=together, ahead=ahead)
    row |= {"ours_ms": ms, "bytes": moved, "share": moved / bandwidth / (1e-3 * ms)}
    row |= {"copy_ms": copy, "waited_ms": alone}
    row["extra_bytes"] = extra_bytes(calls.ours)
    if best:
        same = _several(best())[0].reshape(-1) == results[0].reshape(-1)
        row |= {
            "mlx_ms": theirs[0],
            "mlx_way": best.__name__,
            "mlx_extra_bytes": extra_bytes(best),
            "equal": same.mean().item(),
        }
    row["others"] = {}
    for name, way in op.others.items():
        call = partial(way, *calls.reads)
        if why := lacks(call):
            missing[name] = why
        else:
            (time,) = milliseconds(call, rounds=3, warmup=1)
            row["others"][name] = {"ms": time, "extra_bytes": extra_bytes(call)}
    return row


def measure(args: argparse.Namespace, console: Console) -> Results:
    bandwidth = copy_bandwidth()
    rows = []
    for op in args.ops:
        values = args.vectors * vq.DIMS if op.name == VQ else args.values
        values = min(values, BLOCK) if op.block else values
        with console.status(op.name), released():
            rows.append(measure_op(op, values, args.rounds, bandwidth))
    return {"bandwidth": bandwidth, "where": where(), "rows": rows}


def _ratio(row: Row, ms: float | None) -> float | None:
    return None if ms is None or "ours_ms" not in row else ms / row["ours_ms"]


def search_cost(measured: dict[str, Row]) -> Target:
    """A block of a trellis code takes at most three times that of scalar codes, and 50 us."""
    searched, scalar = (measured.get(name, {}).get("ours_ms") for name in (SEARCHED, SCALAR))
    found = None if searched is None or scalar is None else (3 * scalar + 0.05) / searched
    return Target("trellis_encode, 2 bits, a block: (3 x hadamard_quantize + 50 us) / it", found, 1)


def targets(rows: list[Row]) -> list[Target]:
    measured = {row["case"]: row for row in rows}
    found = []
    for op in OPS:
        row = measured.get(op.name, {})
        if op.share is not None:
            percent = 100 * row["share"] if "share" in row else None
            found.append(Target(f"{op.name}, of the copy bandwidth", percent, 100 * op.share, " %"))
        graph = row.get("others", {}).get(NAIVE, {})
        for least, ms, other in (
            (op.over_mlx, row.get("mlx_ms"), "matmul + argmin"),
            (op.over_naive, graph.get("ms"), "the naive graph"),
        ):
            if least is not None:
                found.append(Target(f"{op.name}, speed over {other}", _ratio(row, ms), least))
    found.append(search_cost(measured))
    return found


def _digits(x: float) -> str:
    return f"{x:.3f}" if x < 10 else f"{x:.1f}"


def show(console: Console, results: Results) -> None:
    copy = f"{results['bandwidth'] / 1e9:,.0f}"
    table = Table(
        title=f"{results['where']}; a copy reads and writes {copy} GB/s; alike: a copy of the op's "
        "bytes, timed like it"
    )
    table.add_column("op", no_wrap=True)
    for column in ("values", "waited ms", "ours ms", "GB/s", "of copy", "of alike", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("other way", no_wrap=True)
    for column in ("ms", "times", "MB", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in results["rows"]:
        ours = ["not there"] + [""] * 5
        if "ours_ms" in row:
            ours = [
                _digits(row["waited_ms"]),
                _digits(row["ours_ms"]),
                f"{row['bytes'] / row['ours_ms'] / 1e6:,.1f}",
                f"{100 * row['share']:.1f} %",
                f"{100 * row['copy_ms'] / row['ours_ms']:.1f} %",
                f"{row['extra_bytes'] / 1e6:.1f}",
            ]
        other = ["not there"] + [""] * 4
        if "mlx_ms" in row:
            other = [
                row["mlx_way"],
                _digits(row["mlx_ms"]),
                f"{_ratio(row, row['mlx_ms']):.1f}x",
                f"{row['mlx_extra_bytes'] / 1e6:,.1f}",
                f"{row['equal']:.4f}",
            ]
        table.add_row(row["case"], f"{row['values']:,}", *ours, *other)
        for name, found in row.get("others", {}).items():
            ratio = f"{_ratio(row, found['ms']):.1f}x"
            extra = f"{found['extra_bytes'] / 1e6:,.1f}"
            table.add_row(*[""] * 8, name, _digits(found["ms"]), ratio, extra, "")
    console.print(table)
    say_lacking(console, results["rows"])


def drawing(results: Results) -> Callable[[Any], None]:
    """Bars of the share of the copy bandwidth, on a scale that holds both ways."""
    rows = [row for row in reversed(results["rows"]) if "share" in row]
    ours = [100 * row["share"] for row in rows]
    theirs = [s / (_ratio(r, r.get("mlx_ms")) or math.inf) for s, r in zip(ours, rows, strict=True)]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        at = range(len(rows))
        axes.barh([y + 0.2 for y in at], ours, 0.4, label="vqkv_ext", color=COLORS[0])
        axes.barh([y - 0.2 for y in at], theirs, 0.4, label="plain MLX, best way", color=COLORS[1])
        axes.set_yticks(list(at), [row["case"] for row in rows])
        axes.set_xlabel("percent of the copy bandwidth")
        axes.set_title(results["where"])
        axes.grid(alpha=0.3, axis="x")
        axes.legend()

    return draw


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = on_gpu()
    parser.add_argument("--ops", nargs="+", default=[""], help="parts of names to run")
    parser.add_argument("--values", type=int, default=1 << (26 if gpu else 20))
    parser.add_argument("--vectors", type=int, default=1 << (20 if gpu else 16), help="of 4 values")
    parser.add_argument("--rounds", type=int, default=7 if gpu else 5)
    add_options(parser)
    args = parser.parse_args(argv)
    check_options(parser, args)
    args.ops = [op for op in OPS if any(part in op.name for part in args.ops)]
    if not args.ops:
        parser.error(f"--ops must name one of: {'; '.join(op.name for op in OPS)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args, console = parse(argv), make_console()
    results = obtain(args, lambda: measure(args, console))
    show(console, results)
    finish(console, args, targets(results["rows"]), drawing(results), (8, 6))


if __name__ == "__main__":
    main()
