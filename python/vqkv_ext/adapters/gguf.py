"""Load llama-architecture GGUF files into mlx_lm.

mlx_lm reads Hugging Face folders; MLX reads the tensors of a GGUF file. This module joins the two:
it renames the tensors, undoes the row order that GGUF uses for rotary embeddings, and rebuilds the
byte-level BPE tokenizer from the file's metadata. Nothing else than the file is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_GROUP = 32  # weights per scale, of all GGUF types that MLX keeps quantised

# Names under which chat models end a turn; GGUF metadata names only one of them.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def best_expanded() -> bool:
    """Whether quantised weights are better expanded on the default device: a CPU multiplies dense
    ones through BLAS, and on CUDA MLX 0.32.4's quantised products hang at times."""
    return mx.default_device().type == mx.DeviceType.cpu or not mx.metal.is_available()


def load_gguf(
    path: str | Path, *, dtype: mx.Dtype | None = None, dequantize: bool = False
) -> tuple[llama.Model, TokenizerWrapper]:
    """Load a llama-architecture GGUF file.

    Q4_0, Q4_1 and Q8_0 tensors stay quantised (MLX affine, groups of 32); MLX expands every other
    quantised type to float16.

    Args:
        path: the ``.gguf`` file.
        dtype: floating-point type for all unquantised parameters and scales, which decides the
            type of activations and of the KV cache. ``None`` keeps the file's own types: with the
            usual float32 norms, keys and values come out as float32.
        dequantize: expand quantised tensors. Costs memory, but on the CPU a chunk of prefill then
            runs through BLAS, an order of magnitude faster than MLX's quantised product.

    Returns:
        The model in evaluation mode and a tokenizer that every mlx_lm entry point accepts
        (``encode``, ``decode``, ``eos_token_ids``, ``bos_token_id``, ``apply_chat_template``).

    Raises:
        FileNotFoundError: no file at ``path``.
        ValueError: not a GGUF file, another architecture, or a feature that this loader would
            otherwise get wrong (scaled rotary embeddings, an unknown tokenizer).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"[load_gguf] path must name an existing file, but got {path}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"[load_gguf] the file must begin with GGUF, but {path} has {magic!r}")
    weights, meta = mx.load(str(path), format="gguf", return_metadata=True)
    architecture = meta.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"[load_gguf] general.architecture must be 'llama', but got {architecture!r}"
        )
    args = _model_args(weights, meta)
    params = _rename(weights, args)
    if dtype is not None:
        floats = (mx.float16, mx.bfloat16, mx.float32)
        if dtype not in floats:
            raise ValueError(
                f"[load_gguf] dtype must be float16, bfloat16 or float32, but got {dtype}"
            )
        params = {k: v.astype(dtype) if v.dtype in floats else v for k, v in params.items()}
    # After the cast: scales of 16 bits would round every weight a second time.
    if dequantize:
        params = _dequantize(params)

    def quantization(name: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized") or f"{name}.scales" not in params:
            return False
        return {"group_size": _GROUP, "bits": _bits(params, name)}

    model = llama.Model(args)
    nn.quantize(model, class_predicate=quantization)
    try:
        model.load_weights(list(params.items()))
    except ValueError as error:
        raise ValueError(
            f"[load_gguf] tensors must match the file's metadata, but got: {error}"
        ) from error
    model.eval()
    return model, _tokenizer(meta)


def chat_prompt(tokenizer: TokenizerWrapper, user: str, *, system: str | None = None) -> list[int]:
    """Token ids of one user turn, ready for the model to answer.

    Uses the file's chat template; a file without one gets SmolLM2's (ChatML) layout.

    Raises:
        ValueError: no template, and no ``<|im_start|>`` token to fall back to.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    if tokenizer.has_chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    elif "<|im_start|>" in tokenizer.get_vocab():
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
        text = "".join(turns) + "<|im_start|>assistant\n"
    else:
        raise ValueError(
            "[chat_prompt] the tokenizer must have a chat template or the token <|im_start|>, "
            "but got neither"
        )
    return list(tokenizer.encode(text, add_special_tokens=False))


