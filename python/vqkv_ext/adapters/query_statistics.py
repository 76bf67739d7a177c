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
from ..codecs import Codec
from ..codecs.query_aware import factors
from ..evaluation import read
from .attention import layer_modules
from .layers import cache_slots, places

_NAME = "scaled_dot_product_attention"
_WINDOWS = CacheConfig()


@dataclass(frozen=True)
class LayerStatistics:
    """What one layer held after a text, and how much attention depended on it.

    A score's weight is that of its error in the squared error of the output, ``p^2 |v - o|^2``, p
    being attention and o the output; zero where the key is not coded.

    Attributes:
        keys: After RoPE, ``[H, N, D]``.
        values: ``[H, N, Dv]``.
        weights: Sum of the weights of each key's scores, ``[H, N]`` float32.
        queries: Weighted squares of queries, ``[H, D]`` float32.
    """

    keys: mx.array
    values: mx.array
    weights: mx.array
    queries: mx.array

    def factors(self) -> mx.array:
        """:func:`vqkv_ext.codecs.query_aware.factors` of the layer, ``[H, D]``."""
        blocks = self._coded(self.keys)
        blocks = blocks.reshape(blocks.shape[0], -1, _WINDOWS.block, blocks.shape[-1])
        rest = (blocks - blocks.mean(2, keepdims=True)).flatten(1, 2)
        return factors(self._squares(rest), self.queries)

    def score_error(self, codec: Codec) -> float:
        """Sum of the weighted squared errors of scores that coded keys make, over pairs and heads.

        That of a pair is taken to be ``sum q_c^2 e_c^2`` over channels, as errors of a rotated code
        are nearly uncorrelated, and queries to be independent of the error of the key they read.
        """
        keys, block = self._coded(self.keys), _WINDOWS.block
        found = codec.decode(codec.encode(keys[None], block=block), block)[0]
        total = self._coded(self.weights).sum(1)
        error = (self.queries * self._squares(found - keys)).sum(-1)
        return (error / mx.where(total > 0, total, 1.0)).sum().item()

    def _squares(self, x: mx.array) -> mx.array:
        """Weighted squares, ``[H, D]``, of what belongs to coded keys."""
        return (self._coded(self.weights)[..., None] * x.square()).sum(1)

    @staticmethod
    def _coded(x: mx.array) -> mx.array:
        """The whole blocks after the sinks of ``[H, N, ...]``, float32."""
        sinks, block = _WINDOWS.sink_tokens, _WINDOWS.block
        return x[:, sinks : sinks + (x.shape[1] - sinks) // block * block].astype(mx.float32)


@dataclass
class _Layer:
    """Sums of one layer: of weights per key ``[H, n]``, and of weighted squares of queries."""

    weights: list[mx.array] = field(default_factory=list)
    queries: mx.array | None = None

    def add(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> None:
        """Count a chunk of queries ``[1, Hq, L, D]`` that see the keys up to their own."""
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

    def statistics(self, keys: mx.array, values: mx.array) -> LayerStatistics:
        """With what the cache held at the end, ``[H, N, D]`` and ``[H, N, Dv]``."""
        weights = mx.zeros(keys.shape[:2])
        for part in self.weights:
            weights[:, : part.shape[1]] += part
        empty = mx.zeros((keys.shape[0], keys.shape[2]))
        queries = empty if self.queries is None else self.queries
        return LayerStatistics(keys, values, weights, queries)


def statistics(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    chunk: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerStatistics]:
    """Let a model read a text and watch every layer that is compressed.

    Args:
        model: An mlx_lm model.
        tokens: Of the text, read as one sequence.
        chunk: Tokens per forward pass.
        progress: Called after every pass with the tokens read and their total.

    Returns:
        One for each layer, evaluated.
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
        keys, values = (x[0] for x in cache.keys_and_values())
        found.append(layers[id(cache)].statistics(keys, values))
    mx.eval([list(vars(layer).values()) for layer in found])
    return found


def key_factors(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    chunk: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> list[mx.array]:
    """What the channels of keys are divided by, for every layer that is compressed.

    Args: as for :func:`statistics`.

    Returns:
        ``[H, D]`` for each layer; see :func:`vqkv_ext.codecs.query_aware.factors`.
    """
    watched = statistics(model, tokens, chunk=chunk, progress=progress)
    found = [layer.factors() for layer in watched]
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
