"""Compressed caches for mlx_lm models.

::

    cache = make_prompt_cache(model, Calibration.load("vecinfer-2bit.safetensors"))
    generate(model, tokenizer, prompt, prompt_cache=cache)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from .. import ops
from ..cache import CacheConfig, CompressedArray, CompressedKVCache
from ..codecs import Calibration, presets
from ..codecs.calibration import ModelShape
from ..codecs.vecinfer import PRESETS
from .batching import logical_mask, padded_mask
from .serialization import register

__all__ = [
    "disable_attention",
    "enable_attention",
    "make_prompt_cache",
    "model_shape",
]

register()

_NAME = "scaled_dot_product_attention"


def _dispatching(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array | CompressedArray,
        values: mx.array | CompressedArray,
        cache: Any,
        scale: float,
        mask: str | mx.array | None,
        sinks: mx.array | None = None,
        **kwargs: Any,
    ) -> mx.array:
        if not isinstance(keys, CompressedArray):
            mask = padded_mask(mask, queries, cache)
            return original(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **kwargs
            )
        return ops.attention(
            queries,
            keys.packed,
            values.packed,
            scale=scale,
            mask=logical_mask(mask, keys),
            sinks=sinks,
            use_metal_kernels=keys.use_metal_kernels,
        )

    scaled_dot_product_attention.vqkv_original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _layer_modules(model: nn.Module) -> list[ModuleType]:
    """Python modules that the model's own layers are defined in and that bind attention by name."""
    names = {type(m).__module__ for m in model.modules()}
    return [m for n in sorted(names) if (m := sys.modules.get(n)) and hasattr(m, _NAME)]


def enable_attention(model: nn.Module) -> list[str]:
    """Let the model's attention read compressed caches, besides the stock ones.

    mlx_lm's model files bind ``scaled_dot_product_attention`` by value, so it is rebound in the
    modules that define the model's layers. Calling this again changes nothing.

    Returns:
        Names of the modules in which the name is bound now.
    """
    modules = _layer_modules(model)
    for module in modules:
        bound = getattr(module, _NAME)
        if not hasattr(bound, "vqkv_original"):
            setattr(module, _NAME, _dispatching(bound))
    return [m.__name__ for m in modules]


def disable_attention(model: nn.Module) -> None:
    """Undo :func:`enable_attention` for the modules of this model."""
    for module in _layer_modules(model):
        bound = getattr(module, _NAME)
        if hasattr(bound, "vqkv_original"):
            setattr(module, _NAME, bound.vqkv_original)


def model_shape(model: nn.Module) -> ModelShape:
    """Layers, heads and widths of the model's cache, seen by running one token through it."""
    caches = stock.make_prompt_cache(model)
    for i, c in enumerate(caches):
        if type(c) is not stock.KVCache:
            raise ValueError(
                "[make_prompt_cache] every layer must have a plain KVCache, but layer "
                f"{i} of {getattr(model, 'model_type', type(model).__name__)} has "
                f"{type(c).__name__}."
            )
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))
    shapes = {(c.keys.shape[1], c.keys.shape[3], c.values.shape[3]) for c in caches}
    if len(shapes) != 1:
        raise ValueError(
            "[make_prompt_cache] all layers must have equal heads and head_dim, but got "
            f"{sorted(shapes)}."
        )
    heads, key_dim, value_dim = shapes.pop()
    kind = getattr(model, "model_type", type(model).__name__)
    return ModelShape(kind, len(caches), heads, key_dim, value_dim)


def enable_or_refuse(model: nn.Module) -> None:
    """:func:`enable_attention`, or ValueError where there is nothing to enable."""
    if not enable_attention(model):
        raise ValueError(
            "[make_prompt_cache] the model must compute attention by mlx_lm's "
            f"{_NAME}, but {type(model).__module__} does not bind that name."
        )


def make_prompt_cache(
    model: nn.Module,
    codec: Calibration | str | Path,
    *,
    config: CacheConfig | None = None,
    max_kv_size: None = None,
) -> list[CompressedKVCache]:
    """The compressed counterpart of ``mlx_lm.models.cache.make_prompt_cache``.

    Args:
        model: An mlx_lm model whose layers all use a plain KVCache.
        codec: The name of a preset that needs no calibration, such as ``"centred-4bit"`` (see
            :data:`vqkv_ext.codecs.presets.PRESETS`), a :class:`Calibration`, or the path of a
            calibration file.
        config: Which tokens stay uncompressed; by default 4 sinks and a window of 64.
        max_kv_size: Not offered: a compressed cache forgets nothing.

    Returns:
        One cache per layer, to pass as ``prompt_cache``.

    Raises:
        ValueError: The model cannot be served, or the calibration is of another model.
    """
    if max_kv_size is not None:
        raise ValueError(
            "[make_prompt_cache] max_kv_size must be None, as a compressed cache keeps every "
            f"token, but got {max_kv_size!r}."
        )
    if isinstance(codec, str) and codec in presets.PRESETS:
        shape = model_shape(model)
        enable_or_refuse(model)
        key = presets.codec(codec, shape.key_dim, "key")
        value = presets.codec(codec, shape.value_dim, "value")
        return [CompressedKVCache(key, value, config) for _ in range(shape.layers)]
    if isinstance(codec, str) and codec in PRESETS:
        raise ValueError(
            f"[make_prompt_cache] {codec} must be calibrated: run `vqkv calibrate MODEL TEXT "
            f"--preset {codec} -o FILE` and pass FILE, but got the bare name."
        )
    calibration = codec if isinstance(codec, Calibration) else Calibration.load(codec)
    calibration.check(model_shape(model))
    enable_or_refuse(model)
    return [CompressedKVCache(c.key, c.value, config) for c in calibration.layers]
