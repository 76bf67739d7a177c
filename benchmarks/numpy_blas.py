"""Let a model's matrix products run through NumPy.

MLX's Linux wheel brings a reference BLAS; NumPy's brings OpenBLAS, four times as fast on one core
for SmolLM2 in float16. What the benchmarks measure, caches and attention, stays MLX.
"""

from __future__ import annotations

import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path


def worthwhile() -> bool:
    """On Linux without a GPU; macOS has Accelerate."""
    return sys.platform == "linux" and mx.default_device().type == mx.DeviceType.cpu


def _weight(module: nn.Module) -> np.ndarray:
    """``[in, out]`` float32."""
    return np.array(module.weight.astype(mx.float32)).T


def _product(x: mx.array, weight: np.ndarray) -> mx.array:
    rows = np.array(x.astype(mx.float32)).reshape(-1, weight.shape[0])
    return mx.array(rows @ weight).astype(x.dtype).reshape(*x.shape[:-1], -1)


class _Linear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.columns = _weight(linear)  # not an mx.array, so not a parameter
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, x: mx.array) -> mx.array:
        y = _product(x, self.columns)
        return y + self.bias if "bias" in self else y


class _Embedding(nn.Module):
    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.weight = embedding.weight
        self.columns = _weight(embedding)

    def __call__(self, ids: mx.array) -> mx.array:
        return self.weight[ids]

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(x, self.columns)


def use_numpy(model: nn.Module) -> None:
    """Replace the model's dense layers, in place. Products are float32, whatever the weights' type;
    activations and the cache keep theirs."""

    def replace(_: str, module: nn.Module) -> nn.Module:
        if type(module) is nn.Linear:
            return _Linear(module)
        return _Embedding(module) if type(module) is nn.Embedding else module

    leaves = tree_map_with_path(replace, model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(leaves)
