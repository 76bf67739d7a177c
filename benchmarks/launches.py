"""How many operations one decoded token costs per layer: KVCache + mx.fast against our cache.

Counted on the graphs that MLX is about to run: every node that computes or moves data is a launch,
and an attention two (partial results and their merge, for one query and a long cache). Views count
nothing, nor does `Contiguous`, which shares the buffer of an array that is. Averaged over a whole
number of blocks, so that coding them is in it.
"""

from __future__ import annotations

import argparse
import io
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as stock
from report import make_console
from rich.table import Table

from vqkv_ext import ops
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs.presets import PRESETS, codec

VIEWS = {"Reshape", "ExpandDims", "Squeeze", "Flatten", "Unflatten", "Transpose", "Broadcast",
         "Slice", "View", "Split", "AsStrided", "Contiguous"}  # fmt: skip
ATTENTION = 2

HEADS, KV_HEADS, WIDTH = 32, 8, 128


def operations(outputs: list[mx.array]) -> Counter[str]:
    """Nodes of the graph of ``outputs`` by name."""
    out = io.StringIO()
    mx.export_to_dot(out, *outputs)
    return Counter(re.findall(r'label ?= ?"(\w+)"[^\]]*shape ?= ?rectangle', out.getvalue()))


def per_token(cache: Any, attend: Callable | None, start: int, tokens: int) -> Counter[str]:
    """Operations of ``tokens`` decode steps on a cache of ``start`` tokens; without ``attend``,
    attention is one node by itself."""
    total: Counter[str] = Counter()
    k = mx.random.normal((1, KV_HEADS, start, WIDTH))
    cache.update_and_fetch(k, k)
    mx.eval(cache.state)
    for _ in range(tokens):
        q = mx.random.normal((1, HEADS, 1, WIDTH))
        k, v = (mx.random.normal((1, KV_HEADS, 1, WIDTH)) for _ in "kv")
        mx.eval(q, k, v)
        read = cache.update_and_fetch(k, v)
        outputs = list(read) if attend is None else [attend(q, *read), *cache._arrays()]
        total += operations(outputs)
        total["Attention"] += attend is None
        mx.eval(outputs)
    return total


def launches(counts: Counter[str]) -> int:
    return sum(n * (ATTENTION if op == "Attention" else 1) for op, n in counts.items()
               if op not in VIEWS)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["none", "centred-4bit", "turboquant-2bit"])
    parser.add_argument("--tokens", type=int, default=256, help="decoded, whole blocks")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--details", action="store_true", help="which operations")
    args = parser.parse_args()
    if unknown := set(args.presets) - set(PRESETS):
        parser.error(f"--presets must be among {', '.join(PRESETS)}, but got {unknown}")

    ours = lambda q, k, v: ops.attention(q, k.packed, v.packed, scale=WIDTH**-0.5)  # noqa: E731
    found = {"KVCache + mx.fast": per_token(stock.KVCache(), None, args.context, args.tokens)}
    for preset in args.presets:
        pair = codec(preset, WIDTH, "key"), codec(preset, WIDTH, "value")
        found[preset] = per_token(CompressedKVCache(*pair), ours, args.context, args.tokens)
    base = launches(found["KVCache + mx.fast"])
    table = Table(title=f"launches per layer and token, mean of {args.tokens}")
    table.add_column("cache")
    table.add_column("launches", justify="right")
    table.add_column("more", justify="right")
    for name, counts in found.items():
        n = launches(counts)
        table.add_row(name, f"{n / args.tokens:.2f}", f"{(n - base) / args.tokens:+.2f}")
    console = make_console()
    console.print(table)
    if args.details:
        for name, counts in found.items():
            console.print(name, dict(counts))


if __name__ == "__main__":
    main()
