"""One description of a compressed cache, and what builds caches from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .cache import CacheConfig, CompressedKVCache
from .codecs import Codec, ProductCodec
from .codecs.presets import DEFAULT, codec
from .codecs.transforms import SmoothedHadamard

if TYPE_CHECKING:
    from .adapters.layers import CacheSlot

METHODS = (
    "vecinfer",
    "turboquant",
    "turboquant-prod",
    "turboquant-rvq",
    "qjl",
    "centred",
    "trellis",
    "none",
)


@dataclass(frozen=True)
class KVCacheConfig:
    """How keys and values are stored, and which tokens stay uncompressed.

    Either ``key`` and ``value`` name presets (:data:`vqkv_ext.codecs.presets.PRESETS`; by default
    both ``"centred-4bit"``) or are codecs, or ``method`` and the fields after it describe one.

    Attributes:
        key, value: Preset names or codecs, independent of each other.
        sink_tokens, window, block, prefill, start: See :class:`vqkv_ext.cache.CacheConfig`.
        per_layer: Layer index to the fields that differ there, such as
            ``{0: {"key": "none", "value": "none"}}``.
        use_metal_kernels: See :func:`vqkv_ext.ops.native`.
        method: One of :data:`METHODS`, instead of ``key`` and ``value``.
        head_dim: Values per key and value; needed by :meth:`KVCacheFactory.create`.
        bits: Of ``method``, other than ``"vecinfer"``.
        key_sub_dim, value_sub_dim: Values per code of VecInfer.
        key_codebook_bits, value_codebook_bits: 8 or 12, the size of a VecInfer codebook.
        smooth_factors: VecInfer's smoothing, ``[D]`` or ``[H, D]``.
        key_codebook, value_codebook: ``[rows, d]``, ``[G, rows, d]`` or ``[H, 1 or G, rows, d]``
            with ``2**codebook_bits`` rows. Without a value codebook, values are stored as
            ``"turboquant"`` of the same size.
    """

    key: str | Codec | None = None
    value: str | Codec | None = None
    sink_tokens: int = 4
    window: int = 64
    block: int = 64
    per_layer: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    use_metal_kernels: bool | None = None
    prefill: Literal["coded", "dense"] = "coded"
    start: int = 0
    method: str | None = None
    head_dim: int | None = None
    bits: int | None = None
    key_sub_dim: int = 4
    value_sub_dim: int = 4
    key_codebook_bits: int = 8
    value_codebook_bits: int = 8
    smooth_factors: mx.array | np.ndarray | Sequence[float] | None = None
    key_codebook: mx.array | np.ndarray | None = None
    value_codebook: mx.array | np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(
                f"[KVCacheConfig] method must be one of {', '.join(METHODS)}, but got "
                f"{self.method!r}."
            )
        if self.method is not None and (self.key is not None or self.value is not None):
            raise ValueError(
                "[KVCacheConfig] method must come without key and value, but got both."
            )
        for name in ("key_codebook_bits", "value_codebook_bits"):
            if self.method == "vecinfer" and getattr(self, name) not in (8, 12):
                raise ValueError(
                    f"[KVCacheConfig] {name} must be 8 or 12, but got {getattr(self, name)!r}."
                )
        if self.method == "vecinfer" and self.key_codebook is None:
            raise ValueError(
                "[KVCacheConfig] vecinfer must have a key_codebook (`vqkv calibrate` fits one per "
                "layer), but got none."
            )
        self.windows()

    def windows(self) -> CacheConfig:
        """The part that says which tokens stay uncompressed."""
        return CacheConfig(
            self.sink_tokens,
            self.window,
            self.block,
            self.use_metal_kernels,
            self.prefill,
            self.start,
        )

    def layer(self, index: int) -> KVCacheConfig:
        """The configuration of one layer."""
        return replace(self, per_layer={}, **self.per_layer.get(index, {}))

    def codecs(self, key_width: int, value_width: int) -> tuple[Codec, Codec]:
        """The codecs for keys and values of these widths.

        Raises:
            ValueError: Unknown presets, or widths that the methods cannot take.
        """
        if self.method == "vecinfer":
            return self._vecinfer(key_width, value_width)
        key, value = self.key, self.value
        if self.method is not None:
            name = "none" if self.method == "none" else f"{self.method}-{self.bits}bit"
            key = value = name
        key = DEFAULT if key is None else key
        value = DEFAULT if value is None else value
        return (
            codec(key, key_width, "key") if isinstance(key, str) else key,
            codec(value, value_width, "value") if isinstance(value, str) else value,
        )

    def _vecinfer(self, key_width: int, value_width: int) -> tuple[Codec, Codec]:
        for side, width in (("key", key_width), ("value", value_width)):
            if width % getattr(self, f"{side}_sub_dim"):
                raise ValueError(
                    f"[KVCacheConfig] {side}_sub_dim must divide head_dim {width}, but got "
                    f"{getattr(self, f'{side}_sub_dim')}."
                )
        smooth = 1.0 if self.smooth_factors is None else self.smooth_factors
        factors = np.array(smooth, np.float32)
        if factors.ndim < 2:
            factors = np.broadcast_to(factors, (1, key_width)).copy()
        basis = SmoothedHadamard(mx.array(factors))
        bits = self.key_codebook_bits
        book = _book(self.key_codebook, bits, self.key_sub_dim)
        key = ProductCodec(f"vecinfer-{bits / self.key_sub_dim:g}bit", key_width, book, basis)
        bits = self.value_codebook_bits
        if self.value_codebook is None:
            size = max(1, bits // self.value_sub_dim)
            return key, codec(f"turboquant-{size}bit", value_width, "value")
        book = _book(self.value_codebook, bits, self.value_sub_dim)
        return key, ProductCodec(f"vecinfer-{bits / self.value_sub_dim:g}bit", value_width, book)


def _book(codebook: mx.array | np.ndarray | None, bits: int, dims: int) -> mx.array:
    book, rows = mx.array(codebook), 1 << bits
    if book.ndim not in (2, 3, 4) or book.shape[-2:] != (rows, dims):
        raise ValueError(
            f"[KVCacheConfig] a codebook must be [{rows}, {dims}], [G, {rows}, {dims}] or "
            f"[H, 1 or G, {rows}, {dims}], but got shape {book.shape}."
        )
    return book.reshape(*(1,) * (4 - book.ndim), *book.shape)


class KVCacheFactory:
    """Builds single caches."""

    @staticmethod
    def create(config: KVCacheConfig) -> CompressedKVCache:
        """A cache for one layer of ``config.head_dim``.

        Raises:
            ValueError: ``head_dim`` is missing, or the method cannot take it.
        """
        if config.head_dim is None:
            raise ValueError("[KVCacheFactory] config must have a head_dim, but got None.")
        return CompressedKVCache(*config.codecs(config.head_dim, config.head_dim), config.windows())


class KVCacheBuilder:
    """Builds the caches of a model."""

    @staticmethod
    def for_model(model: nn.Module, config: KVCacheConfig) -> list[Any]:
        """The caches of an mlx_lm model, to pass as ``prompt_cache``: its own list, with compressed
        ones where its layers can read them. Layers of equal widths that ``per_layer`` does not name
        share their codecs.

        Raises:
            ValueError: The model cannot be served, has another head dimension than the config, or
                ``per_layer`` names layers that are not compressed.
        """
        from .adapters.layers import build, cache_slots

        slots = cache_slots(model)
        served = [slot for slot in slots if slot.reason is None]
        dims = sorted({slot.key_dim for slot in served})
        if config.head_dim is not None and dims != [config.head_dim]:
            raise ValueError(
                f"[KVCacheBuilder] head_dim must be the model's {', '.join(map(str, dims))}, but "
                f"got {config.head_dim}."
            )
        layers = {slot.layer for slot in served}
        if unknown := sorted(set(config.per_layer) - layers):
            raise ValueError(
                "[KVCacheBuilder] per_layer must name layers that are compressed, "
                f"{', '.join(map(str, sorted(layers)))}, but got {', '.join(map(str, unknown))}."
            )
        pairs: dict[Any, tuple[Codec, Codec]] = {}

        def make(slot: CacheSlot) -> CompressedKVCache:
            layer, own = config.layer(slot.layer), slot.layer in config.per_layer
            alike = (slot.place if own else None, slot.key_dim, slot.value_dim)
            if alike not in pairs:
                pairs[alike] = layer.codecs(slot.key_dim, slot.value_dim)
            return CompressedKVCache(*pairs[alike], layer.windows())

        return build(model, slots, make)
