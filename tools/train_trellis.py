"""Trains the tables of the trellis codes: Lloyd's algorithm over Viterbi paths of Gaussian rows.

A round codes fresh rows of unit variance and moves every level to the mean of the values that its
state stands for. Noise that fades out keeps early rounds from settling in the nearest minimum; the
best of several starts is kept. Writes `python/vqkv_ext/data/trellis.npy`, float16 [4, 256]: row
b - 1 is for b bits. The same arguments give the same file on every machine with the same NumPy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import NormalDist

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.progress import Progress

from vqkv_ext import ops

STATES = 256
TABLES = Path(__file__).resolve().parents[1] / "python" / "vqkv_ext" / "data" / "trellis.npy"


def rows(rng: np.random.Generator, n: int, width: int) -> np.ndarray:
    """Random directions, of variance 1 per value."""
    x = rng.standard_normal((n, width))
    return (x * np.sqrt(width / np.square(x).sum(-1, keepdims=True))).astype(np.float32)


def states(codes: mx.array, bits: int, width: int) -> np.ndarray:
    """The state of every value: the 8 bits at its place in the stream."""
    octets = np.pad(np.array(codes), [(0, 0), (0, 1)]).astype(np.uint16)
    bit = bits * np.arange(width)
    at = bit // 8
    return ((octets[:, at] | octets[:, at + 1] << 8) >> (bit % 8).astype(np.uint16)) & 255


def squared_error(x: np.ndarray, table: np.ndarray, bits: int) -> float:
    """Mean per value, with a least-squares scale per row."""
    codes, scales = ops.trellis_encode(mx.array(x), mx.array(table), bits, scale="mse")
    y = table[states(codes, bits, x.shape[1])] * np.array(scales.astype(mx.float32))[:, None]
    return float(np.square(x - y).mean())


def train(
    bits: int, rng: np.random.Generator, rounds: int, n: int, width: int, noise: float
) -> np.ndarray:
    """A table of float32 that float16 holds."""
    normal = NormalDist()
    table = rng.permutation([normal.inv_cdf((i + 0.5) / STATES) for i in range(STATES)])
    for i in range(rounds):
        last = i + 1 == rounds
        x = rows(rng, 10 * n if last else n, width)
        codes, _ = ops.trellis_encode(mx.array(x), mx.array(table.astype(np.float32)), bits)
        state = states(codes, bits, width).ravel()
        count = np.bincount(state, minlength=STATES)
        total = np.bincount(state, x.ravel(), STATES)
        table = np.where(count > 0, total / np.maximum(count, 1), table)
        left = max(0.0, 1 - i / (0.7 * rounds))
        table = table + rng.standard_normal(STATES) * (noise * left * 2.0**-bits)
    return table.astype(np.float16).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300, metavar="N")
    parser.add_argument("--starts", type=int, default=2, metavar="N")
    parser.add_argument("--rows", type=int, default=8000, metavar="N", help="per round")
    parser.add_argument("--width", type=int, default=128, metavar="D", help="values per row")
    parser.add_argument("--noise", type=float, default=0.5, help="of the first round, times 2^bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=TABLES, metavar="FILE")
    args = parser.parse_args()
    console = Console()
    test = rows(np.random.default_rng(args.seed + 1), 20_000, args.width)
    found = []
    with Progress(console=console) as bars:
        task = bars.add_task("starts", total=4 * args.starts)
        for bits in (1, 2, 3, 4):
            tried = []
            for start in range(args.starts):
                rng = np.random.default_rng([args.seed, bits, start])
                table = train(bits, rng, args.rounds, args.rows, args.width, args.noise)
                tried.append((squared_error(test, table, bits), table))
                bars.advance(task)
            error, table = min(tried, key=lambda t: t[0])
            errors = " ".join(f"{e:.5f}" for e, _ in tried)
            console.print(f"{bits} bits: squared error {error:.5f}, starts {errors}")
            found.append(table)
    np.save(args.output, np.stack(found).astype(np.float16))
    console.print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
