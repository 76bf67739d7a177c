"""Dense attention in float64 with masks, sinks and bases of the codes, and the error allowed.

Written from the definitions of :mod:`vqkv_ext.packed`, independently of the package: positions are
gathered one by one, bases are matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from hadamard_oracle import matrix
from oracle import EPS, Case, decode64, f64
from vqkv_ext import ops
from vqkv_ext.packed import CodedBody, PackedKV

HIDDEN = float(np.float32(-1e30))  # an additive mask of this or less hides a token


def basis64(transform, heads: int, width: int) -> np.ndarray:
    """``[heads, D, channels]`` with ``query(q) = q @ m`` and ``inverse(y) = y @ m.T``."""
    if transform is None:
        m = np.eye(width)
    elif getattr(transform, "diagonal", None) is not None:
        m = f64(transform.diagonal)[..., None] * matrix(width)
    elif hasattr(transform, "part"):  # overlapping Hadamard transforms
        m = np.eye(width)
        for i, start in enumerate([0, width - transform.part] * transform.ROUNDS):
            step = np.eye(width)
            span = slice(start, start + transform.part)
            step[span, span] = f64(transform.signs[i])[:, None] * matrix(transform.part)
            m = m @ step
    elif hasattr(transform, "sketch"):
        m = f64(transform.sketch).T
    else:  # the two bases of a pair, the second one on top of the first
        first = basis64(transform.first, heads, width)
        m = np.concatenate([first, first @ basis64(transform.second, heads, width)], -1)
    return np.broadcast_to(m, (heads, *m.shape[-2:]))


def vectors64(body: CodedBody, width: int, block: int) -> np.ndarray:
    """Decoded tokens in the basis of the vectors, ``[B, H, S, width]``; NaN where unused."""
    m = basis64(body.transform, body.codes.shape[1], width)
    own = m.shape[-1] if body.pair is None else width
    with np.errstate(invalid="ignore"):
        y = decode64(body, own, block)
        if body.pair is not None:
            y = np.concatenate([y, decode64(body.pair, m.shape[-1] - own, block)], -1)
        return y if body.transform is None else y @ m.swapaxes(-1, -2)


@dataclass
class Dense:
    """Queries of one batch row that read the same vectors: what they see, and how."""

    row: int
    queries: np.ndarray  # indices
    keys: np.ndarray  # [Hkv, N, D]
    values: np.ndarray
    visible: np.ndarray  # [Hq, n, N]
    add: np.ndarray | None  # additive mask, the same shape


def dense_parts(case: Case, mask: str | mx.array | None) -> list[Dense]:
    layout, queries = case.keys.layout, case.q.shape[2]
    s, array = layout.sink_tokens, isinstance(mask, mx.array)
    sides = []
    for packed in (case.keys, case.values):
        width = packed.tail.shape[-1]
        sides.append((vectors64(packed.body, width, layout.block), f64(packed.tail)))
    parts = []
    for b, (length, coded, start) in enumerate(
        zip(case.lengths, case.coded, case.start, strict=True)
    ):
        last = length - queries + np.arange(1, queries + 1)
        seen = last if mask == "causal" else np.full(queries, length)
        own = last if array or mask == "causal" else seen
        limit = layout.block * np.maximum(0, (own - s - layout.window) // layout.block)
        boundaries = s + np.minimum(coded, np.maximum(start - s, limit))
        position = np.arange(max(length, 0))
        for boundary in np.unique(boundaries):
            in_body = (position >= s) & (position < boundary)
            slot = np.where(position < s, position, s + position - start)
            gathered = []
            for body, tail in sides:
                x = np.empty((body.shape[1], position.size, body.shape[-1]))
                x[:, in_body] = body[b][:, position[in_body] - s]
                x[:, ~in_body] = tail[b][:, slot[~in_body]]
                gathered.append(x)
            at = np.flatnonzero(boundaries == boundary)
            visible = position < seen[at, None]
            visible = np.broadcast_to(visible, (case.q.shape[1], *visible.shape))
            add = None
            if array:
                columns, hidden = _columns(mask, b, at, position.size, case.q)
                visible = visible & ~hidden
                add = columns
            parts.append(Dense(b, at, *gathered, visible, add))
    return parts


def _columns(mask: mx.array, b: int, at: np.ndarray, n: int, q: mx.array):
    """The mask of these queries over positions below ``n``, additive or None, and what it hides."""
    boolean = mask.dtype == mx.bool_
    m = np.array(mask) if boolean else np.array(mask.astype(mx.float32))
    m = m.reshape((1,) * (4 - m.ndim) + m.shape)
    m = np.broadcast_to(m, (*q.shape[:3], m.shape[-1]))[b][:, at]
    if m.shape[-1] == 1:
        m = np.broadcast_to(m, (*m.shape[:2], n))
    m = m[..., :n]
    missing = n - m.shape[-1]
    hidden = ~m if boolean else ~(m > HIDDEN)
    hidden = np.pad(hidden, ((0, 0), (0, 0), (0, missing)), constant_values=True)
    if boolean:
        return None, hidden
    return np.where(hidden, 0, np.pad(m, ((0, 0), (0, 0), (0, missing)))), hidden


def expected(
    case: Case, scale: float, mask: str | mx.array | None, sinks: mx.array | None = None
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Output ``[B, Hq, L, Dv]``, which rows see anything ``[B, Hq, L]``, the largest error of
    MLX's attention over the same vectors in the query's dtype, and the largest visible value."""
    q, dtype = f64(case.q), case.q.dtype
    heads, kv = q.shape[1], case.keys.tail.shape[1]
    out = np.zeros((*q.shape[:3], case.values.tail.shape[-1]))
    sees = np.zeros(q.shape[:3], bool)
    worst = top = 0.0
    for d in dense_parts(case, mask):
        n = d.keys.shape[1]
        if n == 0:
            continue
        group = q[d.row][:, d.queries].reshape(kv, -1, q.shape[-1])
        logits = scale * (group @ d.keys.swapaxes(-1, -2)).reshape(d.visible.shape)
        if d.add is not None:
            logits = logits + d.add
        some = d.visible.any(-1)
        logits = np.where(d.visible, logits, -np.inf)
        best = np.where(some, logits.max(-1), 0.0)
        if sinks is not None:
            sink = f64(sinks)[:, None]
            best = np.maximum(best, np.where(np.isinf(sink), best, sink))
        e = np.exp(logits - best[..., None])
        total = e.sum(-1)
        if sinks is not None:
            total = total + np.exp(sink - best)
        weights = (e / np.where(total > 0, total, 1)[..., None]).reshape(kv, -1, n)
        result = (weights @ d.values).reshape(heads, -1, out.shape[-1])
        out[d.row][:, d.queries] = result
        sees[d.row][:, d.queries] = some
        used = d.visible.any((0, 1))
        top = max(top, np.abs(d.values[:, used]).max(initial=0))
        got = _mlx_attention(case, d, scale, mask, sinks)
        worst = max(worst, np.abs(got - result)[some].max(initial=0))
    assert dtype in (mx.float32, mx.float16, mx.bfloat16)
    return out, sees, worst, top


