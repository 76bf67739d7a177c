"""Bytes of caches, counted on the arrays of real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs import vecinfer
from vqkv_ext.codecs.calibration import ModelShape

MakeCache = Callable[[], list[Any]]


def held_bytes(caches: Sequence[Any]) -> int:
    """Bytes of the arrays that cache objects hold, whatever these report about themselves.

    Codecs are objects of their own, shared by all caches of a model, and not counted.
    """
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, mx.array):
            found[id(value)] = value.nbytes
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)

    for cache in caches:
        walk(vars(cache))
    return sum(found.values())


def random_codecs(preset: str, shape: ModelShape) -> MakeCache:
    """Makes caches of a preset fitted to noise; what they hold is as large as for text."""
    keys, values = _noise(shape, 300, mx.float32)
    pair = vecinfer.fit(vecinfer.PRESETS[preset], keys[0], values[0], iterations=1)
    return lambda: [CompressedKVCache(*pair) for _ in range(shape.layers)]


def fill(
    cache: Sequence[Any],
    shape: ModelShape,
    dtype: mx.Dtype,
    lengths: Sequence[int],
    *,
    chunk: int = 256,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """Grow a cache by random keys and values and count its bytes at each of the rising lengths."""
    keys, values = _noise(shape, chunk, dtype)
    at, sizes = 0, []
    for length in lengths:
        while at < length:
            n = min(chunk, length - at)
            for c in cache:
                c.update_and_fetch(keys[:, :, :n], values[:, :, :n])
                mx.eval(c.state)
            at += n
            if progress is not None:
                progress(at)
        sizes.append(held_bytes(cache))
    return sizes


def _noise(shape: ModelShape, tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.random.normal((1, shape.kv_heads, tokens, width)).astype(dtype)
        for width in (shape.key_dim, shape.value_dim)
    )
    return keys, values
