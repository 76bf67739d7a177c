"""One way to time and weigh things, for all benchmarks."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable

import mlx.core as mx


def milliseconds(
    *calls: Callable[[], mx.array],
    rounds: int = 7,
    warmup: int = 2,
    together: int = 1,
    ahead: int = 1,
    pick: Callable[[list[float]], float] = statistics.median,
) -> list[float]:
    """Median (or `pick`) of each call's times, taken in turns so that all meet the same machine.

    With ``together`` several calls are evaluated at once and share the time of getting there, as
    the layers of a model do; with ``ahead`` so many evaluations are queued before the last is
    waited for, as generating does, so that the device is busy while the host queues the next.
    """

    def run(call: Callable[[], mx.array]) -> float:
        start = time.perf_counter()
        for _ in range(ahead):
            made = [call() for _ in range(together)]
            mx.async_eval(made)
        mx.eval(made)
        return 1e3 * (time.perf_counter() - start) / (together * ahead)

    for _ in range(warmup):
        for call in calls:
            run(call)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for i, call in enumerate(calls):
            times[i].append(run(call))
    return [pick(t) for t in times]


def copy_bandwidth() -> float:
    """Most bytes per second that an elementwise operation reads and writes: of 1 GiB on a GPU, 64
    MiB on a CPU."""
    gpu = mx.default_device().type == mx.DeviceType.gpu
    x = mx.zeros((1 << (28 if gpu else 24),), mx.float32)
    mx.eval(x)
    together = 4 if gpu else 1
    (ms,) = milliseconds(lambda: x + 1, rounds=9, together=together, pick=min)
    return 2 * x.nbytes / (1e-3 * ms)


def matmul_rate(dtype: mx.Dtype) -> float:
    """Operations per second of a product of square matrices, of 8192 on a GPU, 1024 on a CPU."""
    gpu = mx.default_device().type == mx.DeviceType.gpu
    n = 8192 if gpu else 1024
    a = mx.random.normal((n, n)).astype(dtype)
    mx.eval(a)
    together = 4 if gpu else 1
    return 2 * n**3 / (1e-3 * milliseconds(lambda: a @ a, rounds=5, together=together)[0])


def extra_bytes(call: Callable[[], mx.array]) -> int:
    """Peak memory of MLX during a call, beyond what was held before it; the result included."""
    mx.eval(call())
    gc.collect()
    mx.clear_cache()
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return mx.get_peak_memory() - base


def blas() -> str:
    """The BLAS that MLX's CPU matmul uses here, as far as can be told."""
    maps = "/proc/self/maps"
    if os.path.exists(maps):
        with open(maps) as f:
            # NumPy's wheel has an OpenBLAS of its own that MLX does not see
            if any("openblas" in line and "scipy_openblas" not in line for line in f):
                return "OpenBLAS"
        return "the wheel's reference BLAS"
    return "Accelerate"
