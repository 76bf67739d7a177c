"""The kernel that multiplies matrices of a simdgroup: 16-bit queries, codes of bytes or trellises.

Elsewhere these calls run the same code as all others, and must keep the same bound.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from attention_cases import Spec, build, sinks_of
from attention_oracle import check
from vqkv_ext import _ext

CODES = {
    2: ("turboquant-4bit", "product-d2"),
    4: ("centred-2bit", "product-d4"),
    8: ("product-d8-head", "turboquant-1bit"),
}
"""By values per byte: keys, values."""

BASE = Spec(
    dtype="float16", heads=(14, 2), queries=1, lengths=(290, 90), coded=(192, 0), grace=(64, 0),
    key="", value="", key_width=64, value_width=64, sink_tokens=4, window=64, block=64, sharp=1.0,
    strided=False, seed=3,
)  # fmt: skip


def spec_of(dims: int, width: int, base: Spec = BASE, **changes) -> Spec:
    key, value = CODES[dims]
    widths = {"key_width": width, "value_width": width}
    return replace(base, **{"key": key, "value": value} | widths | changes)


def ran(spec: Spec, code: int | str, rows: int) -> None:
    """In the simulator: the kernel meant was the one that ran."""
    if _ext.simulated():
        name = f"attention_matrix_{spec.dtype}_{spec.key_width}_{code}_{rows}"
        assert name in _ext.simulator_executed()


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dims", CODES)
def test_every_size(dims, width, dtype):
    """A tile of 4 or 8 rows for each head, several of 16, and rows that do not fill the last."""
    for heads, rows in (((6, 2), 4), ((14, 2), 8)):
        spec = spec_of(dims, width, dtype=dtype, heads=heads)
        check(build(spec), scale=spec.scale, mask="causal", sinks=sinks_of(spec))
        ran(spec, dims, rows)
    spec = replace(spec, queries=5, lengths=(205, 200), coded=(128, 128), grace=(0, 64))
    check(build(spec), scale=spec.scale, mask="causal")
    ran(spec, dims, 16)


LENGTHS = [
    ((1, 2), (0, 0), (0, 0)),  # nothing coded, hardly a token
    ((69, 64), (1, 0), (1, 0)),  # a single code
    ((1500, 700), (1408, 600), (64, 600)),  # several slices, a partial block, much grace
    ((700, 3), (600, 0), (0, 0)),
]


@pytest.mark.sim
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(("lengths", "coded", "grace"), LENGTHS)
def test_lengths(lengths, coded, grace, mask):
    for heads, queries in (((8, 2), 1), ((14, 2), 1), ((14, 2), 3)):
        changes = {"lengths": lengths, "coded": coded, "grace": grace, "queries": queries}
        spec = spec_of(4, 64, heads=heads, **changes)
        check(build(spec), scale=spec.scale, mask=mask, sinks=sinks_of(spec))


@pytest.mark.sim
@pytest.mark.parametrize("sharp", [1e-6, 1e-3, 30.0, 300.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_magnitudes(dtype, sharp):
    """Products go through 16 bits: scales of values, and rows of queries, are kept near 1 there."""
    for dims, heads in ((2, (2, 1)), (8, (14, 2))):
        spec = spec_of(dims, 128, dtype=dtype, sharp=sharp, queries=2, heads=heads)
        check(build(spec), scale=min(1.0, 1 / sharp) * spec.scale, mask="causal")


@pytest.mark.sim
def test_scales_that_grow_from_token_to_token():
    """The unit in which outputs are counted follows the largest scale seen so far."""
    for heads in ((8, 2), (14, 2)):
        changes = {"lengths": (900, 500), "coded": (800, 400), "grace": (0, 0), "heads": heads}
        spec = spec_of(4, 64, value="turboquant-2bit", key="turboquant-2bit", **changes)
        check_grown(build(spec), spec.scale)


def check_grown(case, scale):
    body = case.values.body
    steps = mx.exp(mx.linspace(-12, 3, body.scales.shape[-1]))
    for factor in (steps, steps[::-1]):
        scales = (body.scales.astype(mx.float32) * factor).astype(mx.bfloat16)
        grown = replace(case.values, body=replace(body, scales=scales))
        check(replace(case, values=grown), scale=scale, mask="causal")


@pytest.mark.sim
@pytest.mark.parametrize("block", [64, 128, 48])
def test_blocks_of_centres(block):
    """Steps of 64 tokens must not straddle two centres: other blocks take the general kernel."""
    for heads in ((8, 2), (14, 2)):
        changes = {"lengths": (700, 300), "coded": (576, 192), "grace": (0, 0), "heads": heads}
        spec = spec_of(4, 64, block=block, **changes)
        check(build(spec), scale=spec.scale, mask="causal")


@pytest.mark.sim
def test_what_it_leaves_to_the_general_kernel():
    """Other codes, masks, widths and float32."""
    for changes in (
        {"dtype": "float32"},
        {"value": "product-d2"},
        {"value_width": 128},
        {"key": "turboquant-3bit"},
        {"key": "product-d8-group", "value": "product-d8-group"},
    ):
        spec = spec_of(4, 64, **changes)
        check(build(spec), scale=spec.scale, mask="causal")
    spec = spec_of(4, 64)
    mask = mx.zeros((1, 14, 1, 290), mx.float16)
    check(build(spec), scale=spec.scale, mask=mask)


@pytest.mark.sim
@pytest.mark.parametrize("block", [7, 8, 20])
def test_arrays_that_end_within_a_step(block):
    """Steps read 64 tokens that exist: the last one begins earlier, and its scales at any token."""
    for code in ("turboquant-2bit", "product-d4"):
        for heads in ((8, 2), (14, 2)):
            changes = {"lengths": (400, 130), "coded": (280, 60), "grace": (0, 0), "heads": heads}
            spec = spec_of(4, 64, key=code, value=code, block=block, window=20, **changes)
            check(build(spec), scale=spec.scale, mask="causal")
            ran(spec, 4, 4 if heads == (8, 2) else 8)
