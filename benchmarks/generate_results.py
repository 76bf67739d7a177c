"""Tables, targets and the picture of generate.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from report import COLORS, MARKERS, Results, Row, Target, say_lacking
from rich.console import Console
from rich.table import Table

PLAIN = "uncompressed"
JUDGED = "centred-4bit"


def targets(rows: Sequence[Row]) -> list[Target]:
    """Speed of the default preset over the uncompressed cache: 0.95 below 4096 tokens, then 1."""
    return [
        Target(f"{r['case']}, {JUDGED}, speed over {PLAIN}", r.get("ratio"),
               0.95 if r["context"] < 4096 else 1.0)
        for r in rows
        if r.get("cache") == JUDGED
    ]  # fmt: skip


def show(console: Console, results: Results) -> None:
    table = Table(
        title=f"{results['where']}; {results['tokens']} tokens a run, medians of "
        f"{results['rounds']} pairs"
    )
    table.add_column("model, context", no_wrap=True)
    table.add_column("cache", no_wrap=True)
    for column in ("tokens/s", "of its pair", "cache MB", "peak MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for case, rows in groupby(results["rows"], lambda row: row["case"]):
        for i, row in enumerate(rows):
            numbers = ["not there"]
            if "tokens_per_second" in row:
                numbers = [
                    f"{row['tokens_per_second']:.1f}",
                    f"{row['ratio']:.3f}x",
                    f"{row['cache_bytes'] / 1e6:,.1f}",
                    f"{row['peak_bytes'] / 1e6:,.1f}",
                ]
            name = row.get("cache", "")
            if name == PLAIN:
                name = f"{PLAIN}, {row['dtype']}"
            elif name.startswith("kv_bits"):
                name = f"mlx-lm {name}"
            table.add_row(case if i == 0 else "", name, *numbers)
        table.add_section()
    console.print(table)
    say_lacking(console, results["rows"])


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """By model and cache the rows of single sequences, in order of context."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if "tokens_per_second" in row and row["batch"] == 1:
            found.setdefault(row["model"], {}).setdefault(row["cache"], []).append(row)
    return {
        model: {cache: sorted(line, key=lambda r: r["context"]) for cache, line in lines.items()}
        for model, lines in found.items()
    }


def drawing(results: Results) -> Callable[[Any], None]:
    """Tokens per second above, peak memory below, a column per model."""
    models = panels(results["rows"])

    def draw(figure: Any) -> None:
        grid = figure.subplots(2, max(1, len(models)), squeeze=False)
        for column, (model, lines) in enumerate(models.items()):
            for axes, key, unit in (
                (grid[0, column], "tokens_per_second", 1.0),
                (grid[1, column], "peak_bytes", 1e9),
            ):
                for i, (cache, line) in enumerate(lines.items()):
                    axes.plot([r["context"] for r in line], [r[key] / unit for r in line],
                              label=cache, color=COLORS[(i - 1) % len(COLORS)],
                              marker=MARKERS[i % len(MARKERS)])  # fmt: skip
                ticks = sorted({r["context"] for line in lines.values() for r in line})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
                axes.set_ylim(bottom=0)
                axes.grid(alpha=0.3)
            grid[0, column].set_title(model)
            grid[1, column].set_xlabel("context (tokens)")
        grid[0, 0].set_ylabel("tokens per second")
        grid[1, 0].set_ylabel("peak memory (GB)")
        grid[0, 0].legend()

    return draw
