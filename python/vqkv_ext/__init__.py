"""Compressed KV caches for MLX, with attention that reads the compressed codes."""

from __future__ import annotations

import mlx.core as mx

from ._build import mlx_version as _built_for

if mx.__version__ != _built_for:
    raise ImportError(
        f"vqkv_ext was built for mlx {_built_for}, but mlx {mx.__version__} is installed; mlx's "
        f"C++ interface changes in every release. Run `pip install mlx=={_built_for}` or install "
        "the vqkv-ext release made for your mlx."
    )

from . import ops  # noqa: E402
from .info import info  # noqa: E402
from .named import (  # noqa: E402
    QJLKVCache,
    TrellisKVCache,
    TurboQuantKVCache,
    TurboQuantProdKVCache,
    TurboQuantRVQKVCache,
    VecInferKVCache,
)

__version__ = "0.1.0"
__all__ = [
    "QJLKVCache",
    "TrellisKVCache",
    "TurboQuantKVCache",
    "TurboQuantProdKVCache",
    "TurboQuantRVQKVCache",
    "VecInferKVCache",
    "__version__",
    "info",
    "ops",
]
