"""Which implementation of an op runs."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext


def native(use_metal_kernels: bool | None, what: str = "ops") -> bool:
    """Whether a native kernel runs on the default device.

    Args:
        use_metal_kernels: None takes the native kernel of the device (CPU or GPU). True insists on
            the Metal kernels: on a GPU, be it by Metal or compiled for CUDA, or in the simulator.
            False takes plain mlx.
        what: Named in the error.

    Raises:
        RuntimeError: ``use_metal_kernels`` is True where the default device has no Metal kernels.
    """
    if use_metal_kernels is False:
        return False
    gpu = mx.default_device().type == mx.DeviceType.gpu
    if use_metal_kernels and not (gpu and _ext.gpu_executor() != "none") and not _ext.simulated():
        raise RuntimeError(
            f"[{what}] use_metal_kernels=True needs a GPU and a build with a GPU executor, but the "
            f"default device is {mx.default_device()} and this build's GPU executor is "
            f"{_ext.gpu_executor()!r}."
        )
    return not gpu or _ext.gpu_executor() != "none"
