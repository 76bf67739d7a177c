"""The ops of the package, each with other ways to compute the same thing; a module per family.

Attention has a benchmark of its own.
"""

from . import bits, hadamard, qjl, scalar, trellis, vq
from .registry import OPS, Calls

__all__ = ["OPS", "Calls", "bits", "hadamard", "qjl", "scalar", "trellis", "vq"]
