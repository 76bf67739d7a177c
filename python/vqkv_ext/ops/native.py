"""Which implementation of an op runs."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext

# There are CPU kernels in every build, so a build with kernels for the GPU has some everywhere.
EVERYWHERE = _ext.gpu_executor() != "none"


def executor() -> str:
    """What native ops on the default device run on: ``"cpu"``, ``"metal"``, ``"cuda"``, ``"sim"``,
    or ``"none"`` on a GPU without kernels."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return _ext.gpu_executor()
    return "sim" if _ext.simulated() else "cpu"


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
    if use_metal_kernels is None:
        return EVERYWHERE or _ext.has_kernels()
    if use_metal_kernels and executor() in ("cpu", "none"):
        raise RuntimeError(
            f"[{what}] use_metal_kernels=True needs a GPU and a build with a GPU executor, but the "
            f"default device is {mx.default_device()} and this build's GPU executor is "
            f"{_ext.gpu_executor()!r}."
        )
    return use_metal_kernels
