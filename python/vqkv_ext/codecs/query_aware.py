"""Trellis codes of keys in a basis that knows the queries; calibrated.

Attention reads a key through ``q . k``, so an error in a channel costs what queries have there.
Keys are divided, and queries multiplied, by a factor per channel before the rotation spreads the
error of the code evenly. The factors that make the expected error of the scores least are
``(E[k^2] / E[q^2])^(1/4)``, the means being over pairs of a query and a key it reads as a code,
weighted by how much attention depends on their score (NOVA-KV has a full matrix in their place and
no weights).
"""

from __future__ import annotations

import mlx.core as mx

from . import presets
from .base import Codec
from .rotations import random_signs
from .transforms import SmoothedHadamard, has_hadamard
from .trellis import TrellisCodec

PRESETS: dict[str, int] = {f"query-aware-{bits}bit": bits for bits in (1, 2, 3, 4)}
"""Bits per value of each preset."""

_SEED = presets.SEEDS["key"]


def factors(keys: mx.array, queries: mx.array) -> mx.array:
    """What the channels of keys are divided by.

    Args:
        keys, queries: Weighted sums of squares per channel, ``[H, D]``; keys relative to the mean
            of their block.

    Returns:
        ``[H, D]`` float32, positive, of geometric mean 1. Channels in which either sum is zero
        count as having the least positive one of their head.
    """
    keys, queries = (_positive(x.astype(mx.float32)) for x in (keys, queries))
    log = (mx.log(keys) - mx.log(queries)) / 4
    return mx.exp(log - log.mean(axis=-1, keepdims=True))


def _positive(x: mx.array) -> mx.array:
    least = mx.where(x > 0, x, mx.inf).min(axis=-1, keepdims=True)
    return mx.maximum(x, mx.where(mx.isfinite(least), least, 1.0))


def build(
    name: str, smooth: mx.array, key_width: int, value_width: int
) -> tuple[TrellisCodec, Codec]:
    """The codecs of one layer; values are those of the trellis preset of the same size.

    Args:
        name: One of :data:`PRESETS`.
        smooth: From :func:`factors`, ``[H, D]``.
        key_width, value_width: Head dimensions.

    Raises:
        ValueError: A head dimension the method cannot take.
    """
    check_width(name, key_width)
    return key_codec(name, smooth), presets.codec(value_preset(name), value_width, "value")


def value_preset(name: str) -> str:
    """The preset that values have beside keys of a preset: trellis codes of the same size where
    keys are query-aware, else the preset itself."""
    return f"trellis-{PRESETS[name]}bit" if name in PRESETS else name


def key_codec(name: str, smooth: mx.array) -> TrellisCodec:
    """The codec of keys; see :func:`build`."""
    width = smooth.shape[-1]
    basis = SmoothedHadamard(smooth.astype(mx.float32) * random_signs(width, _SEED))
    heads = smooth.shape[0] if smooth.shape[0] > 1 else None
    return TrellisCodec(name, width, PRESETS[name], centred=True, basis=basis, heads=heads)


def check_width(name: str, key_width: int) -> None:
    """Refuse head dimensions without a Hadamard matrix.

    Raises:
        ValueError: Naming the dimension.
    """
    if not has_hadamard(key_width):
        raise ValueError(
            f"[{name}] head_dim must be 2^k * m with m in {{1, 12, 20, 28}}, but got {key_width}."
        )
