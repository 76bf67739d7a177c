"""The cache of each method under its own name: one-line presets of the one cache class."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .cache import CacheConfig, CompressedKVCache
from .codecs import LayerCodecs
from .codecs.presets import BITS
from .config import KVCacheConfig

__all__ = [
    "QJLKVCache",
    "TrellisKVCache",
    "TurboQuantKVCache",
    "TurboQuantProdKVCache",
    "TurboQuantRVQKVCache",
    "VecInferKVCache",
]


def _of(
    name: str,
    method: str,
    head_dim: int,
    bits: int,
    value_head_dim: int | None,
    config: CacheConfig | None,
) -> CompressedKVCache:
    offered = BITS[method]
    if type(bits) is not int or bits not in offered:
        *most, last = offered
        listed = f"{', '.join(map(str, most))} or {last}"
        raise ValueError(f"[{name}] bits must be {listed}, but got {bits!r}.")
    pair = KVCacheConfig(method=method, bits=bits).codecs(
        head_dim, head_dim if value_head_dim is None else value_head_dim
    )
    return CompressedKVCache(*pair, config)


def TurboQuantKVCache(
    head_dim: int,
    bits: int = 4,
    *,
    value_head_dim: int | None = None,
    config: CacheConfig | None = None,
) -> CompressedKVCache:
    """A cache of TurboQuant codes (arXiv 2504.19874): rotated vectors by Lloyd-Max levels.

    Args:
        head_dim: Values per key, 8 to 576.
        bits: 1, 2, 3 or 4 per value; each vector has a scale of 2 bytes besides.
        value_head_dim: Values per value vector; by default ``head_dim``.
        config: Which tokens stay uncompressed.

    Raises:
        ValueError: Bits or head dimensions that are not offered.
    """
    return _of("TurboQuantKVCache", "turboquant", head_dim, bits, value_head_dim, config)


def TurboQuantProdKVCache(
    head_dim: int,
    bits: int = 4,
    *,
    value_head_dim: int | None = None,
    config: CacheConfig | None = None,
) -> CompressedKVCache:
    """A cache of TurboQuant-Prod keys, whose last bit is the sign of a sketched residual, and of
    TurboQuant values.

    Args:
        head_dim: Values per key, a multiple of 8 up to 288.
        bits: 2, 3 or 4 per value, the sign included.
        value_head_dim, config: See :func:`TurboQuantKVCache`.

    Raises:
        ValueError: Bits or head dimensions that are not offered.
    """
    return _of("TurboQuantProdKVCache", "turboquant-prod", head_dim, bits, value_head_dim, config)


def TurboQuantRVQKVCache(
    head_dim: int,
    bits: int = 4,
    *,
    value_head_dim: int | None = None,
    config: CacheConfig | None = None,
) -> CompressedKVCache:
    """A cache of TurboQuant codes in two stages of half the bits each, optimised jointly.

    Args:
        head_dim: Values per key, 8 to 576.
        bits: 2 or 4 per value, both stages together.
        value_head_dim, config: See :func:`TurboQuantKVCache`.

    Raises:
        ValueError: Bits or head dimensions that are not offered.
    """
    return _of("TurboQuantRVQKVCache", "turboquant-rvq", head_dim, bits, value_head_dim, config)


def QJLKVCache(
    head_dim: int,
    bits: int = 4,
    *,
    value_head_dim: int | None = None,
    config: CacheConfig | None = None,
) -> CompressedKVCache:
    """A cache of QJL keys (arXiv 2406.03482), the signs of a random sketch, and of TurboQuant
    values.

    Args:
        head_dim: Values per key; times ``bits`` a multiple of 8 up to 576.
        bits: 1, 2 or 4 rows of the sketch per value of a key, and bits per value of a value.
        value_head_dim, config: See :func:`TurboQuantKVCache`.

    Raises:
        ValueError: Bits or head dimensions that are not offered.
    """
    return _of("QJLKVCache", "qjl", head_dim, bits, value_head_dim, config)


def TrellisKVCache(
    head_dim: int,
    bits: int = 4,
    *,
    value_head_dim: int | None = None,
    config: CacheConfig | None = None,
) -> CompressedKVCache:
    """A cache of trellis codes (Marcellin and Fischer 1990; QTIP, arXiv 2406.11235) of rotated
    vectors, keys relative to the mean of their block.

    Args:
        head_dim: Values per key, 8 to 576.
        bits: 1, 2, 3 or 4 per value; each vector has 8 - ``bits`` bits and a scale of 2 bytes
            besides, and each block of keys a mean of one byte per channel.
        value_head_dim, config: See :func:`TurboQuantKVCache`.

    Raises:
        ValueError: Bits or head dimensions that are not offered.
    """
    return _of("TrellisKVCache", "trellis", head_dim, bits, value_head_dim, config)


def VecInferKVCache(
    codecs: LayerCodecs | None = None,
    *,
    head_dim: int | None = None,
    key_codebook: mx.array | np.ndarray | None = None,
    value_codebook: mx.array | np.ndarray | None = None,
    smooth_factors: mx.array | np.ndarray | Sequence[float] | None = None,
    value_head_dim: int | None = None,
    config: CacheConfig | None = None,
) -> CompressedKVCache:
    """A cache of VecInfer codes (arXiv 2510.06175), of calibrated codecs or of given codebooks.

    Args:
        codecs: One of ``Calibration.load(path).layers``; nothing but ``config`` besides.
        head_dim: Values per key.
        key_codebook: ``[rows, d]``, ``[G, rows, d]`` or ``[H, 1 or G, rows, d]`` of 256 or 4096
            rows, any floating dtype.
        value_codebook: Likewise; without one values are TurboQuant codes of the keys' size.
        smooth_factors: Divisors of the keys' channels, ``[D]`` or ``[H, D]``; by default 1.
        value_head_dim: Values per value vector; by default ``head_dim``.
        config: Which tokens stay uncompressed.

    Raises:
        ValueError: Neither or both of ``codecs`` and ``head_dim`` with ``key_codebook``, or
            codebooks that do not fit the head dimensions.
    """
    given = (head_dim, key_codebook, value_codebook, smooth_factors, value_head_dim)
    if codecs is not None:
        if any(x is not None for x in given):
            raise ValueError(
                "[VecInferKVCache] codecs must come without head_dim, codebooks and factors, but "
                "got both."
            )
        return CompressedKVCache(codecs.key, codecs.value, config)
    if head_dim is None or key_codebook is None:
        missing = "codecs and head_dim" if head_dim is None else "codecs and key_codebook"
        raise ValueError(
            "[VecInferKVCache] codecs, or head_dim and key_codebook, must be given, but got no "
            f"{missing}."
        )
    key_bits, key_dims = _size("key_codebook", key_codebook)
    value_bits, value_dims = key_bits, key_dims
    if value_codebook is not None:
        value_bits, value_dims = _size("value_codebook", value_codebook)
    described = KVCacheConfig(
        method="vecinfer",
        key_sub_dim=key_dims,
        value_sub_dim=value_dims,
        key_codebook_bits=key_bits,
        value_codebook_bits=value_bits,
        key_codebook=key_codebook,
        value_codebook=value_codebook,
        smooth_factors=smooth_factors,
    )
    pair = described.codecs(head_dim, head_dim if value_head_dim is None else value_head_dim)
    return CompressedKVCache(*pair, config)


def _size(name: str, codebook: mx.array | np.ndarray) -> tuple[int, int]:
    """Bits and values of a code."""
    if codebook.ndim < 2 or codebook.shape[-2] not in (256, 4096):
        raise ValueError(
            f"[VecInferKVCache] {name} must be [..., 256 or 4096, d], but got shape "
            f"{codebook.shape}."
        )
    return codebook.shape[-2].bit_length() - 1, codebook.shape[-1]
