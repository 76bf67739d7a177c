"""Tiny random models of every architecture of mlx_lm.

What can be is derived: the fields of a file's ``ModelArgs`` are filled from ``COMMON`` by name.
``OWN`` has what is special to a file, ``TEXT`` says which class describes the text model of one
that wraps it.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import sys
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten

# olmo asks for a package of its own, of which it uses nothing
sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))

VOCAB = 97
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MIXED = [_SLIDING, _FULL, _SLIDING, _FULL]

COMMON: dict[str, Any] = {
    # sizes
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "hidden_dim", "model_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 4),
    **dict.fromkeys(("num_transformer_layers",), 4),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "rotary_dim", "hidden_size_per_head"), 16),
    **dict.fromkeys(("vocab_size", "num_vocab", "embedding_size"), VOCAB),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "mlp_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size", "ff_intermediate_size"), 64),
    **dict.fromkeys(("n_inner", "dense_intermediate_size", "share_expert_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), 512),
    **dict.fromkeys(("original_max_position_embeddings", "model_max_length"), 512),
    # attention
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), 8),
    **dict.fromkeys(("window_size", "loop_window_size", "attention_chunk_size"), 8),
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    **dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "mlp_bias"), False),
    "use_qk_norm": True,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # positions and norms
    "rope_theta": 10000.0,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-5),
    **dict.fromkeys(("norm_eps", "layernorm_epsilon", "post_norm_eps"), 1e-5),
    "tie_word_embeddings": True,
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq"), 1),
    **dict.fromkeys(("first_k_dense_replace", "decoder_sparse_step"), 1),
    "mlp_only_layers": (),
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # sparse attention
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    # recurrent layers
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"), 4),
    **dict.fromkeys(("conv_L_cache", "conv1d_width", "short_conv_kernel_size"), 3),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "group_norm_size"), 1),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    **dict.fromkeys(("mamba_proj_bias", "mamba_conv_bias", "use_conv_bias", "conv_bias"), False),
    "layer_group_size": 2,
    "full_attention_interval": 4,
    # scales
    **dict.fromkeys(("logits_scaling", "embedding_multiplier", "residual_multiplier"), 1.0),
    "attention_multiplier": 0.25,
    "final_logit_softcapping": 30.0,
    "layer_types": None,
}

_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_ROPES = {_FULL: _ROPE, _SLIDING: _ROPE}
_YARN = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
         "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}  # fmt: skip
_LINEAR = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 4, "head_dim": 16,
           "short_conv_kernel_size": 4}  # fmt: skip
_LFM2 = {"layer_types": ["conv", _FULL, "conv", _FULL], "block_dim": 64, "block_multiple_of": 16,
         "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_ff_dim": 64,
         "num_dense_layers": 1, "use_expert_bias": True}  # fmt: skip
_LONGCAT = {"attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 1,
            "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
            "ngram_vocab_size_ratio": 4}  # fmt: skip
_MINICPM = {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0}
_NAS = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
_NAS_NONE = {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}

OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _MIXED, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2,
                    "tie_word_embeddings": False},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": _MIXED},
    "gemma3n": {
        "num_kv_shared_layers": 2, "rope_local_base_freq": 10000.0, "layer_types": _MIXED,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2, "altup_coef_clip": 100.0, "altup_correct_scale": True,
        "altup_active_idx": 0, "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "global_head_dim": 32,
        "sliding_window_pattern": 2,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"rope_parameters": _ROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan": {"use_cla": True, "cla_share_factor": 2, "use_mixed_mlp_moe": True,
                "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
              "expert_layer_period": 2},
    "kimi_k3": {"linear_attn_config": _LINEAR, "activation_situ_beta": 1.0},
    "kimi_linear": {"linear_attn_config": _LINEAR},
    "laguna": {"layer_types": _MIXED},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama4": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "rope_scaling": None},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba": {"time_step_rank": 4},
    "mamba2": {"time_step_rank": 4, "time_step_limit": (0.001, 100.0), "head_dim": 32},
    "mellum": {"layer_types": _MIXED, "rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": True,
        "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "head_dim": 24, "swa_head_dim": 24, "swa_v_head_dim": 16,
    },
    "minicpm": _MINICPM,
    "minicpm3": _MINICPM | {"rope_scaling": {"original_max_position_embeddings": 128,
                                             "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 8,
            "sparse_topk_blocks": 2, "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 0, 1],
        },
    },
    "ministral3": {"layer_types": _MIXED, "rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN, "head_dim": None},
    "muse_spark": {
        "rope_parameters": _ROPE, "layer_rope_theta": [10000.0, 0, 10000.0, 0],
        "layer_types": _MIXED, "output_multiplier": 1.0, "moe_hidden_size": 64,
        "num_shared_experts": 0,
        "num_local_experts": 4, "num_experts_per_tok": 4,  # all: which ones turns on a rounding
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [_NAS, _NAS_NONE, _NAS, _NAS]},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "E", "*", "-"]},
    "olmo": {"mlp_hidden_size": 64},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {"ffn_dim_divisor": 16, "num_query_heads": [4, 4, 8, 8],
                "num_kv_heads": [2, 2, 4, 4], "ffn_multipliers": [1.0] * 4},
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0,
                  "blocksparse_block_size": 32,
                  "vocab_size": 100352},  # it writes to the logits of fixed tokens
    "plamo": {"n_shared_head": 2},
    "plamo2": {"full_attention_idx": [3]},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.0.mlp.down_proj", "embedding": False,
                     "dtype": "float16", "block": 0}],
        "intermediate_size": 128, "num_experts": 0,
    },
    "qwen3_5": {"num_experts": 0},
    "recurrent_gemma": {"logits_soft_cap": 30.0,
                        "block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
              "decay_low_rank_dim": 8, "head_dim": 32},
    "spark2_5": {"layer_types": _MIXED, "rope_parameters": _ROPES},
    "step3p5": {"layer_types": _MIXED, "num_attention_groups": 2, "moe_num_experts": 4},
}  # fmt: skip

TEXT: dict[str, str] = {
    "gemma3": "gemma3_text.ModelArgs",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text.ModelArgs",
    "kimi_k25": "kimi_k25.TextConfig",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2.ModelArgs",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "llama.ModelArgs",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama.ModelArgs",
    "prism_hadamard_qwen35": "qwen3_5.TextModelArgs",
    "qwen2_vl": "qwen2.ModelArgs",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3.ModelArgs",
    "qwen3_vl_moe": "qwen3_moe.ModelArgs",
}


def names() -> list[str]:
    """Model files of the installed mlx_lm: those with a class ``Model``."""
    found = []
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        if hasattr(_module(info.name), "Model"):
            found.append(info.name)
    return found


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"mlx_lm.models.{name}")


def _fields(cls: type, file: str, own: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a dataclass of sizes."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in own:
            values[field.name] = own[field.name]
        elif field.name == "model_type":
            values[field.name] = file
        elif field.name in COMMON and not (
            COMMON[field.name] is None and field.default is not dataclasses.MISSING
        ):
            values[field.name] = COMMON[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise KeyError(
                f"no tiny size for {cls.__name__}.{field.name} of mlx_lm/models/{file}.py: add it "
                "to OWN (or COMMON) of tests/architectures.py"
            )
    return values


def arguments(name: str) -> Any:
    """``ModelArgs`` of a tiny model."""
    module, own = _module(name), OWN.get(name, {})
    if name in TEXT:
        file, cls = TEXT[name].split(".")
        text = _fields(getattr(_module(file), cls), file, OWN.get(file, {}) | own)
        own = {"text_config": text} | own
    return module.ModelArgs.from_dict(_fields(module.ModelArgs, name, own))


def build(name: str) -> nn.Module:
    """A tiny model with random float32 weights, equal for equal names."""
    _pretend_kernels()
    mx.random.seed(3)
    model = _module(name).Model(arguments(name))
    weights = [(k, _weight(k, v)) for k, v in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _pretend_kernels() -> None:
    """Where there is no Metal, let kernels of mlx_lm's own that have no other form give numbers of
    the right shape: what they compute does not matter to the comparison of two caches."""
    if mx.metal.is_available():
        return
    for name in ("mlx_lm.kernels", "mlx_lm.models.bitlinear_layers"):
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.kernels.") or name == "mlx_lm.models.bitlinear_layers":
            for kernel in [k for k in vars(module) if k.endswith("_kernel")]:
                setattr(module, kernel, _pretend)


def _pretend(
    *, inputs: list[mx.array], output_shapes: list, output_dtypes: list, **_: Any
) -> list[mx.array]:
    x = inputs[0].reshape(-1)
    outputs = []
    for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
        if mx.issubdtype(dtype, mx.floating):
            tiled = x[mx.arange(math.prod(shape)) % x.size]
            outputs.append(mx.tanh(tiled.astype(dtype)).reshape(shape))
        else:  # indices
            outputs.append(mx.zeros(shape, dtype))
    return outputs


def _weight(name: str, value: mx.array) -> mx.array:
    """Random where a fresh model is constant, or attention would be flat and every token equal."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    value = value.astype(mx.float32)
    if "embed" in name and value.ndim == 2:
        return mx.random.normal(value.shape)
    return value + 0.1 * mx.random.normal(value.shape)
