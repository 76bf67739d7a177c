"""Bits per layer: which preset the keys and the values of each layer get under a budget.

How much a layer matters is measured: the divergence of the model's predictions while only its keys,
or only its values, are coded by the coarsest preset of a method. That of the method's finer ones is
taken to fall as their squared error does, and divergences to add up. The error of values is their
own, that of keys is the one of scores, weighted by how much attention depends on them: a method
may code badly what no query asks for.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as stock

from ..cache import CompressedKVCache
from ..codecs import Calibration, Codec, LayerCodecs, presets, query_aware
from ..codecs.calibration import ModelShape
from ..codecs.half import HalfCodec
from ..codecs.transforms import has_hadamard
from ..evaluation import compare
from .calibrate import LEAST_TOKENS, Progress
from .layers import CacheSlot, Place, cache_slots, replaced
from .mlx_lm import model_shape
from .query_statistics import statistics

PRESETS = (*presets.PRESETS, *query_aware.PRESETS)
"""Names that can be candidates."""

BLOCK = 64  # tokens, those of the default cache

_TOGETHER = 8  # caches that go through the model side by side
_UNCODED = 2 * BLOCK + 4  # first positions, which read nothing coded


@dataclass(frozen=True)
class Part:
    """The keys or the values of one layer.

    Attributes:
        layer: Index among the layers that are compressed.
        side: Which.
        codecs: The options, by their names: query-aware presets have trellis codes for values.
        kl: For each method the divergence in nats per token while only this part is coded, by the
            coarsest of the method's options.
        errors: Squared error of each option as a share of that of its method's coarsest.
    """

    layer: int
    side: Literal["key", "value"]
    codecs: dict[str, Codec]
    kl: dict[str, float]
    errors: dict[str, float]

    def loss(self, name: str) -> float:
        """The divergence expected of an option, nats per token."""
        return self.kl[method(name)] * self.errors[name]


def default_candidates(shape: ModelShape) -> tuple[str, ...]:
    """Query-aware presets of all sizes, or trellis ones where the heads have no Hadamard matrix."""
    if has_hadamard(shape.key_dim):
        return tuple(query_aware.PRESETS)
    return tuple(n for n in presets.PRESETS if method(n) == "trellis")


def method(name: str) -> str:
    """That of a preset, which has it in several sizes: ``"trellis"`` of ``"trellis-2bit"``."""
    return name.rpartition("-")[0] or name


def allocate(
    model: nn.Module,
    tokens: Sequence[int],
    budget: float,
    *,
    candidates: Sequence[str] | None = None,
    chunk: int = 128,
    reading: Progress | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Choose a preset for the keys and one for the values of each layer.

    Args:
        model: An mlx_lm model.
        tokens: Calibration text, 256 tokens or more; the model reads it once for each part.
        budget: Most stored bits per number, scales and centres included, on average over all
            layers, of tokens beyond the windows.
        candidates: Of :data:`PRESETS`; query-aware ones are fitted to the same text. By default
            those of :func:`default_candidates`.
        chunk: Tokens per forward pass.
        reading: Called while keys and values are collected, with tokens.
        progress: Called with the parts measured and their total.

    Returns:
        A calibration of presets; its name tells the budget.

    Raises:
        ValueError: Unknown candidates, or such as cannot take the model's head dimensions; too few
            tokens, a budget below the smallest candidate's, or a model that cannot be served.
    """
    parts = measure(model, tokens, candidates, chunk=chunk, reading=reading, progress=progress)
    return build(model, parts, budget, tokens=len(tokens))


def build(model: nn.Module, parts: Sequence[Part], budget: float, *, tokens: int) -> Calibration:
    """The calibration of :func:`allocate` from what :func:`measure` found; budgets can share it.

    Args and errors: as for :func:`allocate`; ``tokens`` is the number of those measured with.
    """
    shape = model_shape(model)
    check_budget(shape, budget, list(parts[0].codecs))
    # blocks of tokens take whole bytes
    costs = [[round(BLOCK * c.bytes_per_token) for c in p.codecs.values()] for p in parts]
    most = math.floor(BLOCK * budget * shape.layers * (shape.key_dim + shape.value_dim) / 8)
    chosen = choose(costs, [[p.loss(n) for n in p.codecs] for p in parts], most)
    sides: list[dict[str, Codec]] = [{} for _ in range(shape.layers)]
    for part, at in zip(parts, chosen, strict=True):
        sides[part.layer][part.side] = list(part.codecs.values())[at]
    layers = [LayerCodecs(**s) for s in sides]
    return Calibration(f"mixed-{budget:g}bit", shape, layers, tokens)


def check_budget(shape: ModelShape, budget: float, candidates: Sequence[str]) -> None:
    """Refuse what :func:`allocate` could not keep to.

    Raises:
        ValueError: Unknown candidates, or such as cannot take the head dimensions; a budget below
            that of the smallest.
    """
    unknown = [n for n in candidates if n not in PRESETS]
    if unknown or not candidates:
        raise ValueError(
            f"[allocate] candidates must be of {', '.join(PRESETS)}, but got "
            f"{', '.join(unknown) or 'none'}."
        )
    for name in candidates:
        if name in query_aware.PRESETS:
            query_aware.check_width(name, shape.key_dim)
    least = sum(
        min(c.bytes_per_token for c in codecs.values())
        for codecs in _options(shape, candidates).values()
    )
    least *= 8 / (shape.key_dim + shape.value_dim)
    if budget < least:
        raise ValueError(
            f"[allocate] budget must be at least {math.ceil(1000 * least) / 1000:.3f} bits per "
            f"number with {', '.join(candidates)}, but got {budget:g}."
        )


