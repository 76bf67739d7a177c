"""Prompt caches in files, in the format of mlx_lm's save_prompt_cache.

A file holds the arrays of every cache and what their codecs are: presets by name, codebooks whole.
mlx_lm's own ``load_prompt_cache`` looks classes up by bare name in its module, where importing this
adapter puts the compressed ones; in a process that has not, it raises ``KeyError:
'CompressedKVCache'``. ``load_prompt_cache`` here also lets the model's attention read what it
loaded, and says what is wrong with a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from ..batch_cache import BatchCompressedKVCache
from ..cache import CompressedKVCache
from ..cache_base import CompressedCache

_CLASSES = (CompressedKVCache, BatchCompressedKVCache)


def register() -> None:
    """Let mlx_lm's ``load_prompt_cache`` find the compressed classes."""
    for cls in _CLASSES:
        setattr(stock, cls.__name__, cls)


def save_prompt_cache(
    path: str | Path, cache: Sequence[Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the caches of a model, compressed ones and mlx_lm's own.

    Args:
        path: Of a ``.safetensors`` file, replaced only when the new one is complete.
        cache: One per layer.
        metadata: Kept with them.

    Raises:
        ValueError: Another suffix.
    """
    path = _checked(path, "save_prompt_cache")
    part = path.with_name(f".{path.stem}.part.safetensors")
    stock.save_prompt_cache(str(part), list(cache), dict(metadata or {}))
    part.replace(path)


def load_prompt_cache(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    like: Sequence[Any] | None = None,
) -> tuple[list[Any], dict[str, str]]:
    """Read the caches of a model.

    Args:
        path: What :func:`save_prompt_cache` here or in mlx_lm wrote.
        model: Whose attention is to read them; enabled as by ``enable_attention``.
        like: Caches that the ones read must resemble: in number, and layer by layer in class,
            codecs and windows.

    Returns:
        The caches and the metadata.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: No prompt cache, a kind of cache that is not known, or not ``like`` the ones
            given; what differs is named.
    """
    op, path = "load_prompt_cache", _checked(path, "load_prompt_cache")
    if not path.is_file():
        raise FileNotFoundError(f"[{op}] {path} must be a file, but there is none.")
    register()
    for name in _class_names(path, op):
        if not hasattr(stock, name):
            raise ValueError(
                f"[{op}] {path} must hold caches of mlx_lm or vqkv_ext, but got {name}."
            )
    try:
        cache, metadata = stock.load_prompt_cache(str(path), return_metadata=True)
        mx.eval([c.state for c in cache])
    except (RuntimeError, LookupError, AttributeError, TypeError, ValueError) as e:
        if isinstance(e, ValueError) and str(e).startswith("["):
            raise
        raise ValueError(f"[{op}] {path} must be complete, but reading it failed: {e}") from e
    cache, metadata = list(cache), dict(metadata or {})
    if like is not None:
        _check_like(cache, like, path)
    if model is not None:
        from .attention import enable_attention

        enable_attention(model)
    return cache, metadata


def _checked(path: str | Path, op: str) -> Path:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"[{op}] path must end in .safetensors, but got {path}.")
    return path


def _class_names(path: Path, op: str) -> list[str]:
    """Of the caches in a file, from its header alone."""
    try:
        with path.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            metadata = json.loads(f.read(size)).get("__metadata__") or {}
    except (ValueError, AttributeError) as e:
        raise ValueError(f"[{op}] {path} must be a complete safetensors file, but {e}.") from e
    if "2.0" not in metadata:
        raise ValueError(f"[{op}] {path} must be written by save_prompt_cache, but is not.")
    return [name for key, name in metadata.items() if key.startswith("1.")]


def _check_like(cache: Sequence[Any], like: Sequence[Any], path: Path) -> None:
    op = "load_prompt_cache"
    if len(cache) != len(like):
        raise ValueError(f"[{op}] {path} must hold {len(like)} layers, but got {len(cache)}.")
    for i, (got, want) in enumerate(zip(cache, like, strict=True)):
        if type(got) is not type(want):
            raise ValueError(
                f"[{op}] layer {i} of {path} must be a {type(want).__name__}, but got a "
                f"{type(got).__name__}."
            )
        if not isinstance(got, CompressedCache):
            continue
        for what in ("fingerprint", "windows"):
            mine, theirs = getattr(want, what), getattr(got, what)
            if mine != theirs:
                raise ValueError(
                    f"[{op}] layer {i} of {path} must have {what} {mine!r}, but got {theirs!r}."
                )
