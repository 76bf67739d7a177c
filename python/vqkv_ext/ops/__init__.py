"""The public ops. Each runs a native kernel for its device (CPU or GPU), or the same computation in
plain mlx: see ``use_metal_kernels`` in :func:`native`."""

from .attention import attention
from .native import native
from .vq import dequantize_vq, fake_quantize_vq, quantize_vq

__all__ = ["attention", "dequantize_vq", "fake_quantize_vq", "native", "quantize_vq"]
