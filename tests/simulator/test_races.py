"""Where the simulator sees what kernels access it reports races, and nothing else as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulator_library import HERE, KERNELS, Simulator, SimulatorError, build

THREADS = 64
VALUES = "of threadgroup array values, which thread"
REPORTS = {  # in forward order
    "race_nothing_between": f"thread 1, after the start, writes byte 4 {VALUES} 0 read",
    "race_shuffle_between": f"thread 0, after simd_sum .*, reads byte 4 {VALUES} 1 wrote",
    "race_weak_barrier": f"thread 32, after the start, writes byte 128 {VALUES} 0 read",
    "race_other_memory": f"thread 0, after threadgroup_barrier .*, reads byte 4 {VALUES} 1 wrote",
    "race_loop": f"thread 32, after threadgroup_barrier .*, reads byte 124 {VALUES} 31 wrote",
    "race_same_value": "thread 1, after the start, writes byte 0 of .* value, which thread 0 wrote",
    "race_threadgroups": r"threadgroup \(1,0,0\): thread 0, .* writes byte 252 of buffer 0, which "
    "thread 63 of another threadgroup wrote",
    "race_output": "after threadgroup_barrier .*, reads byte 252 of buffer 0, which .* 63 wrote",
    "race_read_early": f"thread 32, after threadgroup_barrier .*, reads byte 124 {VALUES} 31 wrote",
    "race_said_early": f"thread 0, after gate_wait .*, writes byte 0 {VALUES} 63 read",
}


@pytest.fixture(scope="module")
def library(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("races") / "simulator.so"
    return build(compiler, path, kernels=[*KERNELS, HERE / "race_kernels.metal"], races=True)


@pytest.fixture(scope="module")
def sim(library: Path) -> Simulator:
    return Simulator(library)


def launch(sim: Simulator, kernel: str, order: int) -> np.ndarray:
    out = np.zeros(2 * THREADS, np.float32)
    sim.launch(kernel, [out], np.uint32(0).tobytes(), [2], THREADS, order=order)
    return out


def kernels(sim: Simulator, start: str) -> list[str]:
    return [k for k in sim.kernels() if k.startswith(start)]


@pytest.mark.parametrize("kernel", REPORTS)
def test_a_race_is_reported_in_any_order(sim: Simulator, kernel: str) -> None:
    for order in (0, 1, 5, 6):
        with pytest.raises(SimulatorError, match="race in threadgroup") as e:
            launch(sim, kernel, order)
        assert order or re.search(REPORTS[kernel], str(e.value)), e.value


def test_all_races_are_covered(sim: Simulator) -> None:
    assert set(kernels(sim, "race_")) == set(REPORTS)


def test_what_is_ordered_is_no_race(sim: Simulator) -> None:
    fine = kernels(sim, "fine_")
    assert len(fine) == 8
    for kernel in fine:
        for order in (0, 1, 5, 6):
            launch(sim, kernel, order)


def test_what_follows_a_race_is_not_blamed(sim: Simulator) -> None:
    with pytest.raises(SimulatorError, match="race"):
        launch(sim, "race_loop", 0)
    launch(sim, "fine_loop", 0)


def test_good_kernels_have_no_races(library: Path) -> None:
    pytest_arguments = ["-q", "-p", "no:cacheprovider", "--confcutdir=.", "test_sim_kernels.py"]
    pytest_arguments += ["-k", "not test_order_of_the_environment"]  # which has a race of its own
    env = {**os.environ, "VQKV_TEST_SIMULATOR": str(library)}
    command = [sys.executable, "-m", "pytest", *pytest_arguments]
    r = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=env)
    assert r.returncode == 0, r.stdout[-4000:] + r.stderr[-4000:]
