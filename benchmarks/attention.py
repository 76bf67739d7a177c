"""Attention over compressed caches against the best that MLX and mlx-lm offer, decode and prefill.

Every column of a row is measured in one run, in turns. Decode: one query token, against
`mx.fast.scaled_dot_product_attention` on dense keys and values, and mlx-lm's own 4-bit cache.
Prefill: a chunk of query tokens, against dense attention, and against decoding the codes and dense
attention (what a cache without a kernel of its own has to do).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache
from rich import box
from rich.console import Console
from rich.table import Table
from timing import blas, copy_bandwidth, milliseconds

from vqkv_ext import info, ops
from vqkv_ext.cache import CompressedArray, CompressedKVCache
from vqkv_ext.codecs import vecinfer
from vqkv_ext.codecs.presets import codec

Handles = tuple[CompressedArray, CompressedArray]
Call = Callable[[], mx.array]


class Case:
    """Random queries, keys and values, and caches that hold them."""

    def __init__(self, args: argparse.Namespace, tokens: int, queries: int):
        mx.random.seed(0)
        self.args, self.tokens, self.queries = args, tokens, queries
        self.scale = args.head_dim**-0.5
        self.mask = "causal" if queries > 1 else None
        self.k, self.v = (self._normal(args.kv_heads, tokens) for _ in "kv")
        self.q = self._normal(args.heads, queries)
        mx.eval(self.k, self.v, self.q)

    def _normal(self, heads: int, tokens: int) -> mx.array:
        x = mx.random.normal((self.args.batch, heads, tokens, self.args.head_dim))
        return x.astype(getattr(mx, self.args.dtype))

    def cache(self, preset: str) -> tuple[CompressedKVCache, Handles]:
        """A cache of a preset with all tokens, and what attention reads."""
        width = self.args.head_dim
        if preset in vecinfer.PRESETS:
            some = (x[0, :, :1000] for x in (self.k, self.v))
            pair = vecinfer.fit(vecinfer.PRESETS[preset], *some, iterations=1)
        else:
            pair = codec(preset, width, "key"), codec(preset, width, "value")
        cache = CompressedKVCache(*pair)
        first = self.tokens - self.queries
        for at in range(0, first, 2048):
            cache.update_and_fetch(*(x[:, :, at : min(at + 2048, first)] for x in (self.k, self.v)))
            mx.eval(cache.state)
        handles = cache.update_and_fetch(*(x[:, :, first:] for x in (self.k, self.v)))
        mx.eval(cache.state)
        return cache, handles

    def ours(self, handles: Handles) -> Call:
        k, v = (h.packed for h in handles)
        return lambda: ops.attention(self.q, k, v, scale=self.scale, mask=self.mask)

    def dense(self, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(self.q, k, v, scale=self.scale, mask=self.mask)

    def decoded(self, cache: CompressedKVCache, handles: Handles) -> Call:
        """Decodes all codes, then attends to dense arrays."""

        def one(i: int) -> mx.array:
            whole = (self.k, self.v)[i]
            layout, side = handles[i].packed.layout, (cache.key_codec, cache.value_codec)[i]
            end = layout.sink_tokens + cache.coded_tokens
            x = side.decode(cache._bodies[i])[:, :, : cache.coded_tokens].astype(whole.dtype)
            return mx.concatenate([whole[:, :, : layout.sink_tokens], x, whole[:, :, end:]], 2)

        return lambda: self.dense(one(0), one(1))

    def mlx_lm_4bit(self) -> Call:
        cache = QuantizedKVCache(group_size=64, bits=4)
        quantized = cache.update_and_fetch(self.k, self.v)
        mx.eval(quantized)
        return lambda: quantized_scaled_dot_product_attention(
            self.q, *quantized, scale=self.scale, mask=self.mask, group_size=64, bits=4
        )


def held(handles: Handles) -> int:
    """Bytes that attention reads, without tables."""
    return sum(
        h.packed.tail.nbytes + sum(a.nbytes for a in h.packed.body.arrays()) for h in handles
    )


def decode(args: argparse.Namespace, tokens: int, table: Table) -> None:
    case = Case(args, tokens, 1)
    handles = {p: case.cache(p)[1] for p in args.presets}
    calls = [lambda: case.dense(case.k, case.v), case.mlx_lm_4bit()]
    calls += [case.ours(h) for h in handles.values()]
    dense, quantized, *ours = milliseconds(*calls, rounds=args.rounds, together=args.together)
    for i, (preset, t) in enumerate(zip(handles, ours, strict=True)):
        table.add_row(
            *((f"{tokens}", f"{dense:.3f}", f"{quantized:.3f}") if i == 0 else ("", "", "")),
            preset,
            f"{t:.3f}",
            f"{dense / t:.2f}x",
            f"{quantized / t:.1f}x",
            f"{100 * held(handles[preset]) / args.bandwidth / (1e-3 * t):.0f} %",
            f"{(case.k.nbytes + case.v.nbytes) / held(handles[preset]):.1f}x",
        )
    table.add_section()


def prefill(args: argparse.Namespace, tokens: int, table: Table) -> None:
    case = Case(args, tokens, args.queries)
    for i, preset in enumerate(args.presets):
        cache, handles = case.cache(preset)
        calls = (
            lambda: case.dense(case.k, case.v),
            case.decoded(cache, handles),
            case.ours(handles),
        )
        dense, decoded, ours = milliseconds(*calls, rounds=min(args.rounds, 3))
        table.add_row(
            f"{args.queries} x {tokens}" if i == 0 else "",
            preset,
            *(f"{t:.1f}" for t in (dense, decoded, ours)),
            f"{dense / ours:.1f}x",
            f"{decoded / ours:.1f}x",
        )


def peak(args: argparse.Namespace, preset: str) -> None:
    """Prints by how many bytes one prefill call raises the peak of this process."""
    case = Case(args, args.memory_tokens, args.queries)
    call = case.ours(case.cache(preset)[1])
    case.k = case.v = None
    mx.clear_cache()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reach = mx.zeros((before << 10) - mx.get_active_memory(), mx.uint8)  # up to the peak so far
    mx.eval(reach)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mx.eval(call())
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)


def extra_memory(args: argparse.Namespace, preset: str) -> int:
    """Bytes one prefill call needs beside its inputs, measured in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--peak", preset]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    presets = ["centred-4bit", "centred-2bit", "vecinfer-2bit"]
    parser.add_argument("--presets", nargs="+", default=presets)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--queries", type=int, default=512, help="of a prefill chunk")
    parser.add_argument("--prefill-tokens", type=int, nargs="*", default=[4096])
    parser.add_argument("--memory-tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    gpu = mx.default_device().type == mx.DeviceType.gpu
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--together", type=int, default=20 if gpu else 1, help="calls per eval")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        peak(args, args.peak)
        return

    args.bandwidth = copy_bandwidth()
    shape = (
        f"batch {args.batch}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.dtype}"
    )
    console = Console()
    where = info()["executor"] if gpu else f"{info()['executor']}, {info()['cpu_isa']}, {blas()}"
    console.print(
        f"{shape}; {where}; milliseconds, {args.together} calls in one eval; floor: the cache's "
        f"bytes at the {args.bandwidth / 1e9:.0f} GB/s of a copy"
    )
    table = Table(title="one query token", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("tokens", "mx.fast", "mlx-lm\n4 bit"):
        table.add_column(column, justify="right")
    table.add_column("preset", no_wrap=True)
    for column in ("ours", "to\nmx.fast", "to\nmlx-lm", "of\nfloor", "bytes"):
        table.add_column(column, justify="right")
    for tokens in args.tokens:
        decode(args, tokens, table)
    console.print(table)
    if not args.prefill_tokens:
        return

    table = Table(title="a chunk of the prompt", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("queries\nx tokens", justify="right")
    table.add_column("preset", no_wrap=True)
    for column in ("mx.fast", "decode,\nmx.fast", "ours", "to\nmx.fast", "to\ndecode"):
        table.add_column(column, justify="right")
    for tokens in args.prefill_tokens:
        prefill(args, tokens, table)
    console.print(table)
    if gpu:
        return  # the peak below is that of the process
    dense = 2 * args.memory_tokens * args.kv_heads * args.head_dim * 4
    for preset in args.presets:
        console.print(
            f"{preset}: {args.queries} queries over {args.memory_tokens} tokens raise the peak by "
            f"{extra_memory(args, preset) / 1e6:.0f} MB; decoded keys and values alone are "
            f"{dense / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
