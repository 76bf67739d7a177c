"""The simulator libraries, built once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import simulator_library  # noqa: E402


@pytest.fixture(scope="session")
def compiler() -> list[str]:
    found = simulator_library.compilers()
    if not found:
        pytest.skip("no C++ compiler")
    return found[0]


@pytest.fixture(scope="session")
def library(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulator_library.build(compiler, tmp_path_factory.mktemp("simulator") / "simulator.so")


@pytest.fixture(scope="session")
def sim(library: Path) -> simulator_library.Simulator:
    return simulator_library.Simulator(library)
