"""The device (VQKV_DEVICE=cpu or gpu; mlx's default without) and fixtures: seeds, poisoned memory.

What is expected is computed in NumPy or by mlx on the CPU, whatever the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Generator

import mlx.core as mx
import numpy as np
import pytest

import vqkv_ext  # noqa: F401  (checks the mlx version first)
from vqkv_ext import _ext

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 products of plain mlx stay float32

# What MLX's CUDA backend says of what it does not have.
_LACKING = (
    r"\[\w+\] No implementation|\w+ has no CUDA implementation|"
    r"\[quantized_matmul\] .* is not supported"
)


def pytest_configure() -> None:
    device = os.environ.get("VQKV_DEVICE")
    if device not in (None, "cpu", "gpu"):
        raise pytest.UsageError(f"VQKV_DEVICE must be cpu or gpu, but is {device!r}")
    if device == "gpu" and _ext.gpu_executor() == "none":
        raise pytest.UsageError("VQKV_DEVICE=gpu, but this build has no GPU executor")
    if device is not None:
        mx.set_default_device(mx.Device(getattr(mx, device)))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Operations that MLX's CUDA backend does not have are no faults of ours."""
    try:
        return (yield)
    except (RuntimeError, ValueError) as error:
        lacks = re.match(_LACKING, str(error))
        if lacks and _ext.gpu_executor() == "cuda":
            pytest.skip(f"MLX: {error}")
        raise


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

    return fill


@pytest.fixture
def model():
    """A tiny one of mlx_lm, which the other tests do not need."""
    import tiny
    from vqkv_ext.adapters.mlx_lm import disable_attention

    made = tiny.llama(tied=False)
    yield made
    disable_attention(made)


@pytest.fixture(scope="session")
def simulated() -> bool:
    return _ext.simulated()


@pytest.fixture(scope="module")
def one_blas_thread():
    """Threads of OpenBLAS wait for each other by spinning: on a busy machine many small products
    take several times as long as with one. Where the library cannot be reached nothing changes."""
    with contextlib.suppress(AttributeError, OSError):
        blas = ctypes.CDLL(None)
        threads = blas.openblas_get_num_threads()
        blas.openblas_set_num_threads(1)
        yield
        blas.openblas_set_num_threads(threads)
        return
    yield


@pytest.fixture(scope="module")
def no_compile():
    """mx.compile on the CPU calls a C++ compiler, which takes seconds for a model."""
    mx.disable_compile()
    yield
    mx.enable_compile()
