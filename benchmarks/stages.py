"""Progress of long benchmarks on the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def stage(console: Console, what: str) -> Iterator[Progress]:
    """Bars for one part of a run, and a line with its time once it is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    began = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield bars
    console.print(f"[dim]{what}: {time.perf_counter() - began:.1f} s[/dim]")
