"""``vqkv bench``."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..codecs.presets import DEFAULT, PRESETS
from ..info import info
from .common import Defaults, at_least, require

if TYPE_CHECKING:
    import mlx.core as mx

_CHUNK = 2048  # tokens coded at once when a cache is filled


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="speed of attention over compressed caches on this machine",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "--kv",
        nargs="+",
        metavar="PRESET",
        choices=PRESETS,
        default=[DEFAULT, "centred-2bit"],
        help="presets that need no calibration",
    )
    sizes = {"tokens": [1024, 4096, 16384], "queries": 1, "heads": 32, "kv-heads": 8}
    notes = {"tokens": "in the cache, once for each number", "queries": "tokens that ask at once"}
    for name, default in sizes.items():
        parser.add_argument(
            f"--{name}",
            type=at_least(1),
            nargs="+" if isinstance(default, list) else None,
            default=default,
            metavar="N",
            help=notes.get(name, "of the model"),
        )
    parser.add_argument("--head-dim", type=at_least(1), default=128, metavar="N", help="of both")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    parser.add_argument("--rounds", type=at_least(1), default=7, metavar="N", help="median of")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.heads % args.kv_heads:
        raise ValueError(
            f"--heads must be a multiple of --kv-heads {args.kv_heads}, but got {args.heads}"
        )
    if args.queries > min(args.tokens):
        raise ValueError(
            f"--queries must be at most --tokens {min(args.tokens)}, but got {args.queries}"
        )
    require("rich")
    from rich.console import Console
    from rich.progress import Progress

    rows = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=len(args.tokens))
        for tokens in args.tokens:
            bars.update(task, description=f"{tokens} tokens")
            rows += _measure(args, tokens)
            bars.advance(task)
    if args.json:
        print(json.dumps({"info": info(), **_shape(args), "rows": rows}))
    else:
        _show(args, rows)


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    names = ("queries", "heads", "kv_heads", "head_dim", "dtype", "rounds")
    return {name: getattr(args, name) for name in names}


def _measure(args: argparse.Namespace, tokens: int) -> list[dict[str, Any]]:
    """Milliseconds of MLX's attention over dense keys and values and of ours, in turns."""
    import mlx.core as mx

    from .. import ops
    from ..cache import CompressedKVCache
    from ..codecs.presets import codec

    mx.random.seed(0)
    width, scale, mask = args.head_dim, args.head_dim**-0.5, "causal" if args.queries > 1 else None

    def normal(heads: int, n: int) -> mx.array:
        return mx.random.normal((1, heads, n, width)).astype(getattr(mx, args.dtype))

    keys, values = normal(args.kv_heads, tokens), normal(args.kv_heads, tokens)
    queries = normal(args.heads, args.queries)
    mx.eval(keys, values, queries)

    def dense() -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    calls, held = [dense], []
    for preset in args.kv:
        cache = CompressedKVCache(codec(preset, width, "key"), codec(preset, width, "value"))
        last = tokens - args.queries
        for at in [*range(0, last, _CHUNK), last]:  # the last chunk is that of the queries
            end = tokens if at == last else min(at + _CHUNK, last)
            handles = cache.update_and_fetch(keys[:, :, at:end], values[:, :, at:end])
            mx.eval(cache.state)
        held.append(cache.nbytes)
        packed = tuple(h.packed for h in handles)
        calls.append(lambda p=packed: ops.attention(queries, p[0], p[1], scale=scale, mask=mask))
    plain, *ours = _milliseconds(calls, args.rounds)
    return [
        {
            "tokens": tokens,
            "preset": preset,
            "mlx_ms": plain,
            "vqkv_ms": t,
            "speedup": plain / t,
            "mlx_bytes": keys.nbytes + values.nbytes,
            "vqkv_bytes": nbytes,
        }
        for preset, t, nbytes in zip(args.kv, ours, held, strict=True)
    ]


def _milliseconds(calls: list[Callable[[], mx.array]], rounds: int) -> list[float]:
    """Medians; the calls take turns, so that all meet the same machine. On a GPU several are
    evaluated at once, as the layers of a model are."""
    import mlx.core as mx

    together = 20 if mx.default_device().type == mx.DeviceType.gpu else 1
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, taken in zip(calls, times, strict=True):
            began = time.perf_counter()
            mx.eval([call() for _ in range(together)])
            if i:  # the first round warms up
                taken.append(1e3 * (time.perf_counter() - began) / together)
    return [statistics.median(t) for t in times]


def _show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    facts = info()
    queries = "1 query" if args.queries == 1 else f"{args.queries} queries"
    table = Table(
        title=f"{queries}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}, on "
        f"{facts['executor']}",
        caption="milliseconds of one layer's attention, against "
        "mx.fast.scaled_dot_product_attention; bytes: of the cache, windows included",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tokens", justify="right")
    table.add_column("preset", no_wrap=True)
    for column in ("MLX", "vqkv", "times faster", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            row["preset"],
            f"{row['mlx_ms']:.3f}",
            f"{row['vqkv_ms']:.3f}",
            f"{row['speedup']:.2f}",
            f"1/{row['mlx_bytes'] / row['vqkv_bytes']:.1f}",
        )
    Console().print(table)
