"""Let the attention of mlx_lm models read compressed caches.

mlx_lm's model files bind ``scaled_dot_product_attention`` by value, so it is rebound in the modules
that define a model's layers.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..compressed_array import CompressedArray
from .batching import logical_mask, padded_mask

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
        if type(keys) is CompressedArray and type(values) is CompressedArray and sinks is None:
            out = keys.fetched.attend(queries, values.fetched, scale, mask)
            if out is not None:
                return out
        compressed = [isinstance(x, CompressedArray) for x in (keys, values)]
        if not any(compressed):
            mask = padded_mask(mask, queries, cache)
            return original(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks, **kwargs
            )
        if not all(compressed):
            raise TypeError(
                "[attention] keys and values must both come from a compressed cache, but got "
                f"{type(keys).__name__} and {type(values).__name__}."
            )
        dtype = mx.result_type(queries, keys.packed.tail, values.packed.tail)
        return ops.attention(
            queries.astype(dtype),
            keys.astype(dtype).packed,
            values.astype(dtype).packed,
            scale=scale,
            mask=logical_mask(mask, keys),
            sinks=sinks,
            use_metal_kernels=keys.use_metal_kernels,
        )

    scaled_dot_product_attention.vqkv_original = original  # type: ignore[attr-defined]
    models: list[weakref.ref[nn.Module]] = []
    scaled_dot_product_attention.vqkv_models = models  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def layer_modules(model: nn.Module) -> list[ModuleType]:
    """Python modules that the model's own layers are defined in and that bind attention by name."""
    names = {type(m).__module__ for m in model.modules()}
    return [m for n in sorted(names) if (m := sys.modules.get(n)) and hasattr(m, _NAME)]


def bind_model(model: nn.Module) -> list[ModuleType]:
    """Rebind the name for a model; returns the modules in which it was not bound for it before."""
    fresh = []
    for module in layer_modules(model):
        if not hasattr(getattr(module, _NAME), "vqkv_original"):
            setattr(module, _NAME, _dispatching(getattr(module, _NAME)))
        models = getattr(module, _NAME).vqkv_models
        if all(ref() is not model for ref in models):
            models.append(weakref.ref(model))
            fresh.append(module)
    return fresh


def unbind(modules: Iterable[ModuleType], model: nn.Module) -> None:
    """Undo :func:`bind_model` in these modules, which other models may go on using."""
    for module in modules:
        bound = getattr(module, _NAME)
        if hasattr(bound, "vqkv_original"):
            bound.vqkv_models[:] = [
                r for r in bound.vqkv_models if (held := r()) is not None and held is not model
            ]
            if not bound.vqkv_models:
                setattr(module, _NAME, bound.vqkv_original)


def enable_attention(model: nn.Module) -> list[str]:
    """Let the model's attention read compressed caches, besides the stock ones.

    Calling this again changes nothing.

    Returns:
        Names of the modules in which the name is bound now.
    """
    bind_model(model)
    return [m.__name__ for m in layer_modules(model)]


def disable_attention(model: nn.Module) -> None:
    """Undo :func:`enable_attention`. Other models of the same architecture for which it was called
    keep reading compressed caches, and while there are any, so does this one."""
    unbind(layer_modules(model), model)
