"""How much attention depends on each channel of keys and queries, while a model reads a text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from ..cache import CacheConfig
from ..codecs.query_aware import factors
from ..evaluation import read
from .attention import layer_modules
from .layers import cache_slots, places

_NAME = "scaled_dot_product_attention"
_WINDOWS = CacheConfig()


@dataclass
class _Layer:
    """Sums of one layer: of weights per key ``[H, n]``, and of weighted squares of queries."""

    weights: list[mx.array] = field(default_factory=list)
    queries: mx.array | None = None

    def add(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> None:
        """Count a chunk of queries ``[1, Hq, L, D]`` that see the keys up to their own.

        A score's weight is that of its error in the squared error of the output,
        ``p^2 |v - o|^2``, p being attention and o the output; zero where the key is not coded.
        """
        heads, n = k.shape[1:3]
        q, k, v = (x[0].astype(mx.float32) for x in (q, k, v))
        q = q.reshape(heads, -1, *q.shape[1:])
        length = q.shape[2]
        rows, at = mx.arange(n - length, n)[:, None], mx.arange(n)
        scores = scale * (q @ k[:, None].swapaxes(-1, -2))
        p = mx.softmax(mx.where(at <= rows, scores, -mx.inf), axis=-1)
        o = p @ v[:, None]
        products = o @ v[:, None].swapaxes(-1, -2)
        squares = v.square().sum(-1)[:, None, None]
        distance = squares - 2 * products + o.square().sum(-1, keepdims=True)
        coded = (at >= _WINDOWS.sink_tokens) & (at <= rows - _WINDOWS.window)
        weights = mx.where(coded, p.square() * mx.maximum(distance, 0.0), 0.0)
        seen = (weights.sum(-1, keepdims=True) * q.square()).sum((1, 2))
        self.queries = seen if self.queries is None else self.queries + seen
        self.weights.append(weights.sum((1, 2)))
        mx.eval(self.queries, self.weights[-1])

    def keys(self, k: mx.array) -> mx.array:
        """Weighted squares, ``[H, D]``, of keys ``[H, N, D]`` relative to their block's mean."""
        sinks, block = _WINDOWS.sink_tokens, _WINDOWS.block
        k = k.astype(mx.float32)
        weights = mx.zeros(k.shape[:2])
        for part in self.weights:
            weights[:, : part.shape[1]] += part
        blocks = (k.shape[1] - sinks) // block
        k, weights = (x[:, sinks : sinks + blocks * block] for x in (k, weights))
        parts = k.reshape(k.shape[0], blocks, block, -1)
        rest = (parts - parts.mean(2, keepdims=True)).reshape(k.shape)
        return (weights[..., None] * rest.square()).sum(1)


def key_factors(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    chunk: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> list[mx.array]:
    """What the channels of keys are divided by, for every layer that is compressed.

    Args:
        model: An mlx_lm model.
        tokens: Of the text, read as one sequence.
        chunk: Tokens per forward pass.
        progress: Called after every pass with the tokens read and their total.

    Returns:
        ``[H, D]`` for each layer; see :func:`vqkv_ext.codecs.query_aware.factors`.
    """
    slots = [slot for slot in cache_slots(model) if slot.reason is None]
    caches = stock.make_prompt_cache(model)
    held = dict(places(caches))
    layers = {id(held[slot.place]): _Layer() for slot in slots}
    with _watched(model, layers):
        read(model, caches, tokens, chunk, progress)
    found = []
    for slot in slots:
        cache = held[slot.place]
        layer = layers[id(cache)]
        keys = layer.keys(cache.keys_and_values()[0][0])
        found.append(factors(keys, mx.zeros_like(keys) if layer.queries is None else layer.queries))
    mx.eval(found)
    return found


@contextlib.contextmanager
def _watched(model: nn.Module, layers: dict[int, _Layer]) -> Iterator[None]:
    """Within this context attention of the model adds what it gets to its cache's layer."""
    kept = [(module, getattr(module, _NAME)) for module in layer_modules(model)]

    def watching(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def watch(
            q: mx.array,
            k: mx.array,
            v: mx.array,
            cache: Any,
            scale: float,
            *more: Any,
            **rest: Any,
        ) -> mx.array:
            if id(cache) in layers:
                layers[id(cache)].add(q, k, v, scale)
            return attention(q, k, v, cache, scale, *more, **rest)

        return watch

    for module, attention in kept:
        setattr(module, _NAME, watching(attention))
    try:
        yield
    finally:
        for module, attention in kept:
            setattr(module, _NAME, attention)
