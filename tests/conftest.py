"""Fixtures: tiny models of mlx_lm, codecs fitted to noise, poisoned memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os

# Threads of OpenBLAS wait for each other by spinning: on a busy machine small products take many
# times as long as with one. The second line is for a library that was loaded before Python.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).openblas_set_num_threads(1)

import mlx.core as mx
import numpy as np
import pytest

import vqkv_ext  # noqa: F401  (checks the mlx version first)
from vqkv_ext import _ext


def pytest_report_header() -> str:
    return f"vqkv_ext: {vqkv_ext.info()}"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261130)


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(7)


@pytest.fixture
def poison():
    """Call with a size in bytes: fills MLX's buffer cache with NaN, so that an output element a
    kernel does not write is seen."""

    def fill(nbytes: int) -> None:
        for _ in range(3):
            a = mx.full((max(1, nbytes // 4),), mx.nan)
            mx.eval(a)
            del a
        gc.collect()

    return fill


@pytest.fixture(scope="session")
def simulated() -> bool:
    return _ext.simulated()