def _model_args(weights: Mapping[str, mx.array], meta: Mapping[str, Any]) -> llama.ModelArgs:
    def arg(key: str, default: Any = None) -> Any:
        value = meta.get(f"llama.{key}", default)
        if value is None:
            raise ValueError(f"[load_gguf] metadata must contain llama.{key}, but got none")
        return value.item() if isinstance(value, mx.array) else value

    if "token_embd.weight" not in weights:
        raise ValueError("[load_gguf] tensors must include token_embd.weight, but got none")
    heads, hidden = arg("attention.head_count"), arg("embedding_length")
    head_dim = arg("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if arg(key, head_dim) != head_dim:
            raise ValueError(
                f"[load_gguf] llama.{key} must equal the head size {head_dim}, but got {arg(key)}"
            )
    # Llama 3.1+ puts its frequency factors into a tensor, long-context tunes into metadata.
    scaling = meta.get("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in weights or scaling != "none":
        raise ValueError(
            "[load_gguf] rotary embeddings must be unscaled, but got "
            + (f"rope.scaling.type {scaling!r}" if scaling != "none" else "rope_freqs.weight")
        )
    return llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=arg("block_count"),
        intermediate_size=arg("feed_forward_length"),
        num_attention_heads=heads,
        num_key_value_heads=arg("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=weights["token_embd.weight"].shape[0],
        rms_norm_eps=arg("attention.layer_norm_rms_epsilon"),
        rope_theta=arg("rope.freq_base", 10000.0),
        tie_word_embeddings="output.weight" not in weights,
        max_position_embeddings=arg("context_length"),
    )


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """GGUF interleaves the rows of q and k for its rotation; mlx_lm rotates halves."""
    shape = rows.shape
    return rows.reshape(heads, shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(shape)


def _rename(weights: Mapping[str, mx.array], args: llama.ModelArgs) -> dict[str, mx.array]:
    heads = {"attn_q": args.num_attention_heads, "attn_k": args.num_key_value_heads}
    params: dict[str, mx.array] = {}
    unknown = []
    for key, value in weights.items():
        part = key.split(".")
        if part[0] == "blk" and len(part) == 4 and part[2] in _LAYER_NAMES:
            if part[2] in heads:
                value = _unpermute(value, heads[part[2]])
            params[f"model.layers.{part[1]}.{_LAYER_NAMES[part[2]]}.{part[3]}"] = value
        elif len(part) == 2 and part[0] in _TOP_NAMES:
            params[f"{_TOP_NAMES[part[0]]}.{part[1]}"] = value
        else:
            unknown.append(key)
    if unknown:
        raise ValueError(
            f"[load_gguf] tensors must be those of a plain llama, but got {sorted(unknown)[:4]}"
        )
    return params


def _bits(params: Mapping[str, mx.array], name: str) -> int:
    # One scale per 32 weights, so uint32 words per scale are the bits per weight.
    return params[f"{name}.weight"].shape[-1] // params[f"{name}.scales"].shape[-1]


def _dequantize(params: Mapping[str, mx.array]) -> dict[str, mx.array]:
    dense = {k: v for k, v in params.items() if not k.endswith((".scales", ".biases"))}
    for name in [k.removesuffix(".scales") for k in params if k.endswith(".scales")]:
        dense[f"{name}.weight"] = mx.dequantize(
            params[f"{name}.weight"],
            params[f"{name}.scales"],
            params[f"{name}.biases"],
            group_size=_GROUP,
            bits=_bits(params, name),
        )
    return dense


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    match name:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
        case "llama-bpe":
            split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, False)])
        case "default" | "gpt-2":
            return pre_tokenizers.ByteLevel(False)
    raise ValueError(
        f"[load_gguf] tokenizer.ggml.pre must be smollm, llama-bpe, gpt-2 or default, but got "
        f"{name!r}"
    )


def _tokenizer(meta: Mapping[str, Any]) -> TokenizerWrapper:
    kind = meta.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"[load_gguf] tokenizer.ggml.model must be 'gpt2' (byte-level BPE), but got {kind!r}"
        )
    tokens: Sequence[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta.get("tokenizer.ggml.merges", [])]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = _pre_tokenizer(meta.get("tokenizer.ggml.pre", "default"))
    core.decoder = decoders.ByteLevel()

    types = meta.get("tokenizer.ggml.token_type")
    types = [] if types is None else types.tolist()
    core.add_special_tokens(
        [AddedToken(tokens[i], special=True) for i, t in enumerate(types) if t == _CONTROL]
    )
    core.add_tokens([AddedToken(tokens[i]) for i, t in enumerate(types) if t == _USER_DEFINED])

    def named(role: str) -> str | None:
        index = meta.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index.item()]

    bos, eos = named("bos"), named("eos")
    add_bos = meta.get("tokenizer.ggml.add_bos_token")
    if add_bos is not None and add_bos.item() and bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=bos,
        eos_token=eos,
        unk_token=named("unknown"),
        pad_token=named("padding"),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = meta.get("tokenizer.chat_template")
    ends = [i for i, t in enumerate(types) if t == _CONTROL and tokens[i] in _END_TOKENS]
    return TokenizerWrapper(fast, eos_token_ids=ends)
