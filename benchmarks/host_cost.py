"""What a call of an op costs the host: a primitive against the same kernel from a source string.

MLX compiles kernels from strings (`mx.fast.metal_kernel`, `mx.fast.cuda_kernel`); a Python package
that uses them checks its inputs, works out shapes and template arguments, and hands over the
string's kernel at every call. Both ways do the same job on shapes so small that the device has
nothing to do. Of a number of independent calls is measured, per call: building the graph, queueing
it (`mx.async_eval` returns), and waiting for the results afterwards.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from report import (
    COLORS,
    LACKING,
    Results,
    Row,
    Target,
    add_options,
    check_options,
    finish,
    make_console,
    obtain,
    on_gpu,
    reason,
    say_lacking,
)
from rich.console import Console
from rich.table import Table

from vqkv_ext import ops

PHASES = ("build_us", "queue_us", "wait_us")
# The index of a thread, in the language of each backend; the rest of a kernel is common to both.
THREAD = {
    "metal": "uint i = thread_position_in_grid.x;",
    "cuda": "unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;",
}
PACK = """
    if (i >= ROWS * BYTES) return;
    const int row = i / BYTES, at = i % BYTES;
    const int per_byte = 8 / BITS;
    unsigned int byte = 0;
    for (int t = 0; t < per_byte; t++) {
      const int entry = at * per_byte + t;
      if (entry < N)
        byte |= (indices[row * N + entry] & ((1u << BITS) - 1u)) << (BITS * t);
    }
    packed[i] = byte;
"""
NEAREST = """
    if (i >= VECTORS) return;
    float best = 3.4e38f;
    int code = 0;
    for (int k = 0; k < K; k++) {
      float d = 0.0f;
      for (int j = 0; j < D; j++) {
        const float t = x[i * D + j] - codebook[k * D + j];
        d += t * t;
      }
      if (d < best) {
        best = d;
        code = k;
      }
    }
    codes[i] = code;
"""


@dataclass(frozen=True)
class Pair:
    """The same result by a primitive and by a kernel from a string."""

    name: str
    ours: Callable[[], mx.array]
    string: Callable[[], mx.array]


def maker(backend: str) -> Callable[..., Any]:
    return mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel


def threads(n: int) -> dict[str, tuple[int, int, int]]:
    return {"grid": (n, 1, 1), "threadgroup": (min(n, 256), 1, 1)}


def pack_bits(backend: str) -> Pair:
    kernel = maker(backend)(
        name="pack_bits_string",
        input_names=["indices"],
        output_names=["packed"],
        source=THREAD[backend] + PACK,
    )

    def string(indices: mx.array, bits: int) -> mx.array:
        if indices.dtype != mx.uint8:
            raise ValueError(f"[pack_bits] indices must be uint8, but got {indices.dtype}.")
        if bits not in (1, 2, 4):
            raise ValueError(f"[pack_bits] bits must be 1, 2 or 4, but got {bits}.")
        *rows, n = indices.shape
        size = (n * bits + 7) // 8
        count = indices.size // n
        (packed,) = kernel(
            inputs=[indices],
            template=[("BITS", bits), ("N", n), ("BYTES", size), ("ROWS", count)],
            output_shapes=[(*rows, size)],
            output_dtypes=[mx.uint8],
            **threads(count * size),
        )
        return packed

    a = mx.random.randint(0, 16, (8, 64)).astype(mx.uint8)
    mx.eval(a)
    return Pair("pack_bits, 8 x 64, 4 bits", lambda: ops.pack_bits(a, 4), lambda: string(a, 4))


def quantize_vq(backend: str) -> Pair:
    kernel = maker(backend)(
        name="quantize_vq_string",
        input_names=["x", "codebook"],
        output_names=["codes"],
        source=THREAD[backend] + NEAREST,
    )

    def string(x: mx.array, codebook: mx.array) -> mx.array:
        if x.dtype != mx.float32 or codebook.dtype != mx.float32:
            raise ValueError(f"[quantize_vq] x must be float32, but got {x.dtype}.")
        rows, dims = codebook.shape
        *lead, width = x.shape
        if width % dims or rows > 256:
            raise ValueError(
                f"[quantize_vq] x must hold whole vectors of {dims}, but got {x.shape}."
            )
        vectors = x.size // dims
        (codes,) = kernel(
            inputs=[x, codebook],
            template=[("D", dims), ("K", rows), ("VECTORS", vectors)],
            output_shapes=[(*lead, width // dims)],
            output_dtypes=[mx.uint8],
            **threads(vectors),
        )
        return codes

    x, book = mx.random.normal((8, 64)), mx.random.normal((16, 4))
    mx.eval(x, book)
    return Pair(
        "quantize_vq, 8 x 64, 16 x 4", lambda: ops.quantize_vq(x, book), lambda: string(x, book)
    )


OPS = {"pack_bits": pack_bits, "quantize_vq": quantize_vq}


def kernels_from_strings() -> str | None:
    """The backend that compiles them on the default device."""
    if not on_gpu():
        return None
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else None


def phases(call: Callable[[], mx.array], count: int) -> list[float]:
    """Microseconds per call of building, queueing and waiting."""
    mx.synchronize()
    marks = [time.perf_counter()]
    made = [call() for _ in range(count)]
    marks.append(time.perf_counter())
    mx.async_eval(*made)
    marks.append(time.perf_counter())
    mx.eval(*made)
    mx.synchronize()
    marks.append(time.perf_counter())
    return [1e6 * (b - a) / count for a, b in zip(marks, marks[1:], strict=False)]


def compare(
    ways: dict[str, Callable[[], mx.array]], count: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians of each way's phases, the ways in turns."""
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for call in ways.values():
        phases(call, count)
    for _ in range(rounds):
        for name, call in ways.items():
            found[name].append(phases(call, count))
    return {
        name: dict(zip(PHASES, map(statistics.median, zip(*times, strict=True)), strict=True))
        for name, times in found.items()
    }


