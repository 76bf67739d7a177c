"""Compressed caches for mlx_lm models.

::

    cache = make_prompt_cache(model, Calibration.load("vecinfer-2bit.safetensors"))
    generate(model, tokenizer, prompt, prompt_cache=cache)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..cache import CacheConfig
from ..codecs import Calibration, presets, query_aware, vecinfer
from ..codecs.calibration import ModelShape
from ..config import KVCacheBuilder, KVCacheConfig
from .attention import disable_attention, enable_attention
from .layers import CacheSlot, cache_slots, model_type
from .serialization import register

__all__ = [
    "CacheSlot",
    "cache_slots",
    "disable_attention",
    "enable_attention",
    "make_prompt_cache",
    "model_shape",
]

register()


def model_shape(model: nn.Module) -> ModelShape:
    """Layers, heads and widths of the caches that are compressed, seen by trying the model out.

    Raises:
        ValueError: There is none, or the layers differ.
    """
    slots = [slot for slot in cache_slots(model) if slot.reason is None]
    shapes = {(s.kv_heads, s.key_dim, s.value_dim) for s in slots}
    if len(shapes) != 1 or len({s.layer for s in slots}) != len(slots):
        raise ValueError(
            "[model_shape] all layers must have one cache of equal heads and head_dim, but got "
            f"{sorted(shapes)} in {len(slots)} caches."
        )
    return ModelShape(model_type(model), len(slots), *shapes.pop())


def make_prompt_cache(
    model: nn.Module,
    codec: Calibration | str | Path,
    *,
    config: CacheConfig | None = None,
    max_kv_size: None = None,
) -> list[Any]:
    """The compressed counterpart of ``mlx_lm.models.cache.make_prompt_cache``.

    Args:
        model: An mlx_lm model. docs/architectures.md says what is compressed of which.
        codec: The name of a preset that needs no calibration, such as ``"centred-4bit"`` (see
            :data:`vqkv_ext.codecs.presets.PRESETS`), a :class:`Calibration`, or the path of a
            calibration file.
        config: Which tokens stay uncompressed; by default 4 sinks and a window of 64.
        max_kv_size: Not offered: a compressed cache forgets nothing.

    Returns:
        The model's own list of caches, to pass as ``prompt_cache``, with a
        :class:`vqkv_ext.cache.CompressedKVCache` in place of every ``KVCache`` whose layer can read
        one. Caches that do not grow (sliding windows, recurrent states) stay as they are.

    Raises:
        ValueError: No layer can be served, or the calibration is of another model.
    """
    if max_kv_size is not None:
        raise ValueError(
            "[make_prompt_cache] max_kv_size must be None, as a compressed cache keeps every "
            f"token, but got {max_kv_size!r}."
        )
    windows = vars(config or CacheConfig())
    if isinstance(codec, str) and codec in presets.PRESETS:
        return KVCacheBuilder.for_model(model, KVCacheConfig(key=codec, value=codec, **windows))
    if isinstance(codec, str) and codec in (*vecinfer.PRESETS, *query_aware.PRESETS):
        raise ValueError(
            f"[make_prompt_cache] {codec} must be calibrated: run `vqkv calibrate MODEL TEXT "
            f"--preset {codec} -o FILE` and pass FILE, but got the bare name."
        )
    calibration = codec if isinstance(codec, Calibration) else Calibration.load(codec)
    calibration.check(model_shape(model))
    served = [slot.layer for slot in cache_slots(model) if slot.reason is None]
    pairs = zip(served, calibration.layers, strict=True)
    per_layer = {layer: {"key": c.key, "value": c.value} for layer, c in pairs}
    return KVCacheBuilder.for_model(model, KVCacheConfig(per_layer=per_layer, **windows))
