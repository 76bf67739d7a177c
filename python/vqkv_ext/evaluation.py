"""How much a compressed cache changes a model's predictions.

The protocol is teacher-forced: the same tokens go through the model in chunks, once for each cache,
and the distributions over the next token are compared with those of the reference cache (the stock
floating-point one). All caches advance side by side, one chunk at a time, so that only one chunk of
log-probabilities per run exists at any moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import resources
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

MakeCache = Callable[[], list[Any]]

LATE = 256
"""First position of the late mean: before it most caches still hold much in full precision."""


@dataclass(frozen=True)
class Quality:
    """Agreement of one cache with the reference over one text.

    Attributes:
        positions: number of positions compared.
        kl: mean KL(reference || cache) per position, in nats.
        kl_late: the same over positions >= 256 only; nan when there are none.
        kl_max: largest KL of one position, in nats.
        top1: share of positions whose most probable token is the reference's.
        ppl: perplexity of the text under this cache.
        ppl_reference: perplexity of the text under the reference cache.
        cache_bytes: bytes that the cache holds at the end, the sum of ``nbytes`` over layers.
        reference_bytes: the same of the reference cache.
        seconds: wall time of this cache's forward passes.
    """

    positions: int
    kl: float
    kl_late: float
    kl_max: float
    top1: float
    ppl: float
    ppl_reference: float
    cache_bytes: int
    reference_bytes: int
    seconds: float

    @property
    def delta_ppl(self) -> float:
        """Change of perplexity against the reference, in percent."""
        return 100.0 * (self.ppl / self.ppl_reference - 1.0)

    def to_dict(self) -> dict[str, float | int | None]:
        """All fields and ``delta_ppl``; values that are not finite become None, as JSON wants."""
        values = {**asdict(self), "delta_ppl": self.delta_ppl}
        return {k: v if math.isfinite(v) else None for k, v in values.items()}


def evaluate(
    model: nn.Module,
    tokens: Sequence[int] | mx.array,
    make_cache: MakeCache,
    *,
    chunk: int = 64,
    reference: MakeCache | None = None,
    skip: int = 0,
) -> Quality:
    """Quality of one cache; see :func:`compare`."""
    named = {"cache": make_cache}
    return compare(model, tokens, named, chunk=chunk, reference=reference, skip=skip)["cache"]


def compare(
    model: nn.Module,
    tokens: Sequence[int] | mx.array,
    caches: Mapping[str, MakeCache],
    *,
    chunk: int = 64,
    reference: MakeCache | None = None,
    skip: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Quality]:
    """Quality of several caches against one run of the reference.

    Args:
        model: an mlx_lm model, called as ``model(ids, cache=cache)`` with ids of shape (1, L).
        tokens: the text, token ids of shape (N,), N >= 2.
        caches: for each name a function that returns a fresh list of per-layer caches.
        chunk: number of tokens per forward pass.
        reference: makes the reference cache; by default the model's stock cache.
        skip: leading positions that do not count towards any mean (0 <= skip <= N - 2).
        progress: called with (tokens done, N) after each chunk.

    Returns:
        A :class:`Quality` for each name. Perplexity covers predictions of tokens skip + 1 to N - 1.

    Raises:
        ValueError: an argument outside the ranges above.
    """
    ids = tokens if isinstance(tokens, mx.array) else mx.array(tokens, dtype=mx.int32)
    if ids.ndim != 1 or ids.size < 2:
        raise ValueError(
            f"[compare] tokens must have shape (N,) with N >= 2, but got shape {ids.shape}"
        )
    count = ids.size
    if chunk < 1:
        raise ValueError(f"[compare] chunk must be at least 1, but got {chunk}")
    if not 0 <= skip <= count - 2:
        raise ValueError(
            f"[compare] skip must leave a position to predict (0 to {count - 2}), but got {skip}"
        )
    if not caches:
        raise ValueError("[compare] caches must name at least one cache, but got none")

    base = _Run(reference() if reference is not None else stock_cache(model))
    runs = {name: _Run(make()) for name, make in caches.items()}
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        inputs = ids[None, start:stop]
        # The last position predicts a token that the text does not have.
        targets = ids[start + 1 : stop + 1]
        expected = base.step(model, inputs)
        base.record_nll(expected, targets, max(skip - start, 0))
        for run in runs.values():
            found = run.step(model, inputs)
            run.record_nll(found, targets, max(skip - start, 0))
            run.record_divergence(expected, found, max(skip - start, 0))
            del found
        if progress is not None:
            progress(stop, count)
    return {name: run.quality(base, skip) for name, run in runs.items()}


def stock_cache(model: nn.Module, kv_bits: int | None = None, group_size: int = 64) -> list[Any]:
    """mlx_lm's own cache: floating point, or its affine quantisation to ``kv_bits``.

    Layers whose stock cache cannot be quantised (recurrent ones) keep it, as in mlx_lm.

    Raises:
        ValueError: a bit-width that MLX does not quantise to.
    """
    cache = make_prompt_cache(model)
    if kv_bits is None:
        return cache
    if kv_bits not in (2, 3, 4, 5, 6, 8):
        raise ValueError(
            f"[stock_cache] kv_bits must be 2, 3, 4, 5, 6, 8 or None, but got {kv_bits}"
        )
    return [
        c.to_quantized(group_size=group_size, bits=kv_bits) if hasattr(c, "to_quantized") else c
        for c in cache
    ]


def read(
    model: nn.Module,
    cache: list[Any],
    tokens: Sequence[int],
    chunk: int,
    progress: Callable[[int, int], None] | None = None,
) -> mx.array:
    """Let a model read tokens, so many in each forward pass, and evaluate what its caches hold.

    Returns:
        Logits ``[vocabulary]`` after the last token, not evaluated.
    """
    ids, total = mx.array(list(tokens))[None], len(tokens)
    for start in range(0, total, chunk):
        logits = model(ids[:, start : start + chunk], cache=cache)[0, -1]
        mx.eval([c.state for c in cache])
        if progress:
            progress(min(start + chunk, total), total)
    return logits


def quantized_caches(model: nn.Module) -> dict[str, MakeCache]:
    """mlx_lm's own caches of 8 and 4 bits, by name, to compare compressed caches with.

    The groups that share a scale are of mlx_lm's default 64 values, or of the 32 that MLX also has
    where only these divide the head dimension. What mlx_lm cannot quantise, or MLX has no kernel
    for on this device, is left out.
    """
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    quantizable = [c for c in cache if hasattr(c, "to_quantized") and c.keys is not None]
    widths = {x.shape[-1] for c in quantizable for x in (c.keys, c.values)}
    group = next((g for g in (64, 32) if not any(w % g for w in widths)), None)
    if group is None:
        return {}
    caches = {}
    for bits in (8, 4):
        make = partial(stock_cache, model, bits, group)
        try:
            mx.eval(model(mx.zeros((1, 2), mx.int32), cache=make()))
        except (NotImplementedError, RuntimeError):  # sliding windows; no such kernel
            continue
        caches[f"mlx-lm kv_bits={bits}"] = make
    return caches


def cache_bytes(cache: Sequence[Any]) -> int:
    """Bytes that a list of per-layer caches holds, allocation slack included."""
    return sum(c.nbytes for c in cache)


def calibration_text() -> str:
    """The English prose that ships with the package, 18 KB (about 4000 tokens)."""
    path = resources.files("vqkv_ext") / "data" / "texts" / "calibration.txt"
    return path.read_text(encoding="utf-8")


@dataclass
class _Run:
    """One cache on its way through the text; lists hold plain floats, one per counted position."""

    cache: list[Any]
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def step(self, model: nn.Module, inputs: mx.array) -> mx.array:
        """Log-probabilities (L, vocabulary) of one chunk, in float32."""
        began = time.perf_counter()
        logits = model(inputs, cache=self.cache)[0].astype(mx.float32)
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        # A cache may do work that no output needs yet: without this its graph grows with the text.
        mx.eval(logp, [c.state for c in self.cache])
        self.seconds += time.perf_counter() - began
        return logp

    def record_nll(self, logp: mx.array, targets: mx.array, first: int) -> None:
        rows = targets.size
        if first < rows:
            picked = mx.take_along_axis(logp[:rows], targets[:, None], axis=-1)[first:, 0]
            self.nll += (-picked).tolist()

    def record_divergence(self, expected: mx.array, found: mx.array, first: int) -> None:
        if first < expected.shape[0]:
            expected, found = expected[first:], found[first:]
            self.kl += mx.sum(mx.exp(expected) * (expected - found), axis=-1).tolist()
            self.same += (mx.argmax(expected, -1) == mx.argmax(found, -1)).tolist()

    def quality(self, base: _Run, skip: int) -> Quality:
        late = self.kl[max(LATE - skip, 0) :]
        return Quality(
            positions=len(self.kl),
            kl=_mean(self.kl),
            kl_late=_mean(late),
            kl_max=max(self.kl),
            top1=_mean(self.same),
            ppl=_exp(_mean(self.nll)),
            ppl_reference=_exp(_mean(base.nll)),
            cache_bytes=cache_bytes(self.cache),
            reference_bytes=cache_bytes(base.cache),
            seconds=self.seconds,
        )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _exp(value: float) -> float:
    """A broken cache can exceed the range of exp: infinity then, not an exception."""
    return math.inf if value > 700 else math.exp(value)
