"""What a saved cache says of a codec, and the codec built again from it."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx

from . import presets, query_aware
from .base import Codec
from .product import ProductCodec
from .transforms import SmoothedHadamard

Recipe = tuple[str, str, int, mx.array | None, mx.array | None]
"""Fingerprint, name, width; of a product code its codebook; of a fitted basis the diagonal."""

_built: weakref.WeakValueDictionary[str, Codec] = weakref.WeakValueDictionary()


def describe(codec: Codec) -> Recipe:
    """What :func:`build` needs. Codecs of presets are named; what is fitted is stored whole."""
    table = diagonal = None
    known = codec.transform is None or type(codec.transform) is SmoothedHadamard
    if type(codec) is ProductCodec and known:
        table = codec.code.table
        diagonal = None if codec.transform is None else codec.transform.diagonal
    elif codec.name in query_aware.PRESETS:
        diagonal = codec.transform.diagonal  # type: ignore[union-attr]
    return codec.fingerprint, codec.name, codec.width, table, diagonal


def build(recipe: Any) -> Codec:
    """The codec of a recipe; equal recipes share one.

    Raises:
        ValueError: The codec is neither a preset's nor a product code, or what was built is not
            what was saved.
    """
    fingerprint, name, width, table, diagonal = recipe
    held = _built.get(fingerprint)
    if held is not None:
        return held
    if table is not None and table.size:
        basis = SmoothedHadamard(diagonal) if diagonal is not None and diagonal.size else None
        offered = [ProductCodec(name, int(width), table, basis)]
    elif name in query_aware.PRESETS and diagonal is not None and diagonal.size:
        offered = [query_aware.key_codec(name, mx.abs(diagonal))]
    elif name in presets.PRESETS:
        offered = [presets.codec(name, int(width), side) for side in ("key", "value")]
    else:
        raise ValueError(
            f"[from_state] the codec must be one of a preset or a product code, but got {name!r}; "
            "give key_codec and value_codec."
        )
    for codec in offered:
        if codec.fingerprint == fingerprint:
            _built[fingerprint] = codec
            return codec
    raise ValueError(
        f"[from_state] {name} must have the fingerprint {fingerprint!r} of the saved codec, but "
        f"got {' and '.join(repr(c.fingerprint) for c in offered)}: it was made by another version."
    )
