"""Fit codecs to a model: run text through it, collect keys and values, fit each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from ..codecs import Calibration, LayerCodecs, vecinfer
from ..codecs.calibration import ModelShape
from .layers import cache_slots, places
from .mlx_lm import model_shape

Progress = Callable[[int, int], None]
"""Called with what is done and the total."""

LEAST_TOKENS = 256


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
    ids = mx.array(list(tokens))[None]
    for i in range(0, ids.shape[1], chunk):
        model(ids[:, i : i + chunk], cache=caches)
        mx.eval([c.state for c in caches])
        if progress:
            progress(min(i + chunk, ids.shape[1]), ids.shape[1])
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
        preset: Such as ``"vecinfer-2bit"``.
        iterations: k-means rounds.
        seed: Of k-means.
        reading: Called while the model reads the text, with tokens.
        progress: Called after every layer.

    Raises:
        ValueError: Unknown preset, too few tokens, or a model that cannot be served.
    """
    spec = vecinfer.PRESETS.get(preset)
    if spec is None:
        raise ValueError(
            f"[calibrate] preset must be one of {', '.join(vecinfer.PRESETS)}, but got {preset!r}."
        )
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"[calibrate] needs at least {LEAST_TOKENS} tokens, but got {len(tokens)}."
        )
    shape = model_shape(model)
    vecinfer.check_width(spec, shape.key_dim, shape.value_dim)
    collected = collect(model, tokens, progress=reading)
    return fit_layers(shape, collected, preset, iterations=iterations, seed=seed, progress=progress)


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