def _options(shape: ModelShape, candidates: Sequence[str]) -> dict[str, dict[str, Codec]]:
    """What the keys and the values of a layer can have, query-aware keys without their factors."""
    ones = mx.ones((1, shape.key_dim))
    keys = {
        name: query_aware.key_codec(name, ones)
        if name in query_aware.PRESETS
        else presets.codec(name, shape.key_dim, "key")
        for name in candidates
    }
    names = dict.fromkeys(query_aware.value_preset(n) for n in candidates)
    return {"key": keys, "value": {n: presets.codec(n, shape.value_dim, "value") for n in names}}


def choose(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int
) -> list[int]:
    """One option for each part, such that the costs stay within the budget and the sum of losses is
    least (dynamic programming, exact).

    Args:
        costs, losses: For each part those of its options.
        budget: At least the sum of the least costs.
    """
    extra = [[c - min(row) for c in row] for row in costs]
    unit = math.gcd(*itertools.chain.from_iterable(extra)) or 1
    room = min(budget - sum(map(min, costs)), sum(map(max, extra))) // unit
    best, taken = np.zeros(room + 1), []
    for row, loss in zip(extra, losses, strict=True):
        totals = np.full((len(row), room + 1), np.inf)
        for i, (cost, value) in enumerate(zip(row, loss, strict=True)):
            if (step := cost // unit) <= room:
                totals[i, step:] = best[: room + 1 - step] + value
        taken.append(totals.argmin(0))
        best = totals.min(0)
    at, chosen = room, []
    for row, picks in zip(reversed(extra), reversed(taken), strict=True):
        chosen.append(int(picks[at]))
        at -= row[chosen[-1]] // unit
    return chosen[::-1]


def measure(
    model: nn.Module,
    tokens: Sequence[int],
    candidates: Sequence[str] | None = None,
    *,
    chunk: int = 128,
    reading: Progress | None = None,
    progress: Progress | None = None,
) -> list[Part]:
    """What the keys and the values of each layer lose by each preset.

    Args and errors: as for :func:`allocate`.
    """
    shape = model_shape(model)
    if candidates is None:
        candidates = default_candidates(shape)
    check_budget(shape, math.inf, candidates)
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"[allocate] tokens must be at least {LEAST_TOKENS}, but got {len(tokens)}."
        )
    slots = [slot for slot in cache_slots(model) if slot.reason is None]
    options, measured = _options(shape, candidates), []
    aware = [n for n in options["key"] if n in query_aware.PRESETS]
    for i, layer in enumerate(statistics(model, tokens, chunk=chunk, progress=reading)):
        factors = layer.factors()
        keys = options["key"] | {n: query_aware.key_codec(n, factors) for n in aware}
        of_values = functools.partial(_error, x=layer.values)
        measured.append(_part(i, "key", keys, layer.score_error))
        measured.append(_part(i, "value", options["value"], of_values))
    jobs = [(part, name) for part in measured for name in _coarsest(part.codecs).values()]
    for first in range(0, len(jobs), _TOGETHER):
        some = dict(enumerate(jobs[first : first + _TOGETHER]))
        caches = {
            str(i): _only(model, slots[part.layer], part.codecs[name], part.side)
            for i, (part, name) in some.items()
        }
        found = compare(model, list(tokens), caches, chunk=chunk, skip=_UNCODED)
        for i, (part, name) in some.items():
            # rounding can take a divergence of nothing below it
            part.kl[method(name)] = max(found[str(i)].kl, 0.0)
        if progress:
            progress(first + len(some), len(jobs))
    return measured


def _coarsest(codecs: dict[str, Codec]) -> dict[str, str]:
    """For each method among the options the name of its smallest."""
    names = sorted(codecs, key=lambda n: codecs[n].bytes_per_token, reverse=True)
    return {method(n): n for n in names}


def _part(
    layer: int,
    side: Literal["key", "value"],
    codecs: dict[str, Codec],
    error: Callable[[Codec], float],
) -> Part:
    """Without the divergences, which are measured side by side."""
    errors = {name: error(codec) for name, codec in codecs.items()}
    worst = {m: errors[name] or 1.0 for m, name in _coarsest(codecs).items()}
    relative = {name: e / worst[method(name)] for name, e in errors.items()}
    return Part(layer, side, codecs, {}, relative)


def _only(model: nn.Module, slot: CacheSlot, codec: Codec, side: str) -> Callable[[], list[Any]]:
    """Makes the model's own caches with one side of one layer coded."""
    pair = {"key": HalfCodec(slot.key_dim), "value": HalfCodec(slot.value_dim), side: codec}

    def new(place: Place, cache: Any) -> Any:
        return CompressedKVCache(pair["key"], pair["value"]) if place == slot.place else cache

    return lambda: replaced(stock.make_prompt_cache(model), new)


def _error(codec: Codec, x: mx.array) -> float:
    """Mean squared error of ``[H, N, D]`` coded in whole blocks."""
    x = x[None, :, : x.shape[1] // BLOCK * BLOCK].astype(mx.float32)
    return mx.square(codec.decode(codec.encode(x, block=BLOCK), BLOCK) - x).mean().item()
