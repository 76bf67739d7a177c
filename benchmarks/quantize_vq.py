"""Nearest-centroid coding against the two best ways plain MLX offers: time, and memory beyond the
inputs. The default shape is that of one layer of a model with 4 KV heads of 256 and 4096 tokens."""

from __future__ import annotations

import argparse

import mlx.core as mx
from rich.console import Console
from rich.table import Table
from timing import blas, extra_bytes, milliseconds

from vqkv_ext import info, ops


def naive(x: mx.array, book: mx.array) -> mx.array:
    """Distances by broadcasting, 4096 vectors at a time so that it fits in memory at all."""
    v = x.reshape(-1, book.shape[-1])
    parts = [
        mx.argmin((v[i : i + 4096, None] - book).square().sum(-1), axis=-1).astype(mx.uint8)
        for i in range(0, v.shape[0], 4096)
    ]
    return mx.concatenate(parts)


def matmul_argmin(x: mx.array, book: mx.array) -> mx.array:
    """``argmin(|c|^2 / 2 - x . c)``: one matrix product, and an [N, K] intermediate."""
    v = x.reshape(-1, book.shape[-1])
    return mx.argmin(0.5 * book.square().sum(-1) - v @ book.T, axis=-1).astype(mx.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--dims", type=int, default=4, help="values per code")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    x = mx.random.normal((1, args.heads, args.tokens, args.head_dim))
    book = mx.random.normal((256, args.dims))
    mx.eval(x, book)
    calls = {
        "vqkv_ext.ops.quantize_vq": lambda: ops.quantize_vq(x, book),
        "matmul + argmin": lambda: matmul_argmin(x, book),
        "naive graph, chunks of 4096": lambda: naive(x, book),
    }
    agree = (calls["matmul + argmin"]().reshape(-1) == ops.quantize_vq(x, book).reshape(-1)).mean()
    times = milliseconds(*calls.values(), rounds=args.rounds)
    result = x.size // args.dims
    table = Table(
        title=f"{result} vectors of {args.dims}, 256 centroids; {info()['executor']}, {blas()}"
    )
    for column in ("", "ms", "slower than ours", "MB beyond the inputs"):
        table.add_column(column, justify="right" if column else "left")
    for (name, call), ms in zip(calls.items(), times, strict=True):
        table.add_row(name, f"{ms:.2f}", f"{ms / times[0]:.1f}x", f"{extra_bytes(call) / 1e6:.2f}")
    console = Console()
    console.print(table)
    console.print(f"the codes alone are {result / 1e6:.2f} MB; equal codes: {agree.item():.6f}")


if __name__ == "__main__":
    main()
