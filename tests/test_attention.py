"""attention over codes against float64 dense attention over the same decoded vectors."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from oracle import (
    DTYPES,
    EPS,
    attention64,
    decode64,
    dense_error,
    f64,
    random_case,
    random_side,
)
from vqkv_ext import ops, reference
from vqkv_ext.packed import PackedKV, coded_tokens

CODES = {
    "product-d4": {"dims": 4},
    "product-d2": {"dims": 2},
    "product-d8": {"dims": 8},
    "per-head": {"dims": 4, "per_head": True},
    "per-group": {"dims": 8, "per_group": True},
    "12-bit": {"dims": 8, "window": 12, "stride": 12},
    "3-bit": {"dims": 2, "window": 6, "stride": 6},
    "scaled": {"dims": 2, "scaled": True},
    "centred": {"dims": 4, "centred": True, "scaled": True},
    "trellis-2": {"dims": 1, "window": 8, "stride": 2, "scaled": True, "centred": True},
}


def check(case, *, scale=None, mask="causal", **kw) -> None:
    """Error at most twice that of the plain computation in the query's dtype, plus rounding."""
    scale = scale or case.q.shape[-1] ** -0.5
    got = ops.attention(case.q, case.keys, case.values, scale=scale, mask=mask, **kw)
    want = attention64(case, scale, mask == "causal")
    assert got.dtype == case.q.dtype and got.shape == want.shape
    name = str(case.q.dtype).rsplit(".")[-1]
    top = np.abs(np.nan_to_num(f64(case.values.tail))).max()
    bound = 2 * dense_error(case, scale, mask == "causal", want) + 4 * EPS[name] * top
    error = np.abs(f64(got) - want).max()
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
def test_codes(rng, code, dtype):
    spec = CODES[code]
    check(random_case(rng, dtype=dtype, key=spec, value=spec, coded=192, recent=70, grace=64))


@pytest.mark.sim
def test_different_codes_for_keys_and_values(rng):
    kw = {"key_width": 128, "value_width": 64, "coded": 128}
    check(random_case(rng, key=CODES["3-bit"], value=CODES["product-d8"], **kw))
    check(random_case(rng, key=CODES["centred"], value=CODES["product-d2"], **kw))


@pytest.mark.sim
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (4, 2), (14, 2), (28, 4), (8, 1), (40, 8)])
@pytest.mark.parametrize("queries", [1, 3, 8])
def test_heads_and_queries(rng, heads, queries):
    """Case T07."""
    batch = 1 + queries % 3
    check(
        random_case(
            rng, heads=heads[0], kv_heads=heads[1], queries=queries, batch=batch, ragged=True,
            coded=64, recent=75, grace=32, key_width=64, value_width=64,
        )
    )  # fmt: skip


@pytest.mark.sim
@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256, 512, 576])
def test_widths(rng, width):
    check(random_case(rng, key_width=width, value_width=width, coded=64, heads=2, kv_heads=1))


@pytest.mark.sim
@pytest.mark.parametrize("coded", [0, 1, 31, 257])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_sequence_lengths(rng, coded, mask):
    for recent in (1, 2, 65):
        check(random_case(rng, coded=coded, recent=recent, queries=min(recent, 2)), mask=mask)
    check(random_case(rng, coded=coded, recent=9, sink_tokens=0), mask=mask)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 256, 576])
def test_splits_and_widths_in_every_dtype(rng, width, dtype):
    kw = {"dtype": dtype, "key_width": width, "value_width": width}
    check(random_case(rng, coded=640, heads=2, kv_heads=1, **kw))


def test_long_context_and_long_prompt(rng):
    check(random_case(rng, coded=5000, recent=80, heads=8, kv_heads=2, sharp=3.0))
    check(random_case(rng, coded=512, recent=300, queries=200, grace=256, heads=4, kv_heads=2))


@pytest.mark.sim
def test_queries_of_a_chunk_see_their_own_boundary(rng):
    """Each query of a chunk gives what it gives alone, although blocks retire inside the chunk."""
    case = random_case(rng, coded=64, recent=40, grace=32, queries=30, window=16, block=16)
    whole = ops.attention(case.q, case.keys, case.values, scale=0.2, mask="causal")
    check(case, scale=0.2)
    for i in (0, 7, 29):
        rows = case.keys.layout.rows - mx.array([29 - i, 0, 0])
        layout = type(case.keys.layout)(rows, 4, 16, 16)
        keys = PackedKV(case.keys.body, case.keys.tail, layout)
        values = PackedKV(case.values.body, case.values.tail, layout)
        one = ops.attention(case.q[:, :, i : i + 1], keys, values, scale=0.2, mask="causal")
        assert mx.allclose(one, whole[:, :, i : i + 1], atol=1e-6)


