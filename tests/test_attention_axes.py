"""attention over the product of its axes, against float64 dense attention over the same decoded
keys and values: cases are drawn at random, the same ones in every run."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from attention_cases import (
    CODES,
    GROUPS,
    MASKS,
    SHAPES,
    WIDTHS,
    Spec,
    build,
    mask_of,
    sinks_of,
    takes,
)
from attention_oracle import check
from oracle import DTYPES, random_case, random_side
from vqkv_ext import _ext, ops
from vqkv_ext.packed import CodedBody, PackedKV, TableCode

SIM = _ext.simulated()
pytestmark = pytest.mark.usefixtures("one_blas_thread")


def examples(native: int, simulated: int):
    """The same examples in every run."""
    return settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=simulated if SIM else native,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def specs(draw, key=None, value=None, dtype=None, width=None, longest=None) -> Spec:
    heads = draw(st.sampled_from(GROUPS))
    widths = draw(st.tuples(*[st.sampled_from(WIDTHS)] * 2)) if width is None else width
    batch = draw(st.integers(1, 3))
    longest = longest or (70 if SIM else 600)
    room = max(8, min(longest, 500_000 // (batch * heads[1] * sum(widths))))
    queries = draw(st.one_of(st.integers(1, 3), st.integers(1, 40), st.just(300)))
    work = (4_000 if SIM else 400_000) // (batch * heads[0] * widths[0])
    queries = max(1, min(queries, 5 if SIM else 300, work))
    sink_tokens, window = draw(st.sampled_from([0, 1, 4])), draw(st.sampled_from([0, 8, 64]))
    block = draw(st.sampled_from([8, 16, 32, 64]))
    lengths, coded, grace = [], [], []
    some = draw(st.booleans())
    for _ in range(batch):
        # without codes now and then, without a token rarely
        c = draw(st.one_of(st.integers(1, room), st.just(room))) if some else 0
        recent = draw(st.one_of(st.integers(0, 3), st.integers(0, 80))) + queries
        n = sink_tokens + c + recent if c else draw(st.sampled_from([recent, queries, 1, 0]))
        lengths.append(n)
        coded.append(c)
        grace.append(draw(st.sampled_from([0, min(block, c), c])))
    sides = [
        draw(st.sampled_from([c for c in CODES if takes(c, w, side)])) if code is None else code
        for side, code, w in (("key", key, widths[0]), ("value", value, widths[1]))
    ]
    return Spec(
        dtype=draw(st.sampled_from(list(DTYPES))) if dtype is None else dtype,
        heads=heads,
        queries=queries,
        lengths=tuple(lengths),
        coded=tuple(coded),
        grace=tuple(grace),
        key=sides[0],
        value=sides[1],
        key_width=widths[0],
        value_width=widths[1],
        sink_tokens=sink_tokens,
        window=window,
        block=block,
        sharp=draw(st.sampled_from([1.0, 2.0])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 10_000)),
    )


masks = st.tuples(
    st.sampled_from(MASKS), st.sampled_from(SHAPES), st.sampled_from([0, 0, 0, 5, -3])
)


@pytest.mark.sim
@examples(native=150, simulated=60)
@given(specs(), masks, st.sampled_from([None, None, "float32", "own"]))
def test_any_call_equals_dense_attention(spec, mask, sinks):
    """Cases T07 to T10: GQA, batches, lengths, masks and sinks, with any two codes."""
    note(repr(spec))
    logits = sinks and sinks_of(spec, spec.dtype if sinks == "own" else sinks)
    check(build(spec), scale=spec.scale, mask=mask_of(spec, *mask), sinks=logits)


@pytest.mark.sim
@pytest.mark.parametrize("code", CODES)
@examples(native=4, simulated=2)
@given(st.data())
def test_every_code_on_both_sides(code, data):
    widths = data.draw(st.sampled_from([w for w in WIDTHS if takes(code, w, "key")]))
    spec = data.draw(specs(key=code, value=code, width=(widths, widths)))
    mask = mask_of(spec, *data.draw(masks))
    note(repr(spec))
    check(build(spec), scale=spec.scale, mask=mask, sinks=sinks_of(spec))


@examples(native=40, simulated=5)
@given(specs(longest=60), masks, st.booleans())
def test_plain_mlx_obeys_the_same_bound(spec, mask, sinks):
    note(repr(spec))
    logits = sinks_of(spec) if sinks else None
    mask = mask_of(spec, *mask)
    check(build(spec), scale=spec.scale, mask=mask, sinks=logits, use_metal_kernels=False)


BASE = Spec(
    dtype="float32", heads=(4, 2), queries=3, lengths=(800, 90), coded=(700, 64), grace=(64, 0),
    key="vecinfer-8bit", value="turboquant-4bit", key_width=64, value_width=128, sink_tokens=4,
    window=64, block=64, sharp=1.0, strided=True, seed=5,
)  # fmt: skip


@pytest.mark.sim
@pytest.mark.parametrize("mask", [("causal", "LN"), ("bool", "1HLN"), ("own", "BHLN")])
@pytest.mark.parametrize("value", ["turboquant-4bit", "product-d4", "qjl-1bit"])
@pytest.mark.parametrize("width", [64, 72])
def test_split_contexts(mask, value, width):
    """Enough tokens for several splits, which are merged: with sinks, masks and every way in which
    the basis of the values is undone."""
    spec = replace(BASE, value=value, value_width=width)
    for s in (spec, replace(spec, lengths=(1500, 1500), coded=(1400, 1400), grace=(64, 64))):
        check(build(s), scale=s.scale, mask=mask_of(s, *mask), sinks=sinks_of(s))


@pytest.mark.sim
@pytest.mark.parametrize(
    ("width", "seed", "lengths", "coded"), [(512, 38, 39, 0), (512, 3, 91, 60)]
)
def test_scores_of_wide_float32_vectors(width, seed, lengths, coded):
    """Found by chance: one running sum over the channels is less exact than MLX's product."""
    spec = replace(
        BASE, heads=(14, 2), queries=1, lengths=(lengths,), coded=(coded,), grace=(0,),
        key="product-d4", value="product-d8-group", key_width=width, value_width=512, sharp=2.0,
        strided=False, seed=seed,
    )  # fmt: skip
    for kind in ("own", "none"):
        check(build(spec), scale=spec.scale, mask=mask_of(spec, kind, "B1LN"))


