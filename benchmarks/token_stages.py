"""Where the time of a generated token goes: building the graph in Python, MLX's evaluation of it,
and waiting for the device. Microseconds, means of a run, medians of the runs; caches alternate.

`generate.py` says how fast generation is; this says why.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Before anything imports NumPy, for numpy_blas.py; see demo.py.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mlx.core as mx
import mlx.nn as nn
from attention import where
from generate import fill, keys_dtype, make_cache
from generate_models import SPECS, random_model
from generate_results import PLAIN
from report import make_console
from rich.table import Table

from vqkv_ext.adapters.mlx_lm import model_shape

STAGES = ("build", "evaluate", "wait")


def stages(model: nn.Module, cache: list[Any], tokens: int) -> tuple[float, ...]:
    """Microseconds per token of each of :data:`STAGES`, and of all together."""
    before = cache[0].offset
    spent = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent[stage] += time.perf_counter() - start

    def step(y: mx.array) -> mx.array:
        with timed("build"):
            logits = model(y[:, None], cache=cache)[:, -1]
            following = mx.argmax(logits, axis=-1)
        with timed("evaluate"):
            mx.async_eval(following)
        return following

    y = step(mx.ones((1,), mx.int32))
    mx.eval(y)
    spent.update(dict.fromkeys(STAGES, 0.0))
    start = time.perf_counter()
    for _ in range(tokens):  # as mlx_lm does: the next token is on its way before this one is read
        following = step(y)
        with timed("wait"):
            y.tolist()
        y = following
    mx.eval(y)
    total = time.perf_counter() - start
    for c in cache:
        c.trim(c.offset - before)
    mx.eval([c.state for c in cache])
    return tuple(1e6 * s / tokens for s in (*spent.values(), total))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-shape", choices=SPECS, help="its shape")
    parser.add_argument("--context", type=int, default=256, help="tokens")
    parser.add_argument("--caches", nargs="*", default=("centred-4bit",), metavar="PRESET")
    parser.add_argument("--tokens", type=int, default=60, help="per run, at most a block")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    gpu = mx.default_device().type == mx.DeviceType.gpu
    model = random_model(args.model, mx.float16 if gpu else mx.float32)
    caches = {kind: make_cache(model, kind) for kind in (PLAIN, *args.caches)}
    for cache in caches.values():
        fill(cache, model_shape(model), keys_dtype(model), 1, args.context)
        stages(model, cache, args.tokens)
    found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in caches}
    for _ in range(args.rounds):
        for kind, cache in caches.items():
            found[kind].append(stages(model, cache, args.tokens))
    table = Table(title=f"{where()}: {args.model}, {args.context} tokens, us per token")
    for name in ("cache", *STAGES, "in all"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for kind, runs in found.items():
        table.add_row(kind, *(f"{statistics.median(x):,.0f}" for x in zip(*runs, strict=True)))
    make_console().print(table)


if __name__ == "__main__":
    main()
