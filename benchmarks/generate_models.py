"""Models of the shape of real ones with random weights: speed does not depend on the values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama


@dataclass(frozen=True)
class Spec:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    mlp: int
    vocab: int


SPECS = {
    "8b": Spec(32, 4096, 32, 8, 128, 14336, 128256),  # Llama 3 8B
    "falcon3": Spec(28, 3072, 12, 4, 256, 23040, 131072),  # Falcon3 7B
    "smollm2-shape": Spec(30, 576, 9, 3, 64, 1536, 49152),  # SmolLM2 135M
    "tiny": Spec(2, 128, 4, 2, 64, 256, 512),
}


def random_model(
    name: str, dtype: mx.Dtype, *, bits: int | None = None, layers: int | None = None
) -> llama.Model:
    """A llama of one of :data:`SPECS`.

    Args:
        name: Of the spec.
        dtype: Of the weights, or of the scales of quantised ones, and so of keys and values.
        bits: Of quantised weights (groups of 64), or None for dense ones.
        layers: Instead of the spec's.
    """
    spec = SPECS[name] if layers is None else replace(SPECS[name], layers=layers)
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama", hidden_size=spec.hidden, num_hidden_layers=spec.layers,
            intermediate_size=spec.mlp, num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads, head_dim=spec.width, rms_norm_eps=1e-5,
            vocab_size=spec.vocab, rope_theta=500000, tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
    for layer in model.layers:  # one by one: in between the weights are wider
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    model.eval()
    return model
