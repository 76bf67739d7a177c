"""Bits per layer: which preset the keys and the values of each layer get under a budget.

How much a layer matters is measured: the divergence of the model's predictions while only its keys,
or only its values, are coded by the coarsest preset. That of the finer ones is taken to fall as
their squared error on the layer's own keys and values does, and divergences to add up.
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
from ..codecs import Calibration, Codec, LayerCodecs, presets
from ..codecs.calibration import ModelShape
from ..codecs.half import HalfCodec
from ..evaluation import compare
from .calibrate import LEAST_TOKENS, Progress, collect
from .layers import CacheSlot, Place, cache_slots, replaced
from .mlx_lm import model_shape

CANDIDATES = ("trellis-1bit", "trellis-2bit", "trellis-3bit", "trellis-4bit")
BLOCK = 64  # tokens, those of the default cache

_TOGETHER = 8  # caches that go through the model side by side
_UNCODED = 2 * BLOCK + 4  # first positions, which read nothing coded


@dataclass(frozen=True)
class Part:
    """The keys or the values of one layer.

    Attributes:
        layer: Index among the layers that are compressed.
        side: Which.
        kl: Divergence in nats per token while only this part is coded by the coarsest preset.
        errors: Squared error of each preset as a share of the coarsest's.
        bytes: Of a token and KV head for each preset.
    """

    layer: int
    side: Literal["key", "value"]
    kl: float
    errors: dict[str, float]
    bytes: dict[str, float]

    def loss(self, preset: str) -> float:
        """The divergence expected of a preset, nats per token."""
        return self.kl * self.errors[preset]


def allocate(
    model: nn.Module,
    tokens: Sequence[int],
    budget: float,
    *,
    candidates: Sequence[str] = CANDIDATES,
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
        candidates: Names of :data:`vqkv_ext.codecs.presets.PRESETS`.
        chunk: Tokens per forward pass.
        reading: Called while keys and values are collected, with tokens.
        progress: Called with the parts measured and their total.

    Returns:
        A calibration of presets; its name tells the budget.

    Raises:
        ValueError: Unknown candidates, too few tokens, a budget below the smallest candidate's, or
            a model that cannot be served.
    """
    parts = measure(model, tokens, candidates, chunk=chunk, reading=reading, progress=progress)
    return build(model, parts, budget, tokens=len(tokens))


def build(model: nn.Module, parts: Sequence[Part], budget: float, *, tokens: int) -> Calibration:
    """The calibration of :func:`allocate` from what :func:`measure` found; budgets can share it.

    Args and errors: as for :func:`allocate`; ``tokens`` is the number of those measured with.
    """
    shape = model_shape(model)
    names = list(parts[0].bytes)
    check_budget(shape, budget, names)
    # blocks of tokens take whole bytes
    costs = [[round(BLOCK * p.bytes[n]) for n in names] for p in parts]
    most = math.floor(BLOCK * budget * shape.layers * (shape.key_dim + shape.value_dim) / 8)
    chosen = choose(costs, [[p.loss(n) for n in names] for p in parts], most)
    widths = {"key": shape.key_dim, "value": shape.value_dim}
    made = functools.cache(lambda name, side: presets.codec(name, widths[side], side))
    sides: list[dict[str, Codec]] = [{} for _ in range(shape.layers)]
    for part, at in zip(parts, chosen, strict=True):
        sides[part.layer][part.side] = made(names[at], part.side)
    layers = [LayerCodecs(**s) for s in sides]
    return Calibration(f"mixed-{budget:g}bit", shape, layers, tokens)


def check_budget(shape: ModelShape, budget: float, candidates: Sequence[str]) -> None:
    """Refuse what :func:`allocate` could not keep to.

    Raises:
        ValueError: Unknown candidates, or a budget below that of the smallest.
    """
    unknown = [n for n in candidates if n not in presets.PRESETS]
    if unknown or not candidates:
        raise ValueError(
            f"[allocate] candidates must be of {', '.join(presets.PRESETS)}, but got "
            f"{', '.join(unknown) or 'none'}."
        )
    widths = {"key": shape.key_dim, "value": shape.value_dim}
    least = sum(
        min(presets.codec(n, width, side).bytes_per_token for n in candidates)
        for side, width in widths.items()
    )
    least *= 8 / sum(widths.values())
    if budget < least:
        raise ValueError(
            f"[allocate] budget must be at least {math.ceil(1000 * least) / 1000:.3f} bits per "
            f"number with {', '.join(candidates)}, but got {budget:g}."
        )


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
    candidates: Sequence[str] = CANDIDATES,
    *,
    chunk: int = 128,
    reading: Progress | None = None,
    progress: Progress | None = None,
) -> list[Part]:
    """What the keys and the values of each layer lose by each preset.

    Args and errors: as for :func:`allocate`.
    """
    shape = model_shape(model)
    check_budget(shape, math.inf, candidates)
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"[allocate] tokens must be at least {LEAST_TOKENS}, but got {len(tokens)}."
        )
    shape = model_shape(model)
    slots = [slot for slot in cache_slots(model) if slot.reason is None]
    collected = collect(model, tokens, chunk=chunk, progress=reading)
    widths = {"key": shape.key_dim, "value": shape.value_dim}
    parts = list(itertools.product(range(shape.layers), ("key", "value")))
    codecs = {
        side: {n: presets.codec(n, width, side) for n in candidates}
        for side, width in widths.items()
    }
    coarsest = {
        side: min(codecs[side], key=lambda n: codecs[side][n].bytes_per_token) for side in codecs
    }
    kl: list[float] = []
    for first in range(0, len(parts), _TOGETHER):
        caches = {
            f"{layer} {side}": _only(model, slots[layer], codecs[side][coarsest[side]], side)
            for layer, side in parts[first : first + _TOGETHER]
        }
        found = compare(model, list(tokens), caches, chunk=chunk, skip=_UNCODED)
        kl += [q.kl for q in found.values()]
        if progress:
            progress(len(kl), len(parts))
    measured = []
    for (layer, side), loss in zip(parts, kl, strict=True):
        x = collected[layer][0 if side == "key" else 1]
        errors = {n: _error(c, x) for n, c in codecs[side].items()}
        worst = errors[coarsest[side]] or 1.0
        measured.append(
            Part(
                layer,
                side,
                max(loss, 0.0),  # rounding can take a divergence of nothing below it
                {n: e / worst for n, e in errors.items()},
                {n: c.bytes_per_token for n, c in codecs[side].items()},
            )
        )
    return measured


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
