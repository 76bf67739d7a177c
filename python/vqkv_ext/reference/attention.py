"""Attention over codes in plain mlx: decode everything, then softmax."""

from __future__ import annotations

import mlx.core as mx

from .hadamard import hadamard, over_heads

HIDDEN = -1e30
"""An additive mask of this or less hides a token."""


def decode(
    codes: mx.array,
    table: mx.array,
    stride: int,
    block: int,
    scales: mx.array | None = None,
    centres: mx.array | None = None,
    centre_scales: mx.array | None = None,
) -> mx.array:
    """Coded tokens as float32 vectors ``[B, H, S, D]`` in the basis of the code.

    Args:
        codes: ``[B, H, S, bytes]`` uint8, a bit stream per token.
        table: ``[1 or H, 1 or entries, 2**window, dims]``.
        stride: Bits from one entry to the next.
        block: Tokens that share one centre.
        scales, centres, centre_scales: As in :class:`vqkv_ext.packed.CodedBody`.
    """
    heads, groups, rows, dims = table.shape
    window = rows.bit_length() - 1
    entries = (codes.shape[-1] * 8 - window) // stride + 1
    if groups > 1:
        entries = groups
    elif centres is not None:
        entries = centres.shape[-1] // dims
    if window == stride == 8:
        index = codes.astype(mx.int32)
    else:
        # three bytes always hold a window of up to 16 bits at any bit offset
        wide = mx.pad(codes, [(0, 0)] * 3 + [(0, 3)]).astype(mx.int32)
        bit = mx.arange(entries) * stride
        at = bit // 8
        word = wide[..., at] + wide[..., at + 1] * 256 + wide[..., at + 2] * 65536
        index = (word >> (bit % 8)) & (rows - 1)
    if groups > 1:
        index = index + mx.arange(groups) * rows
    if heads > 1:
        index = index + mx.arange(heads)[:, None, None] * (rows * groups)
    x = mx.take(table.astype(mx.float32).reshape(-1, dims), index, axis=0)
    x = x.reshape(*codes.shape[:3], entries * dims)
    if scales is not None:
        x = x * scales.astype(mx.float32)[..., None]
    if centres is not None and centre_scales is not None:
        centre = centres.astype(mx.float32) * centre_scales.astype(mx.float32)[..., None]
        x = x + mx.repeat(centre, block, axis=2)[:, :, : x.shape[2]]
    return x


def visible_tokens(
    layout: mx.array,
    queries: int,
    body: int,
    tail: int,
    sink_tokens: int,
    window: int,
    block: int,
    causal: bool,
    masked: bool = False,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Who reads what: masks over body tokens ``[B, L, S]`` and tail slots ``[B, L, T]`` (bool), and
    the logical positions of the body ``[B, S]`` and of the tail ``[B, T]`` (int32)."""
    length, coded, start = (layout[:, i, None] for i in range(3))
    start = mx.maximum(start, sink_tokens)
    coded = mx.clip(coded, 0, body)
    seen = length - queries + mx.arange(1, queries + 1) if causal else length
    seen = mx.broadcast_to(seen, (layout.shape[0], queries))
    # under an array mask a query may see any token, but reads as codes what it reads by itself
    own = length - queries + mx.arange(1, queries + 1) if masked else seen
    beyond = mx.maximum(own - sink_tokens - window, 0) // block * block
    boundary = sink_tokens + mx.minimum(coded, mx.maximum(start - sink_tokens, beyond))

    seen, boundary = seen[..., None], boundary[..., None]
    slots = mx.arange(tail)
    body_at = mx.broadcast_to(sink_tokens + mx.arange(body), (layout.shape[0], body))
    tail_at = mx.where(slots < sink_tokens, slots, start + slots - sink_tokens)
    # not & and |, whose vmap mixes up entries where one side is not mapped (MLX 0.32)
    in_body = mx.logical_and(body_at[:, None] < boundary, body_at[:, None] < seen)
    in_tail = mx.logical_or(slots < sink_tokens, tail_at[:, None] >= boundary)
    in_tail = mx.logical_and(in_tail, tail_at[:, None] < seen)
    return in_body, in_tail, body_at.astype(mx.int32), tail_at.astype(mx.int32)


def _mask_columns(mask: mx.array, at: mx.array) -> mx.array:
    """Columns ``at`` [B, n] of a mask [..., L, N] broadcastable to [B, Hq, L, N]; [B, Hq, L, n]."""
    while mask.ndim < 4:
        mask = mask[None]
    batch = at.shape[0]
    mask = mx.broadcast_to(mask, (batch, *mask.shape[1:]))
    columns = mask.shape[-1]
    index = mx.clip(at, 0, columns - 1)[:, None, None]
    index = mx.broadcast_to(index, (*mask.shape[:3], at.shape[1]))
    extra = mx.take_along_axis(mask, index, axis=-1)
    if columns == 1:
        return extra
    hidden = mx.array(False) if mask.dtype == mx.bool_ else mx.array(-mx.inf, mask.dtype)
    return mx.where((at < columns)[:, None, None], extra, hidden)


def attention(
    q: mx.array,
    q_code: mx.array,
    layout: mx.array,
    k_tail: mx.array,
    v_tail: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    sink_tokens: int,
    window: int,
    block: int,
    causal: bool,
    separate: bool = False,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> list[mx.array]:
    """Attention over decoded tokens ``keys``, ``values`` [B, Hkv, S, D] (code basis, float32) and a
    tail; the arrays are those of :func:`vqkv_ext.ops.attention`. Rows that see nothing give zeros.
    """
    batch, heads, queries, _ = q.shape
    kv_heads, body, tail = keys.shape[1], keys.shape[2], k_tail.shape[2]
    shape = (batch, heads, queries, v_tail.shape[-1])
    if q.size == 0 or body + tail == 0:  # mx reduces nothing over no tokens
        if separate:
            return [mx.zeros(shape), mx.zeros(shape)]
        return [mx.zeros(shape, q.dtype)]
    in_body, in_tail, body_at, tail_at = visible_tokens(
        layout, queries, body, tail, sink_tokens, window, block, causal, mask is not None
    )
    grouped = lambda x: x.astype(mx.float32).reshape(batch, kv_heads, -1, *x.shape[2:])  # noqa: E731
    over_heads = lambda x: mx.expand_dims(x, 2)  # noqa: E731

    # garbage beyond the last token may be NaN, and 0 * NaN would not be 0, nor its gradient
    clean = lambda x, m: mx.where(m.any(axis=1)[:, None, :, None], x.astype(mx.float32), 0.0)  # noqa: E731
    s_body = scale * grouped(q_code) @ over_heads(clean(keys, in_body)).swapaxes(-1, -2)
    s_tail = scale * grouped(q) @ over_heads(clean(k_tail, in_tail)).swapaxes(-1, -2)
    scores = mx.concatenate([s_body, s_tail], axis=-1).reshape(batch, heads, queries, -1)
    visible = mx.concatenate([in_body, in_tail], axis=-1)[:, None]
    if mask is not None:
        at = mx.concatenate([body_at, tail_at], axis=-1)
        extra = _mask_columns(mask, at)
        if mask.dtype == mx.bool_:
            visible = mx.logical_and(visible, extra)
        else:
            extra = extra.astype(mx.float32)
            scores = scores + extra
            visible = mx.logical_and(visible, extra > HIDDEN)
    scores = mx.where(visible, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        logit = sinks.astype(mx.float32)[None, :, None, None]
        top = mx.maximum(top, logit)
    top = mx.stop_gradient(mx.where(mx.isinf(top), 0.0, top))
    weights = mx.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(logit - top)
    weights = weights / mx.where(total == 0, 1.0, total)
    w = weights.reshape(batch, kv_heads, -1, queries, body + tail)

    o_body = w[..., :body] @ over_heads(clean(values, in_body))
    o_tail = w[..., body:] @ over_heads(clean(v_tail, in_tail))
    if separate:
        return [o_body.reshape(shape), o_tail.reshape(shape)]
    return [(o_body + o_tail).reshape(shape).astype(q.dtype)]


def attention_primitive(*inputs: mx.array, **scalars: float) -> list[mx.array]:
    """The native primitive's arrays and scalars, as csrc/attention/primitive.h orders them."""
    q, q_code, layout, k_tail, v_tail = inputs[:5]
    block = int(scalars["block"])

    def side(name: str, arrays: tuple[mx.array, ...]) -> mx.array:
        codes, table, scales, centres, centre_scales = arrays
        centred = bool(scalars[f"{name}_centred"])
        return decode(
            codes,
            table,
            int(scalars[f"{name}_stride"]),
            block,
            scales if scalars[f"{name}_scaled"] else None,
            centres if centred else None,
            centre_scales if centred else None,
        )

    keys, values = side("key", inputs[5:10]), side("value", inputs[13:18])
    mask, sinks, key_diagonal, value_diagonal = inputs[18:22]
    if scalars["key_turned"]:
        q_code = over_heads(hadamard, q, key_diagonal)
    channels = q_code.shape[-1]
    if scalars["pair_stride"]:
        own = q.shape[-1]
        codes, table, scales = inputs[10:13]
        scales = scales if scalars["pair_scaled"] else None
        second = decode(codes, table, int(scalars["pair_stride"]), block, scales)
        keys = mx.concatenate([keys[..., :own], second[..., : channels - own]], axis=-1)
    turned = bool(scalars["value_turned"])
    out = attention(
        q,
        q_code,
        layout,
        k_tail,
        v_tail,
        keys[..., :channels],
        values[..., : v_tail.shape[-1]],
        scale=scalars["scale"],
        sink_tokens=int(scalars["sink_tokens"]),
        window=int(scalars["window"]),
        block=block,
        causal=bool(scalars["causal"]),
        separate=turned or bool(scalars["separate"]),
        mask=mask if scalars["masked"] else None,
        sinks=sinks if scalars["sinks"] else None,
    )
    if not turned:
        return out
    code, tail = out
    return [(over_heads(hadamard, code, value_diagonal, inverse=True) + tail).astype(q.dtype)]
