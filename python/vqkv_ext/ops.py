"""The public ops. Each runs a native kernel for its device (CPU or GPU), or the same computation in
plain mlx: see ``use_metal_kernels`` in :func:`native`."""

from __future__ import annotations

import logging

import mlx.core as mx

from . import _ext, reference
from .packed import PackedKV

__all__ = ["attention", "dequantize_vq", "fake_quantize_vq", "native", "quantize_vq"]

_log = logging.getLogger("vqkv_ext")


def native(use_metal_kernels: bool | None, what: str = "ops") -> bool:
    """Whether a native kernel runs on the default device.

    Args:
        use_metal_kernels: None takes the native kernel of the device (CPU or GPU). True insists on
            the Metal kernels, on a GPU or in the simulator. False takes plain mlx.
        what: Named in the error.

    Raises:
        RuntimeError: ``use_metal_kernels`` is True where the default device has no Metal kernels.
    """
    if use_metal_kernels is False:
        return False
    gpu = mx.default_device().type == mx.DeviceType.gpu
    if use_metal_kernels and not (gpu and _ext.gpu_executor() != "none") and not _ext.simulated():
        raise RuntimeError(
            f"[{what}] use_metal_kernels=True needs a GPU with Metal kernels, but the default "
            f"device is {mx.default_device()} and this build's GPU executor is "
            f"{_ext.gpu_executor()!r}."
        )
    return not gpu or _ext.gpu_executor() != "none"


def quantize_vq(
    x: mx.array, codebook: mx.array, *, use_metal_kernels: bool | None = None
) -> mx.array:
    """Index of the nearest codebook row (squared Euclidean distance) for every sub-vector.

    Distances are float32; ties go to the lowest index. A sub-vector with a NaN or an infinity is
    nearest to nothing and gets code 0. Memory beyond the result does not grow with ``x``. The
    derivative is zero: to train through it use :func:`fake_quantize_vq`.

    Args:
        x: ``[..., G * d]``, float32, float16 or bfloat16.
        codebook: ``[K, d]`` shared, ``[G, K, d]`` per sub-vector, or ``[H, 1 or G, K, d]`` per head
            with ``x`` ``[..., H, S, G * d]``; K from 1 to 65536.
        use_metal_kernels: See :func:`native`.

    Returns:
        Codes ``[..., G]``, uint8 for K <= 256, else uint16.

    Raises:
        ValueError: Wrong dtype or shape.

    Source: product quantisation, Jegou et al., "Product Quantization for Nearest Neighbor Search".
    """
    if native(use_metal_kernels, "quantize_vq"):
        return _ext.quantize_vq(x, codebook)
    return reference.quantize_vq(x, codebook)


def dequantize_vq(
    codes: mx.array,
    codebook: mx.array,
    dtype: mx.Dtype | None = None,
    *,
    use_metal_kernels: bool | None = None,
) -> mx.array:
    """Codebook rows by index, the inverse of :func:`quantize_vq`.

    Args:
        codes: ``[..., G]`` uint8 or uint16. A code of K or more decodes to NaN.
        codebook: As in :func:`quantize_vq`. Its derivative is a scatter-add over the codes.
        dtype: Of the result; the codebook's by default.
        use_metal_kernels: See :func:`native`.

    Returns:
        Vectors ``[..., G * d]``.

    Raises:
        ValueError: Wrong dtype or shape.
    """
    if native(use_metal_kernels, "dequantize_vq"):
        return _ext.dequantize_vq(codes, codebook, dtype)
    return reference.dequantize_vq(codes, codebook, dtype)


def fake_quantize_vq(
    x: mx.array, codebook: mx.array, *, use_metal_kernels: bool | None = None
) -> mx.array:
    """``dequantize_vq(quantize_vq(x, codebook), codebook)`` for training.

    The straight-through estimator: the cotangent passes to ``x`` unchanged, and is scatter-added to
    the codebook rows that were chosen.

    Args and errors: as for :func:`quantize_vq`. Returns an array like ``x``.

    Source: Bengio et al., arXiv 1308.3432; van den Oord et al., arXiv 1711.00937.
    """
    if native(use_metal_kernels, "fake_quantize_vq"):
        return _ext.fake_quantize_vq(x, codebook)
    return reference.fake_quantize_vq(x, codebook)


def _coded(packed: PackedKV) -> _ext.Coded:
    b = packed.body
    return _ext.Coded(b.codes, b.code.table, b.code.stride, b.scales, b.centres, b.centre_scales)


def _decoded(packed: PackedKV) -> mx.array:
    b = packed.body
    x = reference.decode(
        b.codes,
        b.code.table,
        b.code.stride,
        packed.layout.block,
        b.scales,
        b.centres,
        b.centre_scales,
    )
    return x[..., : packed.tail.shape[-1]]


def attention(
    q: mx.array,
    keys: PackedKV,
    values: PackedKV,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    use_metal_kernels: bool | None = None,
) -> mx.array:
    """Scaled dot-product attention that reads codes directly and never rebuilds K or V.

    A query that sees N tokens reads codes for the body's first
    ``block * max(0, floor((N - sink_tokens - window) / block))`` tokens after the sinks, and the
    tail for the rest, whatever chunk of the prompt it arrives in.

    Args:
        q: ``[B, Hq, L, D]``; float32, float16 or bfloat16.
        keys, values: Of ``Hkv`` heads, ``Hq`` a multiple of it; they share one layout, whose
            lengths include the L query tokens. Widths may differ, up to 576.
        scale: Softmax scale.
        mask: None (every query sees all tokens), ``"causal"`` (aligned at the lower right), or an
            array broadcastable to ``[B, Hq, L, N]``, boolean (True = visible) or additive, whose
            columns are logical positions. An array mask excludes nothing beyond what it says.
        sinks: ``[Hq]``, a logit per head that takes part in the softmax without a value.
        use_metal_kernels: See :func:`native`. Array masks and sinks run in plain mlx for now.

    Returns:
        ``[B, Hq, L, Dv]`` in the dtype of ``q``. A query that sees nothing gives zeros.

    Raises:
        ValueError: Shapes or dtypes that do not fit together.
    """
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f"[attention] mask must be None, 'causal' or an array, but got {mask!r}.")
    if keys.layout is not values.layout:
        raise ValueError("[attention] keys and values must share one Layout, but got two.")
    array_mask = mask if isinstance(mask, mx.array) else None
    layout = keys.layout
    causal = isinstance(mask, str)
    key_basis, value_basis = keys.body.transform, values.body.transform
    q_code = key_basis.query(q) if key_basis is not None else q
    separate = value_basis is not None
    common = {
        "scale": scale,
        "sink_tokens": layout.sink_tokens,
        "window": layout.window,
        "block": layout.block,
        "causal": causal,
        "separate": separate,
    }
    plain = array_mask is not None or sinks is not None
    if native(use_metal_kernels, "attention") and not plain:
        _log.debug("attention: native kernel")
        parts = _ext.attention(
            q, q_code, layout.rows, keys.tail, values.tail, _coded(keys), _coded(values), **common
        )
    else:
        _log.debug("attention: plain mlx")
        parts = reference.attention(
            q,
            q_code,
            layout.rows,
            keys.tail,
            values.tail,
            _decoded(keys),
            _decoded(values),
            mask=array_mask,
            sinks=sinks,
            **common,
        )
    if value_basis is None:
        return parts[0]
    return (value_basis.inverse(parts[0]) + parts[1]).astype(q.dtype)
