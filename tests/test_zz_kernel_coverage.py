"""Last in the alphabet: what the other tests of this run have launched in the simulator."""

from __future__ import annotations

import pytest

from vqkv_ext import _ext

MOST = 200
"""Instantiations attention may have: each one is code to compile, ship and load."""


@pytest.mark.sim
def test_every_kernel_runs_in_the_simulator(request):
    """Whatever is in the kernel list was launched by the tests of this session."""
    if not _ext.simulated():
        pytest.skip("the executor is not the simulator")
    files = {item.path.name for item in request.session.items}
    needed = ("attention", "attention_matrix", "attention_prefill", "attention_trellis", "vq")
    needed += ("attention_trellises", "scalar", "qjl", "hadamard_quantize", "trellis")
    needed = {f"test_{n}.py" for n in needed}
    if not needed <= files:
        pytest.skip("not a whole run")
    kernels = set(_ext.simulator_kernels())
    attention = sum(k.startswith("attention") for k in kernels)
    print(f"{len(kernels)} kernel instantiations, {attention} of attention")
    assert 0 < attention < MOST
    assert sorted(kernels - set(_ext.simulator_executed())) == []
