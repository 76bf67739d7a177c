"""Compressed caches in mlx_lm's own programs, which build caches by a function they import."""

from __future__ import annotations

import contextlib
import copy
import importlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..codecs import Calibration, presets
from .mlx_lm import make_prompt_cache
from .sharding import for_rank

__all__ = ["MakePromptCache", "compressed_caches"]

_NAME = "make_prompt_cache"


class MakePromptCache:
    """Takes the place of ``mlx_lm.models.cache.make_prompt_cache``, with the same arguments.

    The codecs of a model are built once and shared by all of its caches.

    Args:
        codec: What :func:`vqkv_ext.adapters.mlx_lm.make_prompt_cache` takes. For a model split over
            several processes a calibration is that of the whole model.

    Raises:
        ValueError: A calibration file that cannot be used.
        FileNotFoundError: There is neither such a preset nor such a file.
    """

    def __init__(self, codec: Calibration | str | Path):
        known = isinstance(codec, Calibration) or codec in presets.PRESETS
        self.codec = codec if known else _load(codec)
        self._made: list[tuple[weakref.ref[nn.Module], list[Any]]] = []

    def __call__(self, model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
        if max_kv_size is not None:
            raise ValueError(
                "[make_prompt_cache] a compressed cache must have no maximum size, but got "
                f"max_kv_size {max_kv_size}."
            )
        self._made = [(ref, caches) for ref, caches in self._made if ref() is not None]
        for ref, caches in self._made:
            if ref() is model:
                return copy.deepcopy(caches)
        codec = self.codec
        if isinstance(codec, Calibration):
            codec = for_rank(codec, model)
        caches = make_prompt_cache(model, codec)
        self._made.append((weakref.ref(model), caches))
        return copy.deepcopy(caches)


def _load(codec: str | Path) -> Calibration:
    if not Path(codec).is_file():
        raise FileNotFoundError(
            f"[make_prompt_cache] codec must be one of {', '.join(presets.PRESETS)}, or a file of "
            f"`vqkv calibrate`, but got {str(codec)!r}."
        )
    return Calibration.load(codec)


@contextlib.contextmanager
def compressed_caches(
    codec: Calibration | str | Path,
    modules: Sequence[str] = ("mlx_lm.generate", "mlx_lm.chat", "mlx_lm.server"),
) -> Iterator[MakePromptCache]:
    """Within this context the named modules build compressed caches instead of mlx_lm's own.

    Args:
        codec: See :class:`MakePromptCache`.
        modules: Modules that bind ``make_prompt_cache``.
    """
    make = MakePromptCache(codec)
    bound = [importlib.import_module(name) for name in modules]
    originals = [getattr(module, _NAME) for module in bound]
    for module in bound:
        setattr(module, _NAME, make)
    try:
        yield make
    finally:
        for module, original in zip(bound, originals, strict=True):
            setattr(module, _NAME, original)
