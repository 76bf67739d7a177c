"""Fit codecs to a model: run text through it, collect keys and values, fit each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from ..codecs import Calibration, LayerCodecs, query_aware, vecinfer
from ..codecs.calibration import ModelShape
from ..evaluation import read
from .layers import cache_slots, places
from .mlx_lm import model_shape
from .query_statistics import key_factors

Progress = Callable[[int, int], None]
"""Called with what is done and the total."""

LEAST_TOKENS = 256

PRESETS = (*vecinfer.PRESETS, *query_aware.PRESETS)
"""Names of what can be fitted."""


def collect(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    chunk: int = 128,
    progress: Progress | None = None,
) -> list[tuple[mx.array, mx.array]]:
    """Keys (after RoPE) and values of every layer that is compressed, for a text.

    Args:
        model: An mlx_lm model.
        tokens: Of the text, read as one sequence.
        chunk: Tokens per forward pass.
        progress: Called after every pass with the tokens read and their total.

    Returns:
        ``(keys [H, N, D], values [H, N, Dv])`` per layer, evaluated.
    """
    slots = [slot for slot in cache_slots(model) if slot.reason is None]
    caches = stock.make_prompt_cache(model)
    read(model, caches, tokens, chunk, progress)
    held = dict(places(caches))
    return [tuple(x[0] for x in held[s.place].keys_and_values()) for s in slots]


def calibrate(
    model: nn.Module,
    tokens: Sequence[int],
    preset: str,
    *,
    iterations: int = 30,
    seed: int = 0,
    reading: Progress | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Fit a preset to a model.

    Args:
        model: An mlx_lm model.
        tokens: Calibration text, 2048 tokens or more; not a text to be evaluated on.
        preset: One of :data:`PRESETS`.
        iterations: k-means rounds.
        seed: Of k-means; both are of VecInfer only.
        reading: Called while the model reads the text, with tokens.
        progress: Called after every layer of VecInfer.

    Raises:
        ValueError: Unknown preset, too few tokens, or a model that cannot be served.
    """
    if preset not in PRESETS:
        raise ValueError(
            f"[calibrate] preset must be one of {', '.join(PRESETS)}, but got {preset!r}."
        )
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"[calibrate] tokens must be at least {LEAST_TOKENS}, but got {len(tokens)}."
        )
    shape = model_shape(model)
    if preset in query_aware.PRESETS:
        query_aware.check_width(preset, shape.key_dim)
        factors = key_factors(model, tokens, progress=reading)
        return with_factors(shape, factors, preset, tokens=len(tokens))
    vecinfer.check_width(vecinfer.PRESETS[preset], shape.key_dim, shape.value_dim)
    collected = collect(model, tokens, progress=reading)
    return fit_layers(shape, collected, preset, iterations=iterations, seed=seed, progress=progress)


def with_factors(
    shape: ModelShape, factors: Sequence[mx.array], preset: str, *, tokens: int
) -> Calibration:
    """A query-aware preset from :func:`key_factors`; sizes can share them.

    Args:
        shape: Of the model.
        factors: ``[H, D]`` for each layer.
        preset: Such as ``"query-aware-2bit"``.
        tokens: The number of those read.
    """
    pairs = [query_aware.build(preset, f, shape.key_dim, shape.value_dim) for f in factors]
    return Calibration(preset, shape, [LayerCodecs(*pair) for pair in pairs], tokens)


def fit_layers(
    shape: ModelShape,
    collected: Sequence[tuple[mx.array, mx.array]],
    preset: str,
    *,
    iterations: int = 30,
    seed: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Fit a preset to keys and values from :func:`collect`; several presets can share them.

    Args and errors: as for :func:`calibrate`; ``shape`` is that of the model.
    """
    spec = vecinfer.PRESETS[preset]
    layers = []
    for i, (keys, values) in enumerate(collected):
        layers.append(
            LayerCodecs(*vecinfer.fit(spec, keys, values, iterations=iterations, seed=seed))
        )
        if progress:
            progress(i + 1, shape.layers)
    return Calibration(preset, shape, layers, collected[0][0].shape[1])
