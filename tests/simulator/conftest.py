"""The simulator libraries, built once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import simulator_library  # noqa: E402


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = simulator_library.compilers()
    if not found:
        pytest.skip("no C++ compiler")
    return simulator_library.build(found[0], tmp_path_factory.mktemp("simulator") / "simulator.so")


@pytest.fixture(scope="session")
def sim(library: Path) -> simulator_library.Simulator:
    return simulator_library.Simulator(library)
