"""What this installation is made of, for bug reports."""

from __future__ import annotations

import os
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


def _environment() -> str | None:
    """Variables that change what vqkv_ext or mlx does."""
    names = sorted(n for n in os.environ if n.startswith(("VQKV_", "MLX_")))
    return " ".join(f"{n}={os.environ[n]}" for n in names) or None


def info() -> dict[str, Any]:
    """Versions, device, and which executor and kernel library are in use.

    Returns:
        A dict of plain values. ``executor`` is what native ops on the default device run on:
        ``"cpu"``, ``"metal"``, ``"cuda"`` or ``"sim"``. ``kernels`` says where GPU kernels come
        from: ``"metallib"`` (compiled at build time), ``"source"`` (compiled once per process),
        ``"fatbin"`` (CUDA, embedded in the extension) or ``"none"``. ``environment`` has the
        variables of vqkv_ext and mlx that are set.
    """
    return {
        "vqkv_ext": _version("vqkv-ext"),
        "mlx": mx.__version__,
        "mlx_lm": _version("mlx-lm"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "hardware": mx.device_info(mx.default_device()).get("device_name"),
        "executor": executor(),
        "kernels": _ext.kernel_library() if _ext.gpu_executor() != "none" else "none",
        "gpu_executor": _ext.gpu_executor(),
        "simulator": _ext.has_simulator(),
        "cpu_isa": _ext.cpu_isa(),
        "environment": _environment(),
    }
