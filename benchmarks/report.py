"""What benchmarks share around their numbers: options, JSON, targets, pictures, what is not there.

A benchmark measures a plain dict, ``{"info": ..., "rows": [...]}``, and everything shown is made
from that: numbers taken on one machine can be drawn on another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console

from vqkv_ext import info

Results = dict[str, Any]
Row = dict[str, Any]

# Okabe-Ito: told apart with every kind of colour vision
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
MARKERS = "osD^vPX"
# What MLX raises where a backend lacks an operation, a kernel or the memory.
LACKING = (RuntimeError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Target:
    """A number that must be reached; None was not measured."""

    what: str
    found: float | None
    least: float
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        return None if self.found is None else self.found >= self.least

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.what}: not measured"
        verdict = "met" if self.met else "MISSED"
        found, least = (
            f"{x:.{0 if x >= 100 else 2}f}{self.unit}" for x in (self.found, self.least)
        )
        return f"{self.what}: {found}, target {least}: {verdict}"


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def make_console() -> Console:
    """As wide as the terminal; wide enough for every table where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def reason(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def lacks(call: Callable[[], Any]) -> str | None:
    """Why a call cannot run here, found by running it; None if it can."""
    try:
        mx.eval(call())
    except LACKING as error:
        return reason(error)
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", action="store_true", help="say which targets are met")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (matplotlib)")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", metavar="FILE", help="show these, measure nothing"
    )


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse before anything is measured what would fail after it."""
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name} must be in an existing folder, but got {path}")
    for path in args.from_json or ():
        if not path.is_file():
            parser.error(f"--from-json must name files, but got {path}")


def obtain(args: argparse.Namespace, measure: Callable[[], Results]) -> Results:
    """The results: read from files, whose rows are joined, or measured and written."""
    if args.from_json:
        read = [json.loads(path.read_text(encoding="utf-8")) for path in args.from_json]
        return {**read[0], "rows": [row for r in read for row in r["rows"]]}
    results = {"info": info(), **measure()}
    if args.json is not None:
        text = json.dumps(results, indent=1, allow_nan=False)
        args.json.write_text(text + "\n", encoding="utf-8")
    return results


def finish(
    console: Console, args: argparse.Namespace, targets: Sequence[Target],
    draw: Callable[[Any], None], size: tuple[float, float],
) -> None:  # fmt: skip
    """Targets and picture, where asked for. ``draw`` gets a matplotlib figure, ``size`` inches."""
    if args.targets:
        for target in targets:
            if target.found is not None:
                console.print(str(target), soft_wrap=True, highlight=False, markup=False)
        if missing := sum(target.found is None for target in targets):
            console.print(f"targets not measured: {missing}")
    if args.plot is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        console.print("no picture: matplotlib is not there; draw it elsewhere with --from-json")
        return
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    draw(figure)
    figure.savefig(args.plot)
    console.print(f"wrote {args.plot}", soft_wrap=True)


def say_lacking(console: Console, rows: Sequence[Row]) -> None:
    """A line for each thing that is not there, with the cases that lack it."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for what, why in row["not_there"].items():
            cases = found.setdefault((what, why), [])
            if row["case"] not in cases:
                cases.append(row["case"])
    for (what, why), cases in found.items():
        line = f"{what} at {', '.join(cases)}: not there: {why}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def released() -> Iterator[None]:
    """Afterwards MLX keeps no memory for later use."""
    yield
    mx.clear_cache()