def measure(args: argparse.Namespace) -> Results:
    backend, rows = kernels_from_strings(), []
    for name, make in OPS.items() if backend else ():
        row: Row = {"case": name, "not_there": {}}
        rows.append(row)
        try:
            pair = make(backend)
            row["case"] = pair.name
            row["equal"] = mx.array_equal(pair.ours(), pair.string()).item()
            row["ways"] = compare(
                {"primitive": pair.ours, "string": pair.string}, args.calls, args.rounds
            )
        except LACKING as error:
            row["not_there"]["kernel from a string"] = reason(error)
    return {"backend": backend, "calls": args.calls, "rounds": args.rounds, "rows": rows}


def host(times: dict[str, float]) -> float:
    """From Python to queued."""
    return times["build_us"] + times["queue_us"]


def targets(rows: list[Row]) -> list[Target]:
    """A kernel from a string costs the host at least twice as much."""
    return [
        Target(f"{row['case']}, host cost of a string's kernel over the primitive's",
               host(row["ways"]["string"]) / host(row["ways"]["primitive"]), 2.0)
        for row in rows
        if "ways" in row
    ]  # fmt: skip


def show(console: Console, results: Results) -> None:
    table = Table(
        title=f"{results['backend']}; microseconds per call, {results['calls']} independent calls, "
        f"medians of {results['rounds']}"
    )
    table.add_column("op", no_wrap=True)
    table.add_column("way", no_wrap=True)
    for column in ("build", "queue", "host in all", "wait", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in results["rows"]:
        for i, (way, times) in enumerate(row.get("ways", {}).items()):
            build, queue, wait = (f"{times[phase]:.2f}" for phase in PHASES)
            equal = "" if i == 0 else "yes" if row["equal"] else "NO"
            table.add_row(
                row["case"] if i == 0 else "", way, build, queue, f"{host(times):.2f}", wait, equal
            )
        table.add_section()
    console.print(table)
    say_lacking(console, results["rows"])


def drawing(results: Results) -> Callable[[Any], None]:
    """A bar per op and way, of building and queueing."""
    bars = [
        (f"{row['case']}\n{way}", times)
        for row in reversed(results["rows"])
        for way, times in reversed(list(row.get("ways", {}).items()))
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        left = [0.0] * len(bars)
        for phase, label, color in zip(PHASES, ("build", "queue"), COLORS, strict=False):
            width = [times[phase] for _, times in bars]
            axes.barh(range(len(bars)), width, left=left, label=label, color=color)
            left = [a + b for a, b in zip(left, width, strict=True)]
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.set_xlabel(f"microseconds of the host per call ({results['backend']})")
        axes.grid(alpha=0.3, axis="x")
        axes.legend()

    return draw


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=21)
    add_options(parser)
    args = parser.parse_args(argv)
    check_options(parser, args)
    if args.calls < 1 or args.rounds < 1:
        parser.error("--calls and --rounds must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    args, console = parse(argv), make_console()
    results = obtain(args, lambda: measure(args))
    if results["backend"] is None:
        console.print(
            f"kernels from strings: not there: MLX compiles them on GPUs only, and this is "
            f"{results['info']['device']}"
        )
        return
    show(console, results)
    finish(console, args, targets(results["rows"]), drawing(results), (8, 3.5))


if __name__ == "__main__":
    main()
