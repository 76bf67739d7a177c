"""Gradients and vmap of the native attention with masks, sinks, scales, centres and Hadamard
bases: against plain mlx, finite differences and a Python loop."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from oracle import random_case
from vqkv_ext import ops
from vqkv_ext.codecs.transforms import SmoothedHadamard
from vqkv_ext.packed import PackedKV, TableCode

SCALE, QUERIES, HEADS, KV = 0.04, 3, 4, 2


def normal(rng, *shape):
    return mx.array(rng.standard_normal(shape).astype(np.float32))


class Call:
    """The op as a function of its floating arrays, by name."""

    def __init__(self, rng, *, batch=1, separate=False, **kw):
        spec = {"scaled": True, "centred": True, "per_head": True}
        self.case = c = random_case(
            rng, batch=batch, heads=HEADS, kv_heads=KV, queries=QUERIES, coded=48, recent=24,
            grace=16, window=8, block=16, key=spec, value=spec, spare=0, **kw,
        )  # fmt: skip
        n = c.lengths[0]
        mask = np.where(rng.random((batch, HEADS, QUERIES, n)) < 0.8, 0.0, -np.inf)
        self.arrays = {
            "q": c.q,
            "k_tail": c.keys.tail,
            "v_tail": c.values.tail,
            "key_table": c.keys.body.code.table,
            "value_table": c.values.body.code.table,
            "mask": mx.array(mask + rng.standard_normal(mask.shape)).astype(mx.float32),
            "sinks": normal(rng, HEADS) + 2,
            "key_diagonal": mx.array(rng.uniform(0.5, 2, (KV, 64)).astype(np.float32)),
            "value_diagonal": mx.array(rng.uniform(0.5, 2, (KV, 64)).astype(np.float32)),
        }
        for side, packed in (("key", c.keys), ("value", c.values)):
            body = packed.body
            self.arrays[f"{side}_scales"] = mx.ones_like(body.scales)
            self.arrays[f"{side}_centre_scales"] = mx.full(
                body.centre_scales.shape, 2.0**-6, mx.bfloat16
            )
        self.weight = normal(rng, *c.q.shape)

    def __call__(self, flag=None, **given):
        a = self.arrays | given
        sides = []
        for side, packed in (("key", self.case.keys), ("value", self.case.values)):
            body = replace(
                packed.body,
                code=TableCode(a[f"{side}_table"], packed.body.code.stride),
                scales=a[f"{side}_scales"],
                centre_scales=a[f"{side}_centre_scales"],
                transform=_Basis(a[f"{side}_diagonal"]),
            )
            sides.append(PackedKV(body, a[f"{side[0]}_tail"], self.case.keys.layout))
        return ops.attention(
            a["q"], *sides, scale=SCALE, mask=a["mask"], sinks=a["sinks"], use_metal_kernels=flag
        )

    def loss(self, *names, flag=None):
        f = lambda *values: self(flag, **dict(zip(names, values, strict=True)))  # noqa: E731
        return lambda *values: (f(*values) * self.weight).sum()

    def values(self, *names):
        return [self.arrays[n] for n in names]


class _Basis(SmoothedHadamard):
    """With a diagonal that is traced, not checked."""

    def __init__(self, diagonal):
        self.diagonal = diagonal
        self.smooth = diagonal[:, None]


NAMES = (
    "q", "k_tail", "v_tail", "key_table", "value_table", "mask", "sinks", "key_diagonal",
    "value_diagonal", "key_scales", "value_scales", "key_centre_scales", "value_centre_scales",
)  # fmt: skip


def test_gradients_equal_those_of_plain_mlx(rng):
    call = Call(rng)
    native, plain = (
        mx.grad(call.loss(*NAMES, flag=flag), argnums=tuple(range(len(NAMES))))(
            *call.values(*NAMES)
        )
        for flag in (None, False)
    )
    for name, g, w in zip(NAMES, native, plain, strict=True):
        assert g.dtype == w.dtype and bool(mx.isfinite(g).all()) and mx.any(g), name
        tolerance = 1e-2 if g.dtype == mx.bfloat16 else 2e-5
        assert mx.allclose(g, w, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_finite_differences(rng, name):
    """Along the gradient and along a random direction, of the native forward pass."""
    call = Call(rng)
    x = call.arrays[name]
    f = lambda y: np.array(call(**{name: y})).astype(np.float64)  # noqa: E731
    weight = np.array(call.weight)
    grad = mx.grad(call.loss(name))(x)
    g = np.array(grad.astype(mx.float32)).astype(np.float64)
    if x.dtype == mx.bfloat16:  # steps that the dtype holds exactly
        h = 2.0**-6 * x.reshape(-1)[0].item()
        directions = [np.sign(g), rng.choice([-1.0, 1.0], g.shape)]
    else:
        h = 1e-2
        directions = [g / np.linalg.norm(g), *(rng.standard_normal((3, *g.shape)))]
        directions = [d / np.linalg.norm(d) for d in directions]
    for d in directions:
        step = mx.array((h * d).astype(np.float32)).astype(x.dtype)
        numeric = ((f(x + step) - f(x - step)) * weight).sum() / (2 * h)
        want = (g * d).sum()
        assert abs(numeric - want) <= 1e-2 * max(abs(want), 0.1), name


def test_gradients_of_hidden_tokens_are_zero(rng):
    """And finite, where a whole row sees nothing."""
    call = Call(rng)
    mask = np.array(call.arrays["mask"])
    mask[:, :, 1] = -np.inf
    mask[..., 10:30] = -np.inf
    names = ("q", "k_tail", "v_tail", "mask", "sinks", "key_scales")
    values = [mx.array(mask) if n == "mask" else call.arrays[n] for n in names]
    grads = mx.grad(call.loss(*names), argnums=tuple(range(len(names))))(*values)
    for name, g in zip(names, grads, strict=True):
        assert bool(mx.isfinite(g).all()) and mx.any(g), name
    assert not mx.any(grads[0][:, :, 1]) and not mx.any(grads[3][:, :, 1])
    assert not mx.any(grads[3][..., 10:30]) and not mx.any(grads[5][..., 6:26])


def test_tangents_of_masks_sinks_and_bases(rng):
    call = Call(rng)
    names = ("q", "mask", "sinks", "key_diagonal", "value_diagonal")
    values = call.values(*names)
    tangents = [normal(rng, *v.shape) for v in values]
    f, plain = (
        lambda *v, flag=flag: call(flag, **dict(zip(names, v, strict=True)))
        for flag in (None, False)
    )
    (out,), (t,) = mx.jvp(f, values, tangents)
    _, (want,) = mx.jvp(plain, values, tangents)
    assert mx.allclose(out, f(*values), atol=1e-6) and mx.allclose(t, want, atol=2e-5)


MAPPED = [
    ("mask",),
    ("sinks",),
    ("key_diagonal",),
    ("value_diagonal",),
    ("q",),
    ("q", "mask"),
    ("q", "k_tail", "v_tail", "mask", "sinks"),
    ("key_scales", "value_centre_scales"),
    ("k_tail", "key_diagonal", "value_diagonal"),
    ("mask", "key_table"),
]


@pytest.mark.sim
@pytest.mark.parametrize("names", MAPPED, ids="+".join)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_equals_a_loop(rng, names, axis, batch):
    """Each array mapped over its first or last axis, the others not mapped."""
    call, n = Call(rng, batch=batch), 3
    f = lambda *v: call(**dict(zip(names, v, strict=True)))  # noqa: E731
    stacks = []
    for name in names:
        x = call.arrays[name]
        more = [x * s for s in (1.0, 0.5, 2.0)] if name != "q" else [x, -x, x + 1]
        stacks.append(mx.stack([m.astype(x.dtype) for m in more], axis=axis))
    got = mx.vmap(f, in_axes=(axis,) * len(names))(*stacks)
    want = mx.stack([f(*(mx.take(s, i, axis=axis) for s in stacks)) for i in range(n)])
    assert got.shape == want.shape and mx.allclose(got, want, atol=2e-5)
    assert not mx.allclose(want[0], want[1], atol=1e-3)


MASKS = [(QUERIES, 76), (1, 1, QUERIES, 76), (1, HEADS, 1, 76), (76,), (2, 1, 1, 76), (1,)]


@pytest.mark.sim
@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_vmap_over_masks_of_any_shape(rng, shape, boolean):
    """Alone, and with the queries mapped over another axis."""
    call = Call(rng, batch=2)
    assert call.case.lengths[0] == 76
    masks = normal(rng, 4, *shape)
    masks = masks > -0.8 if boolean else masks
    loop = lambda qs: mx.stack(  # noqa: E731
        [call(mask=m, q=q) for m, q in zip(masks, qs, strict=True)]
    )
    q = call.arrays["q"]
    got = mx.vmap(lambda m: call(mask=m))(masks)
    assert mx.allclose(got, loop([q] * 4), atol=1e-6)
    qs = normal(rng, 2, HEADS, 4, QUERIES, 64)
    got = mx.vmap(lambda m, x: call(mask=m, q=x), in_axes=(0, 2))(masks, qs)
    assert mx.allclose(got, loop([qs[:, :, i] for i in range(4)]), atol=1e-6)
    # mapped tables have no rule but the reference's
    table = call.arrays["key_table"]
    tables = mx.stack([table, -table, 2 * table, table])
    got = mx.vmap(lambda m, t: call(mask=m, key_table=t))(masks, tables)
    want = [call(mask=m, key_table=t) for m, t in zip(masks, tables, strict=True)]
    assert mx.allclose(got, mx.stack(want), atol=2e-5)


def test_gradient_inside_vmap(rng):
    call = Call(rng)
    stack = mx.stack([call.arrays["sinks"] + i for i in range(3)])
    g = mx.grad(call.loss("sinks"))
    got = mx.vmap(g)(stack)
    assert mx.allclose(got, mx.stack([g(s) for s in stack]), atol=1e-5)


@pytest.mark.sim
@pytest.mark.parametrize("shapeless", [False, True])
def test_compiled_calls_with_masks_and_sinks(rng, shapeless):
    call = Call(rng)
    names = ("q", "mask", "sinks", "key_diagonal", "value_diagonal")
    f = lambda *v: call(**dict(zip(names, v, strict=True)))  # noqa: E731
    g = mx.compile(f, shapeless=shapeless)
    for i in range(3):
        values = [v + i for v in call.values(*names)]
        assert mx.allclose(g(*values), f(*values), atol=1e-6)
