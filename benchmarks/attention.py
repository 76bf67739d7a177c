"""Decode attention over codes against MLX's attention over dense keys and values."""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table
from timing import blas, milliseconds

from vqkv_ext import info, ops
from vqkv_ext.packed import CodedBody, Layout, PackedKV, TableCode


def packed(
    rng: np.random.Generator, heads: int, tokens: int, width: int, dims: int, dtype: mx.Dtype
) -> tuple[PackedKV, PackedKV]:
    """Random keys and values: all but the last 68 tokens (4 sinks, 64 recent) are codes."""
    coded = (tokens - 68) // 64 * 64
    recent = tokens - 4 - coded
    layout = Layout(mx.array([[tokens, coded, 4 + coded]], mx.int32), 4, 64, 64)

    def side() -> PackedKV:
        codes = mx.array(rng.integers(0, 256, (1, heads, coded, width // dims), np.uint8))
        table = mx.array(rng.standard_normal((1, 1, 256, dims)).astype(np.float16))
        tail = mx.random.normal((1, heads, 4 + recent, width)).astype(dtype)
        body = CodedBody(codes, TableCode(table.astype(mx.float32), 8))
        mx.eval(codes, body.code.table, tail)
        return PackedKV(body, tail, layout)

    return side(), side()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dims", type=int, default=4, help="values per code")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    dtype = getattr(mx, args.dtype)
    rng = np.random.default_rng(0)
    table = Table(
        title=f"one query token, {args.heads}/{args.kv_heads} heads of {args.head_dim}, "
        f"{8 // args.dims} bits, {args.dtype}; {info()['executor']}, {blas()}"
    )
    for column in ("tokens", "codes, ms", "mx.fast dense, ms", "ratio", "cache bytes, ratio"):
        table.add_column(column, justify="right")
    scale = args.head_dim**-0.5
    for tokens in args.tokens:
        keys, values = packed(rng, args.kv_heads, tokens, args.head_dim, args.dims, dtype)
        q = mx.random.normal((1, args.heads, 1, args.head_dim)).astype(dtype)
        k, v = (
            mx.random.normal((1, args.kv_heads, tokens, args.head_dim)).astype(dtype) for _ in "kv"
        )
        mx.eval(q, k, v)
        ours, dense = milliseconds(
            lambda q=q, keys=keys, values=values: ops.attention(q, keys, values, scale=scale),
            lambda q=q, k=k, v=v: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale),
            rounds=args.rounds,
        )
        held = sum(p.tail.nbytes + p.body.codes.nbytes for p in (keys, values))
        table.add_row(
            str(tokens),
            f"{ours:.3f}",
            f"{dense:.3f}",
            f"{dense / ours:.2f}x",
            f"{(k.nbytes + v.nbytes) / held:.1f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
