"""Shapes of attention, caches of that shape with random tokens, and the ways to attend to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache

from vqkv_ext import ops
from vqkv_ext.cache import CompressedArray, CompressedKVCache
from vqkv_ext.codecs import vecinfer
from vqkv_ext.codecs.presets import codec

Handles = tuple[CompressedArray, CompressedArray]
Call = Callable[[], mx.array]
CHUNK = 8192  # tokens by which caches are filled


@dataclass(frozen=True)
class Shape:
    """Written ``[BATCH x] HEADS/KV_HEADS x HEAD_DIM : [QUERIES x] TOKENS`` without spaces, such as
    ``8x32/8x128:32768``; the queries are the last of the tokens, and causal."""

    heads: int
    kv_heads: int
    width: int
    tokens: int
    batch: int = 1
    queries: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        found = re.fullmatch(r"(?:(\d+)x)?(\d+)/(\d+)x(\d+):(?:(\d+)x)?(\d+)", text)
        if not found:
            raise ValueError(f"a shape must read like 32/8x128:4096, but got {text!r}")
        batch, heads, kv_heads, width, queries, tokens = (int(g or 1) for g in found.groups())
        if 0 in (batch, heads, kv_heads, width, queries) or heads % kv_heads or queries > tokens:
            raise ValueError(
                f"a shape must have whole groups of heads and no more queries than tokens, but got "
                f"{text!r}"
            )
        return cls(heads, kv_heads, width, tokens, batch, queries)

    @property
    def family(self) -> str:
        """All but the context."""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{batch}{self.heads}/{self.kv_heads}x{self.width}"

    def __str__(self) -> str:
        queries = f"{self.queries}x" if self.queries > 1 else ""
        return f"{self.family}:{queries}{self.tokens}"

    @property
    def operations(self) -> int:
        """Of the two matrix products, a multiplication and an addition being two."""
        pairs = self.queries * self.tokens - self.queries * (self.queries - 1) // 2
        return 4 * self.batch * self.heads * self.width * pairs


class Case:
    """Random queries, keys and values, and caches that hold them."""

    def __init__(self, shape: Shape, dtype: mx.Dtype):
        mx.random.seed(0)
        self.shape, self.dtype = shape, dtype
        self.scale = shape.width**-0.5
        self.mask = "causal" if shape.queries > 1 else None
        self.k, self.v = (self._normal(shape.kv_heads, shape.tokens) for _ in "kv")
        self.q = self._normal(shape.heads, shape.queries)
        mx.eval(self.k, self.v, self.q)

    def _normal(self, heads: int, tokens: int) -> mx.array:
        x = mx.random.normal((self.shape.batch, heads, tokens, self.shape.width))
        return x.astype(self.dtype)

    def cache(self, preset: str) -> tuple[CompressedKVCache, Handles]:
        """A cache of a preset with all tokens, and what attention reads."""
        width = self.shape.width
        if preset in vecinfer.PRESETS:
            some = (x[0, :, :1000] for x in (self.k, self.v))
            pair = vecinfer.fit(vecinfer.PRESETS[preset], *some, iterations=1)
        else:
            pair = codec(preset, width, "key"), codec(preset, width, "value")
        cache = CompressedKVCache(*pair)
        first = self.shape.tokens - self.shape.queries
        for at in range(0, first, CHUNK):
            end = min(at + CHUNK, first)
            cache.update_and_fetch(*(x[:, :, at:end] for x in (self.k, self.v)))
            mx.eval(cache.state)
        handles = cache.update_and_fetch(*(x[:, :, first:] for x in (self.k, self.v)))
        mx.eval(cache.state, [h.packed.tail for h in handles])
        return cache, handles

    def ours(self, handles: Handles) -> Call:
        k, v = (h.packed for h in handles)
        return lambda: ops.attention(self.q, k, v, scale=self.scale, mask=self.mask)

    def dense(self) -> mx.array:
        return self._fast(self.k, self.v)

    def _fast(self, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(self.q, k, v, scale=self.scale, mask=self.mask)

    def decoded(self, cache: CompressedKVCache, handles: Handles) -> Call:
        """Decodes all codes, then attends to dense arrays."""

        def one(i: int) -> mx.array:
            whole = (self.k, self.v)[i]
            layout, side = handles[i].packed.layout, (cache.key_codec, cache.value_codec)[i]
            end = layout.sink_tokens + cache.coded_tokens
            x = side.decode(cache._bodies[i])[:, :, : cache.coded_tokens].astype(whole.dtype)
            return mx.concatenate([whole[:, :, : layout.sink_tokens], x, whole[:, :, end:]], 2)

        return lambda: self._fast(one(0), one(1))

    def mlx_lm_4bit(self) -> Call:
        """The path of mlx-lm's own quantised cache.

        Raises:
            RuntimeError, ValueError: The backend cannot quantise this.
        """
        cache = QuantizedKVCache(group_size=64, bits=4)
        for at in range(0, self.shape.tokens, CHUNK):
            quantized = cache.update_and_fetch(
                *(x[:, :, at : at + CHUNK] for x in (self.k, self.v))
            )
            mx.eval(quantized)
        # it scales its queries in place: give it an array object of its own
        return lambda: quantized_scaled_dot_product_attention(
            self.q[...], *quantized, scale=self.scale, mask=self.mask, group_size=64, bits=4
        )


def least_bytes(case: Case, cache: CompressedKVCache, handles: Handles) -> int:
    """Bytes that a call must move: what is held of the keys and values, queries and results once.
    Tables and the cache's spare room are not counted."""
    shape, coded = case.shape, cache.coded_tokens
    total = 2 * case.q.nbytes
    for handle in handles:
        body, tail = handle.packed.body, handle.packed.tail
        if coded:
            total += sum(a.nbytes for a in body.arrays()) * coded // body.codes.shape[2]
        total += tail.nbytes // tail.shape[2] * (shape.tokens - coded)
    return total
