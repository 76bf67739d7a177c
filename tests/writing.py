"""Tiny models whose texts depend on what they remember: in the plain tiny llama every token follows
from the last alone."""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama as mlx_llama
from mlx_lm.models import qwen2 as mlx_qwen2

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "rope_theta": 10000,
    "tie_word_embeddings": True,
}  # fmt: skip


def _fill(model):
    """Weights that make attention sharp and the last token one of many."""
    mx.random.seed(4)
    weights = []
    for name, x in tree_flatten(model.parameters()):
        if "embed" in name:
            x = 0.15 * mx.random.normal(x.shape)
        elif x.ndim == 2:
            x = 4 * mx.random.uniform(-1, 1, x.shape) / x.shape[1] ** 0.5
        elif "bias" in name:  # as they come they are random
            x = mx.random.normal(x.shape)
        weights.append((name, x))
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def llama(**sizes):
    args = {"model_type": "llama", "head_dim": 64, **SIZES, **sizes}
    return _fill(mlx_llama.Model(mlx_llama.ModelArgs(**args)))


def qwen2(**sizes):
    """Of the kinds of models that mlx_lm pipelines; heads of ``hidden_size / heads``."""
    args = {"model_type": "qwen2", **SIZES, "hidden_size": 128, **sizes}
    return _fill(mlx_qwen2.Model(mlx_qwen2.ModelArgs(**args)))


def greedy(model, prompt, cache, tokens: int) -> tuple[list[int], float]:
    """The tokens after a prompt, and the least margin of one over the next best."""
    found, margin = [], float("inf")
    for token, logprobs in generate_step(
        mx.array(prompt), model, max_tokens=tokens, prompt_cache=cache, prefill_step_size=100
    ):
        second, best = mx.sort(logprobs)[-2:].tolist()
        found.append(token)
        margin = min(margin, best - second)
    return found, margin
