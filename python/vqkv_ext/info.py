"""What this installation is made of, for bug reports."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

from . import _ext
from .ops.native import executor


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def info() -> dict[str, Any]:
    """Versions, device, and which executor and kernel library are in use.

    Returns:
        A dict of plain values. ``executor`` is what native ops on the default device run on:
        ``"cpu"``, ``"metal"``, ``"cuda"`` or ``"sim"``. ``kernels`` says where GPU kernels come
        from: ``"metallib"`` (compiled at build time), ``"source"`` (compiled once per process),
        ``"fatbin"`` (CUDA, embedded in the extension) or ``"none"``.
    """
    return {
        "vqkv_ext": _version("vqkv-ext"),
        "mlx": mx.__version__,
        "mlx_lm": _version("mlx-lm"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "executor": executor(),
        "kernels": _ext.kernel_library() if _ext.gpu_executor() != "none" else "none",
        "gpu_executor": _ext.gpu_executor(),
        "simulator": _ext.has_simulator(),
        "cpu_isa": _ext.cpu_isa(),
    }
