"""Tiny random models of mlx_lm and codecs for them; see ``llama``."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama as mlx_llama

from vqkv_ext.adapters.calibrate import calibrate
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.cache import CacheConfig
from vqkv_ext.codecs import Calibration

SMALL = CacheConfig(sink_tokens=2, window=8, block=8)
DEFAULT = CacheConfig()


def llama(
    head_dim: int = 64,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 3,
    layers: int = 2,
    tied: bool = True,
):
    """Hidden 32, vocabulary 97, float32, fixed weights. With tied embeddings the most probable
    token is the one just read; where generated tokens are compared, untie them."""
    mx.random.seed(seed)
    args = mlx_llama.ModelArgs(
        model_type="llama", hidden_size=32, num_hidden_layers=layers, intermediate_size=64,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=1e-5, vocab_size=97, rope_theta=10000, tie_word_embeddings=tied,
    )  # fmt: skip
    model = mlx_llama.Model(args)
    # embeddings of the size of trained ones, so that attention is neither flat nor one-hot
    model.model.embed_tokens.weight = mx.random.normal((97, 32))
    model.eval()
    mx.eval(model.parameters())
    return model


def ids(n: int, seed: int = 11) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, n).tolist()


def calibration(head_dim: int = 64, preset: str = "vecinfer-2bit") -> Calibration:
    """Fitted to ``llama(head_dim)``, once."""
    return _fitted(head_dim, preset)


@functools.cache
def _fitted(head_dim: int, preset: str) -> Calibration:
    return calibrate(llama(head_dim), ids(300, seed=5), preset, iterations=3)


def compressed(model, config: CacheConfig = SMALL, preset: str = "vecinfer-2bit"):
    return make_prompt_cache(model, calibration(model.args.head_dim, preset), config=config)


def run(model, cache, tokens, chunks=None) -> mx.array:
    """Logits [n, vocab] of the tokens, fed in chunks of the given sizes."""
    out, at = [], 0
    for n in chunks or [len(tokens)]:
        logits = model(mx.array(tokens[at : at + n])[None], cache=cache)
        mx.eval(logits, [c.state for c in cache])
        out.append(logits[0])
        at += n
    return mx.concatenate(out)


def run_some(model, cache, tokens, chunks) -> mx.array:
    """:func:`run` for lists of which some caches hold nothing."""
    out, at = [], 0
    for n in chunks:
        out.append(model(mx.array(tokens[at : at + n])[None], cache=cache)[0])
        mx.eval(out[-1], [c.state for c in cache if not c.empty()])
        at += n
    return mx.concatenate(out)
