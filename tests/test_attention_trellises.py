"""The kernels that multiply matrices of a simdgroup, for keys and values of two trellis codes.

Elsewhere these calls run the same code as all others, and must keep the same bound.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from attention_cases import Spec, build, sinks_of
from attention_oracle import check
from test_attention_matrix import BASE, LENGTHS, check_grown, ran
from test_attention_prefill import BASE as PREFILL
from test_attention_prefill import ran as ran_prefill
from test_attention_trellis import BITS, launched

PAIRS = tuple(permutations(BITS, 2))
"""Bits of keys and of values."""

SMALL = {"lengths": (150,), "coded": (64,), "grace": (0,)}


def spec_of(pair: tuple[int, int], width: int, base: Spec = BASE, **changes) -> Spec:
    sides = {"key": f"trellis-{pair[0]}-centred", "value": f"trellis-{pair[1]}-head"}
    return replace(base, **sides | {"key_width": width, "value_width": width} | changes)


def dtype_of(pair: tuple[int, int]) -> str:
    """One for each pair; every code of a side is paired with both."""
    return "float16" if sum(pair) % 2 else "bfloat16"


@pytest.mark.sim
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_pair(pair, width):
    """A tile of 8 rows for each head, several of 16, and rows that do not fill the last."""
    spec = spec_of(pair, width, dtype=dtype_of(pair))
    check(build(spec), scale=spec.scale, mask="causal", sinks=sinks_of(spec))
    ran(spec, "trellis", 8)
    spec = replace(spec, queries=3, lengths=(205, 200), coded=(128, 128), grace=(0, 64))
    check(build(spec), scale=spec.scale, mask="causal")
    ran(spec, "trellis", 16 if width < 256 else 8)


@pytest.mark.sim
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_pair_of_prefill(pair, width):
    """80 rows: the second tile of 64 is not full; rows of the batch differ in length."""
    spec = spec_of(pair, width, PREFILL, dtype=dtype_of(pair))
    check(build(spec), scale=spec.scale, mask="causal", sinks=sinks_of(spec))
    ran_prefill(spec, "trellis")


@pytest.mark.sim
@pytest.mark.parametrize("rows", range(1, 17))
def test_rows(rows):
    """Of a KV head: query heads, or query tokens."""
    spec = spec_of(PAIRS[rows % 12], 64, lengths=(180, 90), coded=(128, 0))
    for heads, queries in ((rows, 1), (1, rows)):
        spec = replace(spec, heads=(heads, 1), queries=queries)
        check(build(spec), scale=spec.scale, mask="causal")
        ran(spec, "trellis", 8 if rows <= 8 else 16)


@pytest.mark.sim
@pytest.mark.parametrize("pair", [(2, 1), (1, 4), (4, 3)], ids=str)
def test_presets(pair):
    """Kernels turn queries and outputs; the keys of the presets have centres."""
    sides = {"key": f"trellis-{pair[0]}bit", "value": f"trellis-{pair[1]}bit"}
    spec = replace(BASE, **sides, heads=(3, 1), dtype=dtype_of(pair), **SMALL)
    check(build(spec), scale=spec.scale, mask="causal")
    ran(spec, "trellis", 8)
    spec = replace(spec, queries=20)
    check(build(spec), scale=spec.scale, mask="causal")
    ran_prefill(spec, "trellis")


@pytest.mark.sim
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(("lengths", "coded", "grace"), LENGTHS)
def test_lengths(lengths, coded, grace, mask):
    for pair, queries in (((2, 3), 1), ((3, 4), 2), ((4, 1), 9)):
        changes = {"lengths": lengths, "coded": coded, "grace": grace, "queries": queries}
        spec = spec_of(pair, 64, **changes)
        check(build(spec), scale=spec.scale, mask=mask, sinks=sinks_of(spec))


@pytest.mark.sim
@pytest.mark.parametrize(("block", "room"), [(4, 276), (20, 280)])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_arrays_that_end_within_a_step(pair, block, room):
    """The last step begins earlier, and no word behind an array is read: with room for
    280 tokens codes end where the simulator guards memory. Windows of 20 tokens."""
    key = f"trellis-{pair[0]}-head"  # blocks of centres would be too short
    for heads, queries, rows in (((3, 1), 1, 8), ((14, 2), 2, 16), ((3, 1), 20, 0)):
        changes = {"lengths": (130, 400), "coded": (60, room), "grace": (0, 0), "heads": heads}
        spec = spec_of(pair, 64, key=key, block=block, window=20, queries=queries, **changes)
        case = build(replace(spec, seed=1))
        assert case.keys.body.codes.shape[2] == case.values.body.codes.shape[2] == room
        check(case, scale=spec.scale, mask="causal")
        if rows:
            ran(spec, "trellis", rows)
        else:
            ran_prefill(spec, "trellis")


@pytest.mark.sim
def test_scales_that_grow_from_token_to_token():
    """The unit in which outputs are counted follows the largest scale seen so far."""
    changes = {"lengths": (900, 500), "coded": (800, 400), "grace": (0, 0)}
    spec = spec_of((3, 1), 64, **changes)
    check_grown(build(spec), spec.scale)


def check_small() -> None:
    """Every pair, few query rows and many."""
    for pair in PAIRS:
        for queries in (1, 20):
            spec = spec_of(pair, 64, heads=(3, 1), queries=queries, **SMALL)
            check(build(spec), scale=spec.scale, mask="causal")


@pytest.mark.sim
def test_no_pair_is_left_to_the_general_kernel(simulated):
    if not simulated:
        pytest.skip("the executor is not the simulator")
    kernels = launched("t.check_small()", "test_attention_trellises")
    attention = {k for k in kernels if k.startswith(("attention_matrix", "attention_prefill"))}
    assert attention == {
        "attention_matrix_float16_64_trellis_8",
        "attention_prefill_float16_64_trellis",
    }
    assert not [k for k in kernels if "tile" in k]
