"""The kernel for many query rows of a head: 16-bit queries, width 64 or 128.

Elsewhere these calls run the same code as all others, and must keep the same bound.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import test_attention_matrix
from attention_cases import Spec, build, sinks_of
from attention_oracle import check
from oracle import EPS, f64
from test_attention_matrix import CODES, check_grown
from vqkv_ext import _ext, ops

BASE = Spec(
    dtype="float16", heads=(4, 1), queries=20, lengths=(300, 170), coded=(192, 64), grace=(64, 0),
    key="", value="", key_width=64, value_width=64, sink_tokens=4, window=64, block=64, sharp=1.0,
    strided=False, seed=5,
)  # fmt: skip


spec_of = partial(test_attention_matrix.spec_of, base=BASE)


def ran(spec: Spec, code: int | str) -> None:
    """In the simulator: the kernels meant were those that ran."""
    if _ext.simulated():
        name = f"attention_prefill_{spec.dtype}_{spec.key_width}_{code}"
        assert name in _ext.simulator_executed()
        merge = f"attention_merge_rows_{spec.dtype}_{spec.key_width}"
        assert merge in _ext.simulator_executed()


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dims", CODES)
def test_every_size(dims, width, dtype):
    """80 rows: the second tile of 64 is not full; rows of the batch differ in length."""
    spec = spec_of(dims, width, dtype=dtype)
    check(build(spec), scale=spec.scale, mask="causal", sinks=sinks_of(spec))
    ran(spec, dims)


@pytest.mark.sim
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(
    ("lengths", "coded", "grace"),
    [
        ((25, 1), (0, 0), (0, 0)),  # nothing coded, rows that see nothing
        ((69, 64), (1, 0), (1, 0)),  # a single code
        ((700, 300), (600, 200), (64, 200)),  # a partial block, much grace
    ],
)
def test_lengths(lengths, coded, grace, mask):
    changes = {"lengths": lengths, "coded": coded, "grace": grace}
    spec = spec_of(4, 64, **changes)
    check(build(spec), scale=spec.scale, mask=mask, sinks=sinks_of(spec))
    ran(spec, 4)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("heads", "queries"),
    [
        ((1, 1), 49),  # rows that do not fill a simdgroup
        ((7, 1), 9),  # tiles that hold several heads
        ((4, 2), 33),  # tiles that end within a head
        ((1, 1), 129),
    ],
)
def test_rows(heads, queries):
    changes = {"heads": heads, "queries": queries, "lengths": (230, 129), "coded": (128, 0)}
    spec = spec_of(2, 64, **changes, grace=(64, 0))
    check(build(spec), scale=spec.scale, mask="causal", sinks=sinks_of(spec))
    ran(spec, 2)


@pytest.mark.sim
@pytest.mark.parametrize("sharp", [1e-6, 30.0, 300.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_magnitudes(dtype, sharp):
    """Products go through 16 bits: scales of values, and rows of queries, are kept near 1 there."""
    for dims in (2, 8):
        spec = spec_of(dims, 64, dtype=dtype, sharp=sharp, lengths=(240, 90), coded=(128, 0))
        check(build(spec), scale=min(1.0, 1 / sharp) * spec.scale, mask="causal")


@pytest.mark.sim
def test_queries_of_zeros():
    """All scores are equal."""
    case = build(spec_of(2, 64))
    check(replace(case, q=mx.zeros_like(case.q)), mask="causal")


@pytest.mark.sim
def test_scales_that_grow_from_token_to_token():
    """The unit in which outputs are counted follows the largest scale seen so far."""
    spec = spec_of(4, 64, value="turboquant-2bit", key="turboquant-2bit")
    check_grown(build(spec), spec.scale)


@pytest.mark.sim
@pytest.mark.parametrize("block", [128, 48])
def test_blocks_of_centres(block):
    """More centres than are multiplied at once; blocks of 48 take the general kernel."""
    changes = {"lengths": (900, 400), "coded": (768, 192), "grace": (0, 0)}
    spec = spec_of(4, 64, block=block, **changes, window=20)
    check(build(spec), scale=spec.scale, mask="causal")


@pytest.mark.sim
@pytest.mark.parametrize("block", [7, 8])
def test_arrays_that_end_within_a_step(block):
    """Steps read tokens that exist: the last one begins earlier, and its scales at any token."""
    for code in ("turboquant-2bit", "product-d4"):
        changes = {"lengths": (400, 130), "coded": (280, 60), "grace": (0, 0)}
        spec = spec_of(4, 64, key=code, value=code, block=block, window=20, **changes)
        check(build(spec), scale=spec.scale, mask="causal")
        ran(spec, 4)


@pytest.mark.sim
def test_as_decode():
    """A chunk gives what its tokens give one at a time, within the rounding of both."""
    spec = spec_of(2, 128, lengths=(200,), coded=(128,), grace=(64,), queries=16)
    case = build(spec)
    together = f64(ops.attention(case.q, case.keys, case.values, scale=spec.scale, mask="causal"))
    top = np.abs(together).max()
    for i in (0, 7, 15):
        rows = np.array([[spec.lengths[0] - 15 + i, 128, case.start[0]]], np.int32)
        layout = replace(case.keys.layout, rows=mx.array(rows))
        sides = [replace(side, layout=layout) for side in (case.keys, case.values)]
        one = ops.attention(case.q[:, :, i : i + 1], *sides, scale=spec.scale, mask="causal")
        assert np.abs(f64(one)[:, :, 0] - together[:, :, i]).max() <= 4 * EPS["float16"] * top