@pytest.mark.sim
@examples(native=40, simulated=15)
@given(specs(), masks)
def test_what_unused_memory_holds_never_matters(spec, mask):
    """Bitwise the same with NaN tails, scales and centres and set bits where there is no token."""
    note(repr(spec))
    mask, out = mask_of(spec, *mask), []
    for poison in (False, True):
        c = build(spec, poison=poison)
        args = {"scale": spec.scale, "mask": mask, "sinks": sinks_of(spec)}
        out.append(np.array(ops.attention(c.q, c.keys, c.values, **args).astype(mx.float32)))
    assert np.isfinite(out[0]).all() and np.array_equal(*out)


@pytest.mark.sim
@pytest.mark.parametrize("dims", [2, 4, 8])
def test_codes_without_a_value_in_unused_slots(rng, dims):
    """A table row of NaN that only slots without a token select."""
    case = random_case(rng, coded=70, recent=80, queries=3, block=64, batch=2, ragged=True)
    sides = []
    for side in (case.keys, case.values):
        body = random_side(rng, 2, 2, 128, 64, dims=dims)
        table = np.array(body.code.table)
        table[:, :, 255] = np.nan
        codes = np.minimum(np.array(body.codes), 254)
        for b, n in enumerate(case.coded):
            codes[b, :, n:] = 255
        code = TableCode(mx.array(table), body.code.stride)
        sides.append(PackedKV(CodedBody(mx.array(codes), code), side.tail, case.keys.layout))
    for mask in (None, "causal"):
        check(replace(case, keys=sides[0], values=sides[1]), mask=mask)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("code", ["product-d4", "vecinfer-8bit", "centred-4bit", "qjl-1bit"])
def test_rows_that_see_nothing(dtype, sinks, code):
    """Exact zeros whatever hides the tokens, and the other rows as if alone."""
    spec = replace(BASE, dtype=dtype, key=code, value=code, lengths=(150, 150), coded=(64, 64))
    case, logits = build(spec), sinks_of(spec) if sinks else None
    keep = np.ones((2, 1, 3, 150), bool)
    keep[0, 0, 1] = keep[1, 0] = False
    never = [-np.inf] if dtype == "float16" else [-np.inf, -1.1e30, -3e38]
    added = [mx.array(np.where(keep, 0, n).astype(np.float32)) for n in never]
    own = [m.astype(DTYPES[dtype]) for m in added]
    outs = [
        check(case, scale=spec.scale, mask=m, sinks=logits) for m in (mx.array(keep), *added, *own)
    ]
    plain = check(case, scale=spec.scale, mask=mx.ones((150,), mx.bool_), sinks=logits)
    for out in outs:
        assert not out[0, :, 1].any() and not out[1].any()
        assert np.array_equal(out[0, :, [0, 2]], plain[0, :, [0, 2]])


@pytest.mark.sim
def test_the_least_additive_value_that_is_seen(rng):
    """-1e30 and less hide; anything above takes part in the softmax."""
    case = random_case(rng, coded=64, recent=70, queries=1)
    n = case.lengths[0]
    edge = np.float32(-1e30)
    m = np.full((1, n), edge, np.float32)
    assert not check(case, mask=mx.array(m)).any()
    m[0, [3, 30, 100]] = np.nextafter(edge, np.float32(0))
    out = ops.attention(case.q, case.keys, case.values, scale=0.1, mask=mx.array(m))
    keep = mx.array(m > edge)
    want = ops.attention(case.q * 0, case.keys, case.values, scale=0.1, mask=keep)
    assert mx.allclose(out, want, atol=1e-6)  # 1e30 swallows every score


@pytest.mark.parametrize("mask", [mx.zeros((2, 0), mx.bool_), mx.zeros((2, 0)), mx.zeros((0,))])
def test_masks_without_columns_are_refused(rng, mask):
    case = random_case(rng, queries=2)
    with pytest.raises(ValueError, match=r"\[attention\] mask must have a column for every token"):
        ops.attention(case.q, case.keys, case.values, scale=0.1, mask=mask)