@pytest.mark.sim
def test_rows_do_not_see_each_other(rng):
    case = random_case(rng, batch=3, ragged=True, coded=96, recent=70)
    out = np.array(ops.attention(case.q, case.keys, case.values, scale=0.2))
    tail = np.array(case.values.tail)
    tail[1] = np.nan
    values = PackedKV(case.values.body, mx.array(tail), case.keys.layout)
    other = np.array(ops.attention(case.q, case.keys, values, scale=0.2))
    assert np.array_equal(out[[0, 2]], other[[0, 2]]) and np.isnan(other[1]).any()


@pytest.mark.sim
@pytest.mark.parametrize("rows", [[0, 0, 4], [-5, 0, 4], [10, 10**6, 4], [2, 500, -9]])
def test_layout_out_of_range_reads_nothing_outside(rng, rows):
    """Lengths are data the op cannot check before it runs: it must stay inside the arrays."""
    case = random_case(rng, coded=64, recent=70, spare=0)
    layout = type(case.keys.layout)(mx.array([rows], mx.int32), 4, 64, 64)
    keys, values = (PackedKV(s.body, s.tail, layout) for s in (case.keys, case.values))
    out = np.array(ops.attention(case.q, keys, values, scale=0.2))
    assert np.isfinite(out).all()
    if rows[0] <= 0:
        assert not out.any()


@pytest.mark.sim
def test_repeated_runs_are_bitwise_equal(rng, poison):
    """Case T30."""
    case = random_case(rng, batch=2, coded=192, recent=65, key_width=128, value_width=128)
    first = np.array(ops.attention(case.q, case.keys, case.values, scale=0.1))
    for _ in range(20):
        poison(first.nbytes)
        again = ops.attention(case.q, case.keys, case.values, scale=0.1)
        assert np.array_equal(np.array(again), first)


def test_reference_agrees(rng):
    for code in CODES.values():
        case = random_case(rng, key=code, value=code, batch=2, ragged=True, queries=3, grace=32)
        check(case, use_metal_kernels=False)


class _Rotation:
    """A value transform for the test: an orthogonal matrix."""

    def __init__(self, rng, width):
        self.m = mx.array(np.linalg.qr(rng.standard_normal((width, width)))[0].astype(np.float32))

    def forward(self, x):
        return x.astype(mx.float32) @ self.m

    query = forward

    def inverse(self, y):
        return y @ self.m.T


@pytest.mark.sim
def test_transforms_of_keys_and_values(rng):
    """Transforms act on the query and the output only; the tail stays in the vectors' own basis."""
    case = random_case(rng, coded=192, recent=70, queries=2, grace=64)
    turned, want = [], []
    for packed in (case.keys, case.values):
        basis = _Rotation(rng, 64)
        body = type(packed.body)(packed.body.codes, packed.body.code, transform=basis)
        turned.append(PackedKV(body, packed.tail, case.keys.layout))
        want.append(basis)
    got = ops.attention(case.q, *turned, scale=0.2, mask="causal")
    plain = ops.attention(case.q, *turned, scale=0.2, mask="causal", use_metal_kernels=False)
    assert np.abs(f64(got) - f64(plain)).max() < 2e-6


class _Channels(_Rotation):
    """A key transform into more or fewer channels than the vectors have."""

    def __init__(self, rng, width, channels):
        self.m = mx.array(rng.standard_normal((width, channels)).astype(np.float32))
        self.m = self.m * channels**-0.5

    def query(self, q):
        return q.astype(mx.float32) @ self.m


