"""benchmarks/kernels.py: all ways to compute an op agree, and every op has a case."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vqkv_ext import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import kernel_targets  # noqa: E402
import kernels  # noqa: E402


@pytest.mark.parametrize("name", kernels.OPS)
def test_ways_agree(name):
    kernels.check(name, kernels.OPS[name](5_000))


def test_every_op_has_a_case():
    cases = {name.split(",")[0] for name in kernels.OPS}
    assert cases == set(ops.__all__) - {"attention", "native"}


def test_targets_name_cases():
    assert {name for t in kernel_targets.TARGETS for name in t.ops} <= set(kernels.OPS)
