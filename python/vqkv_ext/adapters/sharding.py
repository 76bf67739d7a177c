"""Codecs for one rank of a model that mlx_lm has split over several processes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from ..codecs import Calibration, LayerCodecs, ProductCodec, query_aware
from ..codecs.vecinfer import PRESETS, build

__all__ = ["for_rank"]


def for_rank(calibration: Calibration, model: nn.Module) -> Calibration:
    """The part of a calibration that this rank's part of a model needs.

    ``model.shard(group)`` leaves each rank an even share of the KV heads, in order, and
    ``model.model.pipeline(group)`` a range of the layers. Presets without a calibration need no
    such step: their codecs serve any head.

    Args:
        calibration: Of the whole model.
        model: An mlx_lm model, split or not.

    Returns:
        ``calibration`` itself if the model is whole.

    Raises:
        ValueError: The calibrated KV heads cannot be split over the ranks.
    """
    inner = getattr(model, "model", None)
    if getattr(inner, "pipeline_size", 1) > 1:
        calibration = _layers(calibration, inner.start_idx, inner.end_idx)
    group = _tensor_group(model)
    if group is not None and group.size() > 1:
        calibration = _heads(calibration, group.rank(), group.size())
    return calibration


def _tensor_group(model: nn.Module) -> mx.distributed.Group | None:
    """The group over which the model's heads are split, if they are."""
    kinds = (AllToShardedLinear, QuantizedAllToShardedLinear)
    return next((m.group for m in model.modules() if isinstance(m, kinds)), None)


def _layers(calibration: Calibration, first: int, last: int) -> Calibration:
    if last > calibration.shape.layers:
        raise ValueError(
            f"[for_rank] {calibration.preset} must have codecs for layers {first} to {last - 1}, "
            f"but is for {calibration.shape.layers} layers."
        )
    shape = replace(calibration.shape, layers=last - first)
    return replace(calibration, shape=shape, layers=calibration.layers[first:last])


def _heads(calibration: Calibration, rank: int, size: int) -> Calibration:
    shape, preset = calibration.shape, calibration.preset
    if shape.kv_heads % size:
        raise ValueError(
            f"[for_rank] {preset} must be for KV heads that split over {size} ranks, but is for "
            f"{shape.kv_heads}."
        )
    each = shape.kv_heads // size

    def own(x: mx.array) -> mx.array:
        """This rank's heads of [H, ...], or all of [1, ...] that all heads share."""
        return x[rank * each : (rank + 1) * each] if x.shape[0] == shape.kv_heads else x

    layers = []
    for layer in calibration.layers:
        if layer.key.name in query_aware.PRESETS:
            smooth = own(mx.abs(layer.key.transform.diagonal))
            key = query_aware.key_codec(layer.key.name, smooth)
            layers.append(LayerCodecs(key, layer.value))
        elif isinstance(layer.key, ProductCodec):
            smooth = own(layer.key.transform.diagonal)
            books = (own(x.code.table) for x in (layer.key, layer.value))
            pair = build(PRESETS[layer.key.name], smooth, *books, shape.key_dim, shape.value_dim)
            layers.append(LayerCodecs(*pair))
        else:  # a preset, which serves any heads
            layers.append(layer)
    return replace(calibration, shape=replace(shape, kv_heads=each), layers=layers)