@pytest.mark.sim
@pytest.mark.parametrize("channels", [16, 64, 128, 320])
@pytest.mark.parametrize("paired", [False, True])
def test_key_codes_with_channels_of_their_own(rng, channels, paired):
    """Sketches: codes of other widths than the keys, alone or beside a code of the keys' width."""
    case = random_case(rng, coded=192, recent=70, queries=2, grace=64, heads=6, kv_heads=2)
    second = random_side(rng, 1, 2, 192, channels, dims=8, scaled=True)
    basis = _Channels(rng, 64, 64 + channels if paired else channels)
    first = case.keys.body
    if paired:
        body = type(first)(first.codes, first.code, transform=basis, pair=second)
        keys64 = [decode64(first, 64, 64), decode64(second, channels, 64)]
    else:
        body = type(first)(second.codes, second.code, second.scales, transform=basis)
        keys64 = [decode64(second, channels, 64)]
    args = (case.q, PackedKV(body, case.keys.tail, case.keys.layout), case.values)
    got = ops.attention(*args, scale=0.2, mask="causal")
    plain = ops.attention(*args, scale=0.2, mask="causal", use_metal_kernels=False)
    # what the codes estimate, as keys in the vectors' own basis: q . (m k) for all q
    keys = np.concatenate(keys64, -1) @ f64(basis.m).T
    want = attention64(case, 0.2, True, body_keys=keys)
    plain_error = np.abs(f64(plain) - want).max()
    assert plain_error < 1e-5
    top = np.abs(np.nan_to_num(f64(case.values.tail))).max()
    assert np.abs(f64(got) - want).max() <= 2 * plain_error + 4 * EPS["float32"] * top


def test_errors_of_pairs(rng):
    case = random_case(rng)
    body = case.keys.body
    second = random_side(rng, 1, 2, 128, 64, dims=8, centred=True)
    both = type(body)(body.codes, body.code, transform=_Channels(rng, 64, 128), pair=second)
    keys = PackedKV(both, case.keys.tail, case.keys.layout)
    with pytest.raises(ValueError, match=r"\[attention\] the second key code must have neither"):
        ops.attention(case.q, keys, case.values, scale=0.1)
    wide = type(body)(body.codes, body.code, transform=_Channels(rng, 64, 1024))
    keys = PackedKV(wide, case.keys.tail, case.keys.layout)
    with pytest.raises(ValueError, match="key codes must have 1 to 576 channels, but got 1024"):
        ops.attention(case.q, keys, case.values, scale=0.1)


def test_array_masks_and_sinks_in_plain_mlx(rng):
    """A boolean causal mask equals "causal"; a sink logit of -inf changes nothing."""
    case = random_case(rng, batch=2, queries=3, coded=64, recent=70)
    args = (case.q, case.keys, case.values)
    n = case.lengths[0]
    mask = mx.arange(n - 3, n)[:, None] >= mx.arange(n)[None]
    causal = ops.attention(*args, scale=0.2, mask="causal")
    assert mx.allclose(ops.attention(*args, scale=0.2, mask=mask), causal, atol=1e-5)
    deep = random_case(rng, queries=200, coded=192, recent=70, grace=192)
    both = (deep.q, deep.keys, deep.values)
    n2 = deep.lengths[0]
    square = mx.arange(n2 - 200, n2)[:, None] >= mx.arange(n2)[None]
    want = ops.attention(*both, scale=0.2, mask="causal")
    assert mx.allclose(ops.attention(*both, scale=0.2, mask=square), want, atol=1e-5)
    additive = mx.where(mask, 0.0, -mx.inf)
    assert mx.allclose(ops.attention(*args, scale=0.2, mask=additive), causal, atol=1e-5)
    none = mx.zeros((3, n), mx.bool_)
    assert not mx.any(ops.attention(*args, scale=0.2, mask=none))
    sinks = mx.full((4,), -mx.inf)
    assert mx.allclose(
        ops.attention(*args, scale=0.2, mask="causal", sinks=sinks), causal, atol=1e-5
    )
    half = ops.attention(*args, scale=0.2, mask="causal", sinks=mx.full((4,), 50.0))
    assert mx.abs(half).max() < 1e-3


def test_coded_tokens():
    for n in range(400):
        c = coded_tokens(n, 4, 64, 64)
        assert c % 64 == 0 and (c == 0 or n - 4 - c >= 64) and n - 4 - c < 128 + (c == 0)


def test_memory_does_not_grow_with_the_body(rng):
    """Beyond its result the native op allocates nothing that scales with the coded tokens."""
    case = random_case(rng, coded=1 << 16, recent=70, key_width=128, value_width=128)
    args = (case.q, case.keys, case.values)
    mx.eval(case.q, case.keys.body.codes, case.values.body.codes, case.keys.tail)
    mx.eval(ops.attention(*args, scale=0.1))
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(ops.attention(*args, scale=0.1))
    assert mx.get_peak_memory() - base < 1 << 20


def bad(**change):
    rng = np.random.default_rng(0)
    case = random_case(rng)
    k, v = case.keys, case.values
    parts = {
        "q": case.q, "codes": k.body.codes, "table": k.body.code.table, "stride": 8,
        "k_tail": k.tail, "v_tail": v.tail, "rows": k.layout.rows,
    } | change  # fmt: skip
    code = type(k.body.code)(parts["table"], parts["stride"])
    layout = type(k.layout)(parts["rows"], 4, 64, 64)
    keys = PackedKV(type(k.body)(parts["codes"], code), parts["k_tail"], layout)
    return parts["q"], keys, PackedKV(v.body, parts["v_tail"], layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": mx.zeros((1, 4, 64))}, r"q must be floating of shape \[B, Hq, L, D\]"),
        ({"q": mx.zeros((1, 4, 1, 64), mx.int32)}, "q must be floating"),
        ({"q": mx.zeros((1, 3, 1, 64))}, "query heads must be a multiple"),
        ({"q": mx.zeros((1, 4, 1, 32))}, "keys must have the width of q, 32"),
        ({"q": mx.zeros((2, 4, 1, 64))}, "must have the batch of q"),
        ({"q": mx.zeros((1, 4, 1, 64), mx.float16)}, "must have 4 dimensions and the dtype of q"),
        ({"codes": mx.zeros((1, 2, 128, 16), mx.uint16)}, "key codes must be uint8"),
        ({"codes": mx.zeros((1, 2, 128, 15), mx.uint8)}, "must have 16 bytes per token"),
        ({"codes": mx.zeros((1, 1, 128, 16), mx.uint8)}, "the batch and heads of the tail"),
        ({"codes": mx.zeros((1, 2, 64, 16), mx.uint8)}, "equal numbers of coded tokens"),
        ({"table": mx.zeros((1, 1, 200, 4))}, r"2\^window rows"),
        ({"table": mx.zeros((1, 1, 256, 5))}, "a length that divides 64"),
        ({"table": mx.zeros((3, 1, 256, 4))}, "for 1 or 2 heads"),
        ({"table": mx.zeros((1, 7, 256, 4))}, "for 1 or 16 entries"),
        ({"stride": 9}, "stride must be 1 to 8"),
        ({"rows": mx.zeros((1, 2), mx.int32)}, "layout must be int32"),
        ({"v_tail": mx.zeros((1, 2, 3, 64))}, "equal heads and tokens"),
    ],
)
def test_errors(change, message):
    q, keys, values = bad(**change)
    with pytest.raises(ValueError, match=rf"\[attention\].*{message}"):
        ops.attention(q, keys, values, scale=0.1)


def test_errors_of_the_python_layer(rng):
    case = random_case(rng)
    with pytest.raises(ValueError, match=r"\[attention\] mask must be None, 'causal' or an array"):
        ops.attention(case.q, case.keys, case.values, scale=0.1, mask="casual")
    other = PackedKV(case.values.body, case.values.tail, random_case(rng).keys.layout)
    with pytest.raises(ValueError, match="share one Layout"):
        ops.attention(case.q, case.keys, other, scale=0.1)


def test_empty(rng):
    case = random_case(rng, coded=0, recent=1)
    none = [
        replace(side, tail=side.tail[:, :, :0], layout=case.keys.layout)
        for side in (case.keys, case.values)
    ]
    for native in (None, False):
        kw = {"scale": 0.1, "use_metal_kernels": native}
        out = ops.attention(mx.zeros((1, 4, 0, 64)), case.keys, case.values, **kw)
        assert out.shape == (1, 4, 0, 64)
        assert not ops.attention(mx.ones((1, 4, 2, 64)), *none, **kw).any()


def test_flag(rng, simulated):
    """The three states of use_metal_kernels."""
    case = random_case(rng)
    call = lambda flag: ops.attention(  # noqa: E731
        case.q, case.keys, case.values, scale=0.1, use_metal_kernels=flag
    )
    assert mx.allclose(call(None), call(False), atol=1e-6)
    if simulated or mx.default_device() == mx.gpu:
        assert mx.allclose(call(True), call(False), atol=1e-6)
    else:
        with pytest.raises(RuntimeError, match=r"\[attention\] use_metal_kernels=True needs"):
            call(True)


def test_reference_decode_is_the_oracle(rng):
    for spec in CODES.values():
        case = random_case(rng, key=spec)
        b = case.keys.body
        got = reference.decode(
            b.codes, b.code.table, b.code.stride, 64, b.scales, b.centres, b.centre_scales
        )
        assert np.abs(f64(got)[..., :64] - decode64(b, 64, 64)).max() < 2e-6
