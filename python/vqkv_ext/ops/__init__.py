"""The public ops. Each runs a native kernel for its device (CPU or GPU), or the same computation in
plain mlx: see ``use_metal_kernels`` in :func:`native`."""

from .attention import attention
from .hadamard import hadamard, hadamard_quantize
from .native import native
from .qjl import qjl_encode, qjl_inner_product
from .scalar import dequantize_scalar, pack_bits, quantize_scalar, unpack_bits
from .trellis import trellis_encode
from .vq import dequantize_vq, fake_quantize_vq, quantize_vq

__all__ = [
    "attention",
    "dequantize_scalar",
    "dequantize_vq",
    "fake_quantize_vq",
    "hadamard",
    "hadamard_quantize",
    "native",
    "pack_bits",
    "qjl_encode",
    "qjl_inner_product",
    "quantize_scalar",
    "quantize_vq",
    "trellis_encode",
    "unpack_bits",
]
