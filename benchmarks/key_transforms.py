"""What fitting the basis of the keys to a model would gain over trellis presets, which fit nothing.

Keys are divided by factors per channel, or multiplied by a matrix, before they are rotated and
coded; queries get the inverse. Factors and matrices come from another text than the one judged:

- smoothed: the square root of the deviation of keys from the mean of their block.
- query-aware factors, matrix: least expected error of the scores, from the covariances of the keys
  and of the queries (the matrix is their geometric mean, as in NOVA). weighted: these covariances
  with weights for how much attention depends on a score.

None is a preset: docs/quality.md says what came out.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as stock
from report import make_console
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from smollm2 import CHUNK, load
from stages import stage

from vqkv_ext import ops
from vqkv_ext.adapters.attention import layer_modules
from vqkv_ext.adapters.layers import cache_slots
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs.rotations import random_signs
from vqkv_ext.codecs.transforms import SmoothedHadamard
from vqkv_ext.codecs.trellis import TrellisCodec
from vqkv_ext.evaluation import calibration_text, compare

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "benchmarks" / "texts" / "persuasion.txt"
ATTENTION = "scaled_dot_product_attention"
BLOCK, SINKS, WINDOW, SEED = 64, 4, 64, 1

Vectors = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Queries [H, G, N, D], keys and values [H, N, D] of one layer, G queries per KV head."""


class Dense:
    """``k -> H (signs * (k F))`` with a matrix for each KV head."""

    def __init__(self, matrix: np.ndarray, signs: mx.array):
        self.matrix = mx.array(matrix.astype(np.float32))
        self.back = mx.array(np.linalg.inv(matrix).swapaxes(-1, -2).astype(np.float32))
        self.signs = signs

    def forward(self, x: mx.array) -> mx.array:
        return ops.hadamard(x.astype(mx.float32) @ self.matrix, self.signs)

    def query(self, q: mx.array) -> mx.array:
        group = q.shape[1] // self.back.shape[0]
        turned = q.astype(mx.float32) @ mx.repeat(self.back, group, axis=0)
        return ops.hadamard(turned, self.signs)

    def arrays(self) -> list[mx.array]:
        return [self.matrix]


