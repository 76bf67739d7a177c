"""Attention over compressed caches against the best that MLX and mlx-lm offer, decode and prefill.

The ways of a shape are measured in one run, in turns (on a GPU, mlx-lm's apart, see
attention_alone.py): `mx.fast.scaled_dot_product_attention` on dense keys and values, mlx-lm's own
4-bit cache, and for several queries also decoding the codes and then dense attention (what a cache
without a kernel of its own has to do). The floor is the longer of two times: the bytes that a call
must move at the bandwidth of a copy, and the operations of its two products at the rate of a large
matrix product. A GPU keeps what fits its second-level cache from one call to the next, so that
short contexts may go below the floor.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import groupby
from typing import Any

import attention_alone
import mlx.core as mx
from attention_case import Call, Case, Shape, least_bytes
from attention_targets import OVER_MLX_LM, targets
from report import (
    COLORS,
    LACKING,
    MARKERS,
    Results,
    Row,
    add_options,
    check_options,
    finish,
    lacks,
    make_console,
    obtain,
    on_gpu,
    reason,
    released,
    say_lacking,
)
from rich import box
from rich.console import Console
from rich.table import Table
from timing import blas, copy_bandwidth, matmul_rate, milliseconds

from vqkv_ext import info
from vqkv_ext.codecs import vecinfer
from vqkv_ext.codecs.presets import PRESETS

GPU_SHAPES = (
    *(f"32/8x128:{1 << n}" for n in range(12, 18)), "16/4x256:131072", "9/3x64:131072",
    "8x32/8x128:32768", "32/8x128:2048x32768",
)  # fmt: skip
CPU_SHAPES = ("32/8x128:1024", "32/8x128:4096", "16/4x256:1024", "9/3x64:1024", "32/8x128:256x1024")
CHOSEN = ("centred-4bit", "centred-2bit", "vecinfer-2bit",
          *(p for p in PRESETS if p.startswith("trellis")))  # fmt: skip
PREFILL_TOGETHER = 2  # calls in one eval: they are long, and some need gigabytes


def others(
    case: Case, args: argparse.Namespace, together: int
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """The ways that do not depend on the preset; microseconds of those that must be measured apart;
    why one is not there."""
    calls: dict[str, Call] = {"mlx": case.dense}
    alone: dict[str, float] = {}
    try:
        if on_gpu() and str(case.shape) not in OVER_MLX_LM:
            return calls, alone, {}  # a process each: only where there is a target
        if on_gpu():
            us = attention_alone.measured(str(case.shape), args.dtype, args.rounds, together)
            alone["mlx_lm_4bit"] = us
        else:
            calls["mlx_lm_4bit"] = case.mlx_lm_4bit()
            mx.eval(calls["mlx_lm_4bit"]())
    except LACKING as error:
        calls.pop("mlx_lm_4bit", None)
        return calls, alone, {"mlx-lm 4 bit": reason(error)}
    return calls, alone, {}


def measure_shape(shape: Shape, args: argparse.Namespace, machine: dict[str, Any]) -> list[Row]:
    """A row per preset."""
    case = Case(shape, getattr(mx, args.dtype))
    together = args.together if shape.queries == 1 else min(args.together, PREFILL_TOGETHER)
    calls, alone, missing = others(case, args, together)
    ready, floors = [], {}
    for preset in args.presets:
        try:
            cache, handles = case.cache(preset)
        except LACKING as error:
            missing[preset] = reason(error)
            continue
        call = case.ours(handles)
        if why := lacks(call):
            missing[preset] = why
            continue
        calls[preset] = call
        ready.append(preset)
        moved = least_bytes(case, cache, handles)
        floors[preset] = (moved, 1e6 * moved / machine["bandwidth"])
        if shape.queries > 1:
            decoded = case.decoded(cache, handles)
            if why := lacks(decoded):
                missing[f"{preset} decoded"] = why
            else:
                calls[f"{preset} decoded"] = decoded
    ms = milliseconds(*calls.values(), rounds=args.rounds, together=together)
    us = alone | {name: 1e3 * t for name, t in zip(calls, ms, strict=True)}
    computing = 1e6 * shape.operations / machine["operations"]
    rows = []
    for preset in ready:
        moved, moving = floors[preset]
        rows.append(
            {
                "case": str(shape),
                "family": shape.family,
                "tokens": shape.tokens,
                "queries": shape.queries,
                "preset": preset,
                "ours_us": us[preset],
                "mlx_us": us["mlx"],
                "mlx_lm_4bit_us": us.get("mlx_lm_4bit"),
                "decoded_us": us.get(f"{preset} decoded"),
                "floor_us": max(moving, computing),
                "bound_by": "memory" if moving >= computing else "products",
                "share": max(moving, computing) / us[preset],
                "bytes": moved,
                "fewer_bytes": (case.k.nbytes + case.v.nbytes + 2 * case.q.nbytes) / moved,
                "not_there": missing,
            }
        )
    return rows


def measure(args: argparse.Namespace, console: Console) -> Results:
    machine = {
        "bandwidth": copy_bandwidth(),
        "operations": matmul_rate(getattr(mx, args.dtype)),
        "dtype": args.dtype,
        "together": args.together,
    }
    rows = []
    for shape in args.shapes:
        with console.status(str(shape)), released():
            rows += measure_shape(shape, args, machine)
    return {**machine, "where": where(), "rows": rows}


def where() -> str:
    details = [] if on_gpu() else [info()["cpu_isa"], blas()]
    return ", ".join([info()["executor"], *details])


def _number(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def _against(us: float | None, ours: float) -> str:
    return "not there" if us is None else f"{_number(us)} ({us / ours:.2f}x)"


def show(console: Console, results: Results) -> None:
    console.print(
        f"{results['where']}; {results['dtype']}; microseconds, {results['together']} calls in one "
        f"eval ({PREFILL_TOGETHER} at most for several queries); copy "
        f"{results['bandwidth'] / 1e9:,.0f} GB/s, matrix product "
        f"{results['operations'] / 1e12:.2f} TFLOP/s",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("shape", no_wrap=True)
    table.add_column("preset", no_wrap=True)
    for column in ("ours", "mx.fast", "mlx-lm 4 bit", "decode, mx.fast", "floor", "of it", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for case, rows in groupby(results["rows"], lambda row: row["case"]):
        for i, row in enumerate(rows):
            ours = row["ours_us"]
            table.add_row(
                case if i == 0 else "",
                row["preset"],
                _number(ours),
                _against(row["mlx_us"], ours),
                _against(row["mlx_lm_4bit_us"], ours),
                "" if row["queries"] == 1 else _against(row["decoded_us"], ours),
                _number(row["floor_us"]) + (" *" if row["bound_by"] == "products" else ""),
                f"{100 * row['share']:.0f} %",
                f"1/{row['fewer_bytes']:.1f}",
            )
        table.add_section()
    console.print(table)
    if any(row["bound_by"] == "products" for row in results["rows"]):
        console.print("* of the matrix products; the other floors are of memory")
    say_lacking(console, results["rows"])


def curves(rows: list[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By family and preset the speed over mx.fast against the context, of one query token and
    families with several contexts."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if row["queries"] == 1:
            line = found.setdefault(row["family"], {}).setdefault(row["preset"], [])
            line.append((row["tokens"], row["mlx_us"] / row["ours_us"]))
    return {
        family: {preset: sorted(line) for preset, line in lines.items()}
        for family, lines in found.items()
        if max(map(len, lines.values())) > 1
    }


def drawing(results: Results) -> Callable[[Any], None]:
    panels = curves(results["rows"])

    def draw(figure: Any) -> None:
        grid = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
        for axes, (family, lines) in zip(grid, panels.items(), strict=False):
            for i, (preset, line) in enumerate(lines.items()):
                axes.plot(*zip(*line, strict=True), label=preset, color=COLORS[i % len(COLORS)],
                          marker=MARKERS[i % len(MARKERS)])  # fmt: skip
            axes.axhline(1, color="#444444", linewidth=1)
            axes.set_xscale("log", base=2)
            ticks = sorted({tokens for line in lines.values() for tokens, _ in line})
            axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
            axes.set_ylim(bottom=0)
            axes.set_title(f"{family}, one query token")
            axes.set_xlabel("context (tokens)")
            axes.set_ylabel(f"times as fast as mx.fast ({results['dtype']})")
            axes.grid(alpha=0.3)
            axes.legend()

    return draw


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = on_gpu()
    shapes = GPU_SHAPES if gpu else CPU_SHAPES
    parser.add_argument(
        "--shapes", nargs="+", default=shapes, metavar="SHAPE",
        help=f"[BATCHx]HEADS/KV_HEADSxHEAD_DIM:[QUERIESx]TOKENS (default: {' '.join(shapes)})",
    )  # fmt: skip
    parser.add_argument(
        "--presets", nargs="+", default=CHOSEN, metavar="PRESET",
        choices=(*PRESETS, *vecinfer.PRESETS), help=f"default: {' '.join(CHOSEN)}",
    )  # fmt: skip
    dtypes = ("float32", "float16", "bfloat16")
    parser.add_argument("--dtype", default="float16" if gpu else "float32", choices=dtypes)
    parser.add_argument("--rounds", type=int, default=7 if gpu else 3)
    parser.add_argument("--together", type=int, default=20 if gpu else 1, help="calls per eval")
    add_options(parser)
    args = parser.parse_args(argv)
    check_options(parser, args)
    try:
        args.shapes = [Shape.parse(text) for text in args.shapes]
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> None:
    args, console = parse(argv), make_console()
    results = obtain(args, lambda: measure(args, console))
    show(console, results)
    panels = len(curves(results["rows"]))
    if args.plot is not None and not panels:
        console.print("no picture: it needs a shape at several contexts")
        args.plot = None
    finish(console, args, targets(results["rows"]), drawing(results), (6.5 * max(1, panels), 4.2))


if __name__ == "__main__":
    main()
