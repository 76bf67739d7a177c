"""Which caches of a model can be compressed: what its layers do with keys and values is tried out,
not looked up in a list of architectures.

A few tokens run through the model with probes in place of every plain ``KVCache``. Nothing is
evaluated: shapes, and whether a layer passes keys and values to attention and nowhere else, are
known from building the graph.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from ..cache import CompressedKVCache
from ..codecs.half import HalfCodec
from ..compressed_array import CompressedArray, ForeignUse
from ..packed import MAX_CHANNELS, PackedKV
from .attention import bind_model, unbind

_log = logging.getLogger("vqkv_ext")

_CHUNKS = (2, 1)  # tokens of the trial's calls: prefill and decode take different paths
_MIN_CHANNELS = 8

UNUSED = "gets no tokens"
"""Reason for a cache that the model never fills."""

Place = tuple[int, ...]
"""Index in the model's list of caches, then in the ``CacheList`` there."""


@dataclass(frozen=True)
class CacheSlot:
    """One cache of a model.

    Attributes:
        place: Index in the model's list, and in the ``CacheList`` there if it is one.
        kind: Class of the stock cache.
        reason: Why it stays the stock cache, or None where it can be compressed.
        kv_heads, key_dim, value_dim: Of what it caches; 0 where that is not known.
    """

    place: Place
    kind: str
    reason: str | None
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def layer(self) -> int:
        """Index in the model's list of caches."""
        return self.place[0]


def model_type(model: nn.Module) -> str:
    """mlx_lm's name of the architecture."""
    return getattr(model, "model_type", type(model).__name__)


def places(caches: list[Any]) -> Iterator[tuple[Place, Any]]:
    """Every cache of a model's list with its place, members of a ``CacheList`` one by one."""
    for i, cache in enumerate(caches):
        if type(cache) is stock.CacheList:
            yield from (((i, j), member) for j, member in enumerate(cache.caches))
        else:
            yield (i,), cache


def replaced(caches: list[Any], new: Callable[[Place, Any], Any]) -> list[Any]:
    """The list with every cache replaced by what ``new`` gives for it."""
    made = []
    for i, cache in enumerate(caches):
        if type(cache) is stock.CacheList:
            made.append(stock.CacheList(*(new((i, j), c) for j, c in enumerate(cache.caches))))
        else:
            made.append(new((i,), cache))
    return made


def cache_slots(model: nn.Module) -> list[CacheSlot]:
    """What can be compressed, for every cache of the model in order; enables attention for it.

    Args:
        model: An mlx_lm model.

    Raises:
        ValueError: Nothing can; attention is then as it was before.
    """
    fresh = bind_model(model)
    try:
        slots = _slots(model)
        if all(slot.reason for slot in slots):
            raise ValueError(
                f"[make_prompt_cache] {model_type(model)} must have a layer whose cache can be "
                f"compressed, but got {summary(slots) or 'no cache at all'}."
            )
    except BaseException:
        unbind(fresh, model)
        raise
    return slots