def _mlx_attention(case: Case, d: Dense, scale: float, mask, sinks) -> np.ndarray:
    dtype = case.q.dtype
    k, v = (mx.array(x[None].astype(np.float32)).astype(dtype) for x in (d.keys, d.values))
    if d.add is not None:
        m = np.where(d.visible, d.add, -np.inf).astype(np.float32)
        given = mx.array(m[None]).astype(dtype)
    else:
        given = None if d.visible.all() else mx.array(d.visible[None])
    got = mx.fast.scaled_dot_product_attention(
        case.q[d.row : d.row + 1, :, mx.array(d.queries)],
        k,
        v,
        scale=scale,
        mask=given,
        sinks=None if sinks is None else sinks.astype(dtype),
    )
    return f64(got)[0]


def check(
    case: Case,
    *,
    scale: float | None = None,
    mask: str | mx.array | None = "causal",
    sinks: mx.array | None = None,
    **kw,
) -> np.ndarray:
    """The op's output, after: an error at most twice that of MLX's attention over the same vectors,
    plus rounding, and exact zeros where nothing is seen."""
    scale = scale or case.q.shape[-1] ** -0.5
    got = ops.attention(case.q, case.keys, case.values, scale=scale, mask=mask, sinks=sinks, **kw)
    want, sees, baseline, top = expected(case, scale, mask, sinks)
    assert got.dtype == case.q.dtype and got.shape == want.shape
    got = f64(got)
    assert np.isfinite(got).all()
    assert not got[~sees].any(), "a row that sees nothing must be zeros"
    bound = 2 * baseline + 4 * EPS[str(case.q.dtype).rsplit(".")[-1]] * top
    error = np.abs(got - want).max(initial=0)
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}, of {baseline:.3g}"
    return got


# ---- memory that no token owns ----


def poisoned(case: Case) -> Case:
    """The same case with NaN scales and set bits in every code slot that holds no token (the tails
    of a case have NaN there already)."""

    def of(body: CodedBody, block: int) -> CodedBody:
        fields = {n: getattr(body, n) for n in ("scales", "centres", "centre_scales")}
        codes = np.array(body.codes)
        for b, coded in enumerate(case.coded):
            codes[b, :, coded:] = 255
        for name, x in fields.items():
            if x is None:
                continue
            each = block if name != "scales" else 1
            used = np.array([math.ceil(c / each) for c in case.coded])
            spare = mx.array(np.arange(x.shape[2]) >= used[:, None])[:, None]
            spare = spare if x.ndim == 3 else spare[..., None]
            fields[name] = mx.where(spare, mx.array(127 if x.dtype == mx.int8 else mx.nan), x)
            fields[name] = fields[name].astype(x.dtype)
        pair = None if body.pair is None else of(body.pair, block)
        return CodedBody(mx.array(codes), body.code, transform=body.transform, pair=pair, **fields)

    layout = case.keys.layout
    keys, values = (
        PackedKV(of(side.body, layout.block), side.tail, layout)
        for side in (case.keys, case.values)
    )
    return Case(case.q, keys, values, case.lengths, case.coded, case.start)