def collect(model: nn.Module, ids: Sequence[int]) -> list[Vectors]:
    """What attention of every layer gets for a text of whole blocks."""
    caches, seen = stock.make_prompt_cache(model), []
    kept = [(m, getattr(m, ATTENTION)) for m in layer_modules(model)]

    def spying(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def spy(q: mx.array, k: mx.array, v: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            seen[-1].append((q, k, v))
            return attention(q, k, v, *args, **kwargs)

        return spy

    for module, attention in kept:
        setattr(module, ATTENTION, spying(attention))
    try:
        for at in range(0, len(ids), CHUNK):
            seen.append([])
            model(mx.array(ids[at : at + CHUNK])[None], cache=caches)
            mx.eval([c.state for c in caches], seen[-1])
            seen[-1] = [tuple(np.array(x[0], np.float32) for x in layer) for layer in seen[-1]]
    finally:
        for module, attention in kept:
            setattr(module, ATTENTION, attention)
    found = []
    for layer, (_, k, v) in enumerate(seen[-1]):
        q = np.concatenate([chunk[layer][0] for chunk in seen], axis=1)
        found.append((q.reshape(k.shape[0], -1, *q.shape[1:]), k, v))
    return found


def centred(k: np.ndarray) -> np.ndarray:
    """Keys relative to the mean of their block."""
    parts = k.reshape(k.shape[0], -1, BLOCK, k.shape[-1])
    return (parts - parts.mean(2, keepdims=True)).reshape(k.shape)


def covariances(vectors: Vectors, weighted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Of centred keys and of queries, ``[H, D, D]`` each.

    Weights are those of an error of one score in the squared error of the output,
    ``p^2 |v - o|^2`` with the attention p and the output o, where the key is coded.
    """
    q, k, v = vectors
    c = centred(k)
    n, width = k.shape[1:]
    if not weighted:
        flat = q.reshape(q.shape[0], -1, width)
        return c.swapaxes(-1, -2) @ c / n, flat.swapaxes(-1, -2) @ flat / flat.shape[1]
    at = np.arange(n)
    coded = (at <= at[:, None] - WINDOW) & (at >= SINKS)
    keys, queries = (np.zeros((len(k), width, width)) for _ in "kq")
    for h in range(len(k)):
        for rows in q[h]:
            scores = np.where(at <= at[:, None], rows @ k[h].T / np.sqrt(width), -np.inf)
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            o = p @ v[h]
            distance = np.square(v[h]).sum(1) - 2 * o @ v[h].T + np.square(o).sum(1)[:, None]
            weight = p * p * distance * coded
            queries[h] += (rows.T * weight.sum(1)) @ rows
            keys[h] += (c[h].T * weight.sum(0)) @ c[h]
    return keys, queries


def power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    """Of symmetric matrices ``[..., D, D]``; no eigenvalue counts as less than a millionth of the
    largest."""
    values, basis = np.linalg.eigh(matrix.astype(np.float64))
    values = np.maximum(values, 1e-6 * values.max(-1, keepdims=True))
    return (basis * values[..., None, :] ** exponent) @ basis.swapaxes(-1, -2)


def geometric_mean(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The square root of the A that makes ``tr(queries A^-1) tr(keys A)`` least."""
    half, back = power(keys, 0.5), power(keys, -0.5)
    return power(back @ power(half @ queries @ half, 0.5) @ back, 0.5)


def bases(vectors: Vectors) -> dict[str, SmoothedHadamard | Dense]:
    """The bases of one layer by name."""
    signs = random_signs(vectors[1].shape[-1], SEED)

    def factors(x: np.ndarray) -> SmoothedHadamard:
        return SmoothedHadamard(mx.array(x.astype(np.float32)) * signs)

    def deviation(x: np.ndarray) -> np.ndarray:
        return np.sqrt(np.maximum(np.einsum("hii->hi", x), 1e-12))

    found: dict[str, SmoothedHadamard | Dense] = {}
    for what, weighted in (("", False), (", weighted", True)):
        keys, queries = covariances(vectors, weighted)
        if not weighted:
            found["smoothed"] = factors(np.sqrt(deviation(keys)))
        found[f"query-aware factors{what}"] = factors(np.sqrt(deviation(keys) / deviation(queries)))
        found[f"query-aware matrix{what}"] = Dense(geometric_mean(keys, queries), signs)
    return found


def codec(bits: int, width: int, basis: SmoothedHadamard | Dense) -> TrellisCodec:
    """The trellis code of keys in another basis."""
    made = TrellisCodec(f"fitted-{bits}bit", width, bits, centred=True, seed=SEED)
    made.transform = made.rotation = basis  # type: ignore[assignment]
    return made


def _advance(bars: Progress, task: TaskID, done: int, total: int) -> None:
    bars.update(task, completed=done, total=total)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    model, tokenizer, name = load(args.model, console, mx.float32)
    slots = cache_slots(model)
    plain = f"trellis-{args.bits}bit"
    with stage(console, "fitted"):
        most = args.calibration // BLOCK * BLOCK
        fitted = [bases(v) for v in collect(model, tokenizer.encode(calibration_text())[:most])]
    value = make_prompt_cache(model, plain)[0].value_codec
    caches = {plain: partial(make_prompt_cache, model, plain)}
    for kind in fitted[0]:
        codecs = [codec(args.bits, s.key_dim, b[kind]) for s, b in zip(slots, fitted, strict=True)]
        caches[kind] = lambda codecs=codecs: [CompressedKVCache(c, value) for c in codecs]
    results: dict[str, Any] = {"model": name, "tokens": args.tokens, "bits": args.bits, "kl": {}}
    for path in args.texts:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))[: args.tokens]
        with stage(console, path.stem) as bars:
            task = bars.add_task(path.stem, total=len(ids))
            progress = partial(_advance, bars, task)
            found = compare(model, ids, caches, chunk=CHUNK, progress=progress)
        table = Table(title=f"{path.stem}, {len(ids)} tokens")
        for column in ("basis of the keys", "KL", "of the preset's"):
            table.add_column(column)
        for kind, q in found.items():
            table.add_row(kind, f"{q.kl:.5f}", f"{q.kl / found[plain].kl:.2f}")
        console.print(table)
        results["kl"][path.stem] = {kind: q.kl for kind, q in found.items()}
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", help="a .gguf file or an mlx_lm model of the llama kind")
    parser.add_argument("--bits", type=int, default=2, choices=(1, 2, 3, 4))
    parser.add_argument("--texts", nargs="+", type=Path, default=[TEXT], metavar="FILE")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    parser.add_argument("--calibration", type=int, default=2048, help="tokens to fit to")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    args = parser.parse_args(argv)
    results = run(args, make_console())
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