def summary(slots: list[CacheSlot]) -> str:
    """The slots that stay stock, by reason: ``layers 0, 2: RotatingKVCache, <reason>; ...``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for slot in slots:
        if slot.reason:
            where = ".".join(str(i) for i in slot.place)
            groups.setdefault((slot.kind, slot.reason), []).append(where)
    return "; ".join(
        f"layer{'s' if len(at) > 1 else ''} {', '.join(at)}: {kind}, {reason}"
        for (kind, reason), at in groups.items()
    )


def build(
    model: nn.Module, slots: list[CacheSlot], make: Callable[[CacheSlot], CompressedKVCache]
) -> list[Any]:
    """The model's own list of caches with compressed ones where ``slots`` say that they can be.

    What stays uncompressed goes to the logger ``vqkv_ext``: as a warning where it grows with the
    text.
    """
    by_place = {slot.place: slot for slot in slots if slot.reason is None}

    def new(place: Place, cache: Any) -> Any:
        return make(by_place[place]) if place in by_place else cache

    if rest := summary(slots):
        dense = any(s.kind == "KVCache" and s.reason != UNUSED for s in slots if s.reason)
        _log.log(
            logging.WARNING if dense else logging.INFO,
            "%s: %d of %d caches are compressed; %s",
            model_type(model),
            len(by_place),
            len(slots),
            rest,
        )
    return replaced(stock.make_prompt_cache(model), new)


def _slots(model: nn.Module) -> list[CacheSlot]:
    refused: dict[Place, str] = {}
    while True:
        trial = _Trial(model, refused)
        found = trial.run()
        if not found:
            break
        refused |= found
    slots = []
    for place, cache in places(stock.make_prompt_cache(model)):
        kind = type(cache).__name__
        if place in trial.probes:
            slots.append(CacheSlot(place, kind, None, *trial.probes[place].shape))
        else:
            slots.append(CacheSlot(place, kind, refused.get(place) or _stock_reason(cache)))
    return slots


def _stock_reason(cache: Any) -> str:
    match cache:
        case stock.RotatingKVCache():
            return "keeps a sliding window only"
        case stock.ArraysCache():
            return "keeps a state of constant size"
        case stock.ChunkedKVCache():
            return "keeps a chunk only"
    return "no plain KVCache"


class _Trial:
    """One run of a few tokens with probes in all places that may yet be compressed."""

    def __init__(self, model: nn.Module, refused: dict[Place, str]):
        self.model = model
        self.probes: dict[Place, _Probe] = {}
        self.last: _Probe | None = None

        def probe(place: Place, cache: Any) -> Any:
            if type(cache) is not stock.KVCache or place in refused:
                return cache
            return self.probes.setdefault(place, _Probe(self, place))

        self.caches = replaced(stock.make_prompt_cache(model), probe)

    def run(self) -> dict[Place, str]:
        """What turned out not to be served, with the reason; empty when all went well."""
        if not self.probes:
            return {}
        for tokens in _CHUNKS:
            try:
                self.model(mx.zeros((1, tokens), mx.int32), cache=self.caches)
            except Exception as e:
                probe = self._culprit(e)
                if probe is None:  # no cache of ours was touched
                    raise ValueError(
                        f"[make_prompt_cache] {model_type(self.model)} must run with its own cache,"
                        f" but got {type(e).__name__}: {e}"
                    ) from e
                return {probe.place: _reason(e)}
        reasons = {place: probe.idle() for place, probe in self.probes.items()}
        return {place: reason for place, reason in reasons.items() if reason}

    def _culprit(self, error: Exception) -> _Probe | None:
        if isinstance(error, ForeignUse) and isinstance(error.array, _Watched):
            return error.array.probe
        if isinstance(error, AttributeError) and isinstance(error.obj, _Probe):
            return error.obj
        return self.last


class _Probe(CompressedKVCache):
    """A compressed cache of any width that notes who reads it."""

    def __init__(self, trial: _Trial, place: Place):
        super().__init__(HalfCodec(_MIN_CHANNELS), HalfCodec(_MIN_CHANNELS))
        self.trial = trial
        self.place = place
        self.shape = (0, 0, 0)
        self.read = False
        self.taken: FrameType | None = None

    @property
    def keys(self) -> mx.array | None:
        """Taken by a pipelined model, which puts back what depends on them, or to be used."""
        self.taken = sys._getframe(1)
        return super().keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.taken = None
        CompressedKVCache.keys.fset(self, keys)  # type: ignore[attr-defined]

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[CompressedArray, CompressedArray]:
        self.trial.last = self
        if self.shape == (0, 0, 0):
            for name, x in (("keys", keys), ("values", values)):
                if not _MIN_CHANNELS <= x.shape[-1] <= MAX_CHANNELS:
                    raise _Width(
                        f"{name} must be {_MIN_CHANNELS} to {MAX_CHANNELS} wide, but are "
                        f"{x.shape[-1]}"
                    )
            self.shape = (keys.shape[1], keys.shape[3], values.shape[3])
            self.key_codec = HalfCodec(keys.shape[3])
            self.value_codec = HalfCodec(values.shape[3])
        return self._watched(super().update_and_fetch(keys, values))

    def keys_and_values(self) -> tuple[CompressedArray, CompressedArray]:
        self.trial.last = self
        return self._watched(super().keys_and_values())

    def _watched(
        self, handles: tuple[CompressedArray, CompressedArray]
    ) -> tuple[CompressedArray, CompressedArray]:
        keys, values = (_Watched(self, h) for h in handles)
        return keys, values

    def idle(self) -> str | None:
        """Why compressing would do nothing or harm, after a run without errors."""
        if self.shape == (0, 0, 0):
            return UNUSED
        if self.taken:
            return _foreign(self.taken)
        return None if self.read else "attention does not read what it returns"


class _Watched(CompressedArray):
    """A handle that tells its probe when attention reads it."""

    probe: _Probe

    def __init__(self, probe: _Probe, handle: CompressedArray):
        vars(self).update(vars(handle), probe=probe)
        probe.read = False

    @property
    def packed(self) -> PackedKV:  # type: ignore[override]
        self.probe.trial.last = self.probe
        self.probe.read = True
        return CompressedArray.packed.func(self)


class _Width(ValueError):
    """A width that attention over codes does not have."""


def _reason(error: Exception) -> str:
    if isinstance(error, _Width):
        return str(error)
    frames = _model_frames(error)
    if not isinstance(error, TypeError | AttributeError):
        return f"{_place(frames[-1])} cannot read it: {error}"
    if any(hasattr(frame.f_locals.get("self"), "kv_lora_rank") for frame in frames):
        return "multi-head latent attention, whose cache has no keys and values per head"
    return _foreign(frames[-1])


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} of {frame.f_globals.get('__name__')}"


def _foreign(frame: FrameType) -> str:
    return f"{_place(frame)} reads keys and values without mlx_lm's scaled_dot_product_attention"


def _model_frames(error: Exception) -> list[FrameType]:
    """Calls that led to the error, outermost first, without those of this package and of MLX."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(("vqkv_ext.", "mlx.")):
            frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames
