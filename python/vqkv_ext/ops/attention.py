"""Attention over codes."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from .. import _ext, reference
from ..packed import CodedBody, PackedKV, Transform
from .native import executor, native

_log = logging.getLogger("vqkv_ext")


def coded(b: CodedBody) -> _ext.Coded:
    """A body as the native attention takes it."""
    pair = None if b.pair is None else coded(b.pair)
    table, stride = b.code.table, b.code.stride
    return _ext.Coded(b.codes, table, stride, b.scales, b.centres, b.centre_scales, pair)


def _decoded(b: CodedBody, block: int, width: int, channels: int) -> mx.array:
    """Tokens of vectors of ``width`` values in the code basis, ``[B, H, S, channels]``."""
    own = channels if b.pair is None else width
    x = reference.decode(
        b.codes, b.code.table, b.code.stride, block, b.scales, b.centres, b.centre_scales
    )[..., :own]
    if b.pair is None:
        return x
    second = _decoded(b.pair, block, channels - own, channels - own)
    return mx.concatenate([x, second], axis=-1)


def attention(
    q: mx.array,
    keys: PackedKV,
    values: PackedKV,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    use_metal_kernels: bool | None = None,
) -> mx.array:
    """Scaled dot-product attention that reads codes directly and never rebuilds K or V.

    A query that sees N tokens reads codes for the body's first
    ``block * max(0, floor((N - sink_tokens - window) / block))`` tokens after the sinks, and the
    tail for the rest, whatever chunk of the prompt it arrives in.

    The logger ``vqkv_ext`` says at debug level what computed a call.

    Args:
        q: ``[B, Hq, L, D]``; float32, float16 or bfloat16.
        keys, values: Of ``Hkv`` heads, ``Hq`` a multiple of it; they share one layout, whose
            lengths include the L query tokens. Widths may differ, up to 576.
        scale: Softmax scale.
        mask: None (every query sees all tokens), ``"causal"`` (aligned at the lower right), or an
            array broadcastable to ``[B, Hq, L, N]``, boolean (True = visible) or additive (-1e30 or
            less hides a token), whose columns are logical positions. An array mask excludes nothing
            beyond what it says, except positions that it has no column for.
        sinks: ``[Hq]``, a logit per head that takes part in the softmax without a value.
        use_metal_kernels: See :func:`native`.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of ``q``. A query that sees nothing gives zeros.

    Raises:
        TypeError: Keys or values that are no :class:`PackedKV`.
        ValueError: Shapes or dtypes that do not fit together.
    """
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f"[attention] mask must be None, 'causal' or an array, but got {mask!r}.")
    for name, side in (("keys", keys), ("values", values)):
        if not isinstance(side, PackedKV):
            raise TypeError(
                f"[attention] {name} must be PackedKV, but got {type(side).__name__}; that of a "
                "cache's handle is its `packed`."
            )
    if keys.layout is not values.layout:
        raise ValueError("[attention] keys and values must share one Layout, but got two.")
    computed = _native(q, keys, values, scale, mask, sinks)
    if native(use_metal_kernels, "attention"):
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("attention: native, %s kernels%s", executor(), _fused(keys, values))
        return computed
    # the arguments are checked; what was built is never evaluated
    _log.debug("attention: plain mlx")
    return _plain(q, keys, values, scale, mask, sinks)


def _common(packed: PackedKV, scale: float, mask: str | mx.array | None) -> dict[str, Any]:
    layout = packed.layout
    return {
        "scale": scale,
        "sink_tokens": layout.sink_tokens,
        "window": layout.window,
        "block": layout.block,
        "causal": isinstance(mask, str),
    }


def diagonal(body: CodedBody) -> mx.array | None:
    """Of a basis that is a Hadamard transform: that is left to the kernel."""
    return getattr(body.transform, "diagonal", None)


def _fused(keys: PackedKV, values: PackedKV) -> str:
    sides = (("q", keys), ("output", values))
    fused = [name for name, side in sides if diagonal(side.body) is not None]
    return f", basis of {' and '.join(fused)} fused" if fused else ""


def _joined(parts: list[mx.array], basis: Transform | None, dtype: mx.Dtype) -> mx.array:
    """The output, from one part or from what the codes gave in their basis and the tail."""
    if len(parts) == 1:
        return parts[0]
    return (basis.inverse(parts[0]) + parts[1]).astype(dtype)


def _native(
    q: mx.array,
    keys: PackedKV,
    values: PackedKV,
    scale: float,
    mask: str | mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    key_basis, value_basis = keys.body.transform, values.body.transform
    key_diagonal, value_diagonal = diagonal(keys.body), diagonal(values.body)
    q_code = key_basis.query(q) if key_basis is not None and key_diagonal is None else None
    separate = value_basis is not None and value_diagonal is None
    parts = _ext.attention(
        q,
        q_code,
        keys.layout.rows,
        keys.tail,
        values.tail,
        coded(keys.body),
        coded(values.body),
        mask=mask if isinstance(mask, mx.array) else None,
        sinks=sinks,
        key_diagonal=key_diagonal,
        value_diagonal=value_diagonal,
        separate=separate,
        **_common(keys, scale, mask),
    )
    return _joined(parts, value_basis, q.dtype)


def _plain(
    q: mx.array,
    keys: PackedKV,
    values: PackedKV,
    scale: float,
    mask: str | mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    key_basis, value_basis = keys.body.transform, values.body.transform
    q_code = key_basis.query(q) if key_basis is not None else q
    block = keys.layout.block
    parts = reference.attention(
        q,
        q_code,
        keys.layout.array(q.shape[0]),
        keys.tail,
        values.tail,
        _decoded(keys.body, block, q.shape[-1], q_code.shape[-1]),
        _decoded(values.body, block, *values.tail.shape[-1:] * 2),
        mask=mask if isinstance(mask, mx.array) else None,
        sinks=sinks,
        separate=value_basis is not None,
        **_common(keys, scale, mask),
    )
    return _joined(parts, value_basis, q.dtype)
