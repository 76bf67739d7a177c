"""The kernels that multiply matrices of a simdgroup, for trellis codes: rows that lie at any
address, windows of 8 bits every 1 to 4 bits.

Elsewhere these calls run the same code as all others, and must keep the same bound.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attention_cases import Spec, build, sinks_of
from attention_oracle import check
from test_attention_matrix import BASE, LENGTHS, check_grown, ran
from test_attention_prefill import BASE as PREFILL
from test_attention_prefill import ran as ran_prefill

BITS = (1, 2, 3, 4)


def spec_of(bits: int, width: int, base: Spec = BASE, **changes) -> Spec:
    sides = {"key": f"trellis-{bits}-centred", "value": f"trellis-{bits}-head"}
    return replace(base, **sides | {"key_width": width, "value_width": width} | changes)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_every_size(bits, width, dtype):
    """A tile of 8 rows for each head, several of 16, and rows that do not fill the last."""
    spec = spec_of(bits, width, dtype=dtype)
    check(build(spec), scale=spec.scale, mask="causal", sinks=sinks_of(spec))
    ran(spec, f"trellis{bits}", 8)
    spec = replace(spec, queries=3, lengths=(205, 200), coded=(128, 128), grace=(0, 64))
    check(build(spec), scale=spec.scale, mask="causal")
    ran(spec, f"trellis{bits}", 16 if width < 256 else 8)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("bits", BITS)
def test_every_size_of_prefill(bits, width, dtype):
    """80 rows: the second tile of 64 is not full; rows of the batch differ in length."""
    spec = spec_of(bits, width, PREFILL, dtype=dtype)
    check(build(spec), scale=spec.scale, mask="causal", sinks=sinks_of(spec))
    ran_prefill(spec, f"trellis{bits}")


@pytest.mark.sim
@pytest.mark.parametrize("bits", BITS)
def test_presets(bits):
    spec = replace(BASE, key=f"trellis-{bits}bit", value=f"trellis-{bits}bit", heads=(3, 1))
    spec = replace(spec, lengths=(150,), coded=(64,), grace=(0,), dtype="bfloat16")
    check(build(spec), scale=spec.scale, mask="causal")
    ran(spec, f"trellis{bits}", 8)
    spec = replace(spec, queries=20)
    check(build(spec), scale=spec.scale, mask="causal")
    ran_prefill(spec, f"trellis{bits}")


@pytest.mark.sim
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(("lengths", "coded", "grace"), LENGTHS)
def test_lengths(lengths, coded, grace, mask):
    for bits, queries in ((2, 1), (3, 2), (1, 9)):
        changes = {"lengths": lengths, "coded": coded, "grace": grace, "queries": queries}
        spec = spec_of(bits, 64, **changes)
        check(build(spec), scale=spec.scale, mask=mask, sinks=sinks_of(spec))


@pytest.mark.sim
@pytest.mark.parametrize(("block", "room"), [(4, 276), (20, 280)])
@pytest.mark.parametrize("bits", BITS)
def test_arrays_that_end_within_a_step(bits, block, room):
    """The last step begins earlier, and no word behind the array is read: with room for
    280 tokens codes end where the simulator guards memory."""
    key = f"trellis-{bits}-head"  # blocks of centres would be too short
    for heads, queries, rows in (((3, 1), 1, 8), ((14, 2), 1, 8), ((3, 1), 20, 0)):
        changes = {"lengths": (130, 400), "coded": (60, room), "grace": (0, 0), "heads": heads}
        spec = spec_of(bits, 64, key=key, block=block, window=20, queries=queries, **changes)
        case = build(replace(spec, seed=1))
        assert case.keys.body.codes.shape[2] == room
        check(case, scale=spec.scale, mask="causal")
        if rows:
            ran(spec, f"trellis{bits}", rows)
        else:
            ran_prefill(spec, f"trellis{bits}")


@pytest.mark.sim
def test_scales_that_grow_from_token_to_token():
    """The unit in which outputs are counted follows the largest scale seen so far."""
    changes = {"lengths": (900, 500), "coded": (800, 400), "grace": (0, 0)}
    spec = spec_of(2, 64, **changes)
    check_grown(build(spec), spec.scale)


GENERAL = (
    {"dtype": "float32"},
    {"value": "product-d4"},
    {"key": "product-d4"},
    {"value": "trellis-2-centred"},
    {"value_width": 128},
    {"key_width": 96, "value_width": 96},
    {"key_width": 256, "value_width": 256, "value": "product-d4"},
    {"key_width": 256, "value_width": 256, "value": "product-d4", "dtype": "bfloat16"},
    {"key": "trellis-2-head", "block": 7, "coded": (273, 0), "lengths": (400, 90)},
)
"""A trellis and a code of bytes, centred values, other widths, float32, room for no multiple of 4
tokens."""


def check_general(changes: dict) -> None:
    spec = replace(spec_of(2, 64, **changes), seed=1)
    check(build(spec), scale=spec.scale, mask="causal")


@pytest.mark.sim
@pytest.mark.parametrize("changes", GENERAL, ids=str)
def test_what_is_left_to_the_general_kernel(changes):
    check_general(changes)


@pytest.mark.sim
def test_the_general_kernel_takes_it(simulated):
    if not simulated:
        pytest.skip("the executor is not the simulator")
    kernels = launched(
        "for changes in t.GENERAL: t.check_general(changes)", "test_attention_trellis"
    )
    assert kernels and not [k for k in kernels if "matrix" in k or "prefill" in k]


def launched(statement: str, module: str) -> set[str]:
    """The kernels of a statement, in a process of its own, which launches nothing else."""
    program = (
        f"import {module} as t\n"
        "from vqkv_ext import _ext\n"
        f"{statement}\n"
        "print(*_ext.simulator_executed())"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    r = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert r.returncode == 0, r.stderr
    return set(r.stdout.split())
