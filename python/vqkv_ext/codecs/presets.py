"""Codecs by name, for any head dimension: the methods that need no calibration."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ..packed import MAX_CHANNELS
from .base import Codec
from .half import HalfCodec
from .lloyd_max import residual, sphere
from .qjl import QJLCodec
from .scalar import PairCodec, ScalarCodec
from .trellis import TrellisCodec

DEFAULT = "centred-4bit"


def _levels(bits: int, width: int) -> mx.array:
    return mx.array(sphere(bits, width).astype(np.float32))


def _turboquant(name: str, width: int, bits: int, side: str) -> Codec:
    return ScalarCodec(name, width, bits, _levels(bits, width), seed=SEEDS[side])


def _centred(name: str, width: int, bits: int, side: str) -> Codec:
    levels = _levels(bits, width)
    # equal norms gave the lowest KL of the four scales once keys are centred, least squares before
    return ScalarCodec(
        name,
        width,
        bits,
        levels,
        scale="matched",
        centred=side == "key",
        seed=SEEDS[side],
    )


def _residual(name: str, width: int, bits: int, side: str) -> Codec:
    first, second = residual(bits // 2, bits // 2)
    levels = mx.array(np.sort(np.add.outer(first, second).ravel()).astype(np.float32))
    return ScalarCodec(name, width, bits, levels, seed=SEEDS[side])


def _product(name: str, width: int, bits: int, side: str) -> Codec:
    if side == "value":
        return _turboquant(name, width, bits, side)
    levels = _levels(bits - 1, width)
    first = ScalarCodec(name, width, bits - 1, levels, scale="norm", seed=SEEDS[side])
    return PairCodec(name, first, seed=SEEDS["residual"])


def _qjl(name: str, width: int, bits: int, side: str) -> Codec:
    if side == "value":
        return _turboquant(name, width, bits, side)
    return QJLCodec(name, width, bits * width, seed=SEEDS[side])


def _trellis(name: str, width: int, bits: int, side: str) -> Codec:
    return TrellisCodec(name, width, bits, scale="matched", centred=side == "key", seed=SEEDS[side])


SEEDS = {"key": 1, "value": 2, "residual": 3}

_FAMILIES: dict[str, tuple[Callable[[str, int, int, str], Codec], tuple[int, ...]]] = {
    "turboquant": (_turboquant, (1, 2, 3, 4)),
    "turboquant-rvq": (_residual, (2, 4)),
    "turboquant-prod": (_product, (2, 3, 4)),
    "qjl": (_qjl, (1, 2, 4)),
    "centred": (_centred, (2, 3, 4)),
    "trellis": (_trellis, (1, 2, 3, 4)),
}

BITS: dict[str, tuple[int, ...]] = {family: bits for family, (_, bits) in _FAMILIES.items()}
"""Total bits per value that each method offers."""

PRESETS: tuple[str, ...] = (
    *(f"{family}-{b}bit" for family, bits in BITS.items() for b in bits),
    "none",
)
"""Names that :func:`codec` takes."""


def codec(name: str, width: int, side: str) -> Codec:
    """The codec of a preset for keys or values.

    Args:
        name: One of :data:`PRESETS`.
        width: Head dimension.
        side: ``"key"`` or ``"value"``. Methods that code keys only (QJL, the sketched residual of
            TurboQuant-Prod) take TurboQuant of the same size for values.

    Raises:
        TypeError: A width that is no integer.
        ValueError: An unknown name, or a head dimension the method cannot take.
    """
    if side not in ("key", "value"):
        raise ValueError(f"[codec] side must be 'key' or 'value', but got {side!r}.")
    if name not in PRESETS:
        raise ValueError(
            f"[codec] the preset must be one of {', '.join(PRESETS)}, but got {name!r}."
        )
    if not isinstance(width, int):
        raise TypeError(f"[{name}] head_dim must be an integer, but got {width!r}.")
    if not 8 <= width <= MAX_CHANNELS:
        raise ValueError(f"[{name}] head_dim must be 8 to {MAX_CHANNELS}, but got {width}.")
    if name == "none":
        return HalfCodec(width)
    family, size = name.removesuffix("bit").rsplit("-", 1)
    return _FAMILIES[family][0](name, width, int(size), side)
