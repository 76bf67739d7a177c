"""GGUF files written here, and the real SmolLM2 when VQKV_SMOLLM2 names it."""

import os
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from vqkv_ext.adapters.gguf import chat_prompt, load_gguf

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 64, 32, 2

# GGUF name of each mlx_lm parameter, spelt out apart from the loader's own table.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def byte_alphabet():
    """The 256 printable characters by which byte-level BPE spells bytes, in byte order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "th", "the"]


def tiny(tie):
    mx.random.seed(11)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=48,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=len(TOKENS),
            rms_norm_eps=1e-5,
            rope_theta=5000.0,
            tie_word_embeddings=tie,
        )
    )
    mx.eval(model.parameters())
    return model


def interleave(rows, heads):
    """Halves of each head to alternating rows, as a GGUF converter does."""
    return rows.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(model):
    tensors = {}
    for key, value in tree_flatten(model.parameters()):
        name, kind = key.rsplit(".", 1)
        if name in TOP:
            tensors[f"{TOP[name]}.{kind}"] = value
            continue
        _, _, layer, name = name.split(".", 3)
        if LAYER[name] in ("attn_q", "attn_k"):
            value = interleave(value, HEADS if LAYER[name] == "attn_q" else KV_HEADS)
        tensors[f"blk.{layer}.{LAYER[name]}.{kind}"] = value
    return tensors


def metadata(**changes):
    def integer(value):
        return mx.array(value, dtype=mx.uint32)

    types = [3] * 3 + [1] * (len(TOKENS) - 3)
    meta = {
        "general.architecture": "llama",
        "llama.embedding_length": integer(HIDDEN),
        "llama.block_count": integer(LAYERS),
        "llama.feed_forward_length": integer(48),
        "llama.attention.head_count": integer(HEADS),
        "llama.attention.head_count_kv": integer(KV_HEADS),
        "llama.attention.key_length": integer(HEAD_DIM),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(5000.0),
        "llama.context_length": integer(512),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": mx.array(types, dtype=mx.int32),
        "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": integer(1),
        "tokenizer.ggml.eos_token_id": integer(2),
    }
    meta.update({key.replace("__", "."): value for key, value in changes.items()})
    return {key: value for key, value in meta.items() if value is not None}


def write(path, model=None, extra=None, **changes):
    tensors = gguf_tensors(model if model is not None else tiny(True)) | (extra or {})
    mx.save_gguf(str(path), tensors, metadata(**changes))
    return path


@pytest.mark.parametrize("tie", [True, False])
def test_same_logits_as_the_model_written(tmp_path, tie):
    model = tiny(tie)
    loaded, _ = load_gguf(write(tmp_path / "m.gguf", model))
    ids = mx.array([[5, 90, 17, 200, 3, 44]])
    assert mx.array_equal(loaded(ids), model(ids))
    assert loaded.args.head_dim == HEAD_DIM
    assert ("lm_head" in loaded) is not tie


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_dtype_reaches_the_cache(tmp_path, dtype):
    model, _ = load_gguf(write(tmp_path / "m.gguf"), dtype=dtype)
    cache = make_prompt_cache(model)
    logits = model(mx.array([[1, 2, 3]]), cache=cache)
    assert logits.dtype == cache[0].keys.dtype == dtype


def test_tokenizer(tmp_path):
    _, tokenizer = load_gguf(write(tmp_path / "m.gguf"))
    ids = tokenizer.encode("the 12 thé\n")
    assert ids[0] == TOKENS.index("the")
    assert all(isinstance(i, int) for i in ids)
    assert tokenizer.decode(ids) == "the 12 thé\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.encode("<|im_end|>") == [2]


def test_bos_is_added_when_the_file_says_so(tmp_path):
    changes = {"tokenizer__ggml__add_bos_token": mx.array(True)}
    _, tokenizer = load_gguf(write(tmp_path / "m.gguf", **changes))
    assert tokenizer.encode("the") == [1, TOKENS.index("the")]
    assert tokenizer.encode("the", add_special_tokens=False) == [TOKENS.index("the")]


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "gpt-2", None])
def test_pre_tokenizers_round_trip(tmp_path, pre):
    _, tokenizer = load_gguf(write(tmp_path / "m.gguf", tokenizer__ggml__pre=pre))
    text = "It's 1234  the\n\nthird—line "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_prompt_without_template(tmp_path):
    _, tokenizer = load_gguf(write(tmp_path / "m.gguf"))
    ids = chat_prompt(tokenizer, "hi", system="be")
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1 and ids.count(2) == 2


def test_chat_prompt_uses_the_template(tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    changes = {"tokenizer__chat_template": template}
    _, tokenizer = load_gguf(write(tmp_path / "m.gguf", **changes))
    assert tokenizer.decode(chat_prompt(tokenizer, "hi")) == "[user]hi"


def test_chat_prompt_needs_something_to_go_by(tmp_path):
    tokens = ["<a>", "<b>", "<c>", *TOKENS[3:]]
    _, tokenizer = load_gguf(write(tmp_path / "m.gguf", tokenizer__ggml__tokens=tokens))
    with pytest.raises(ValueError, match=r"\[chat_prompt\] the tokenizer must have"):
        chat_prompt(tokenizer, "hi")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "qwen2"}, "must be 'llama', but got 'qwen2'"),
        ({"general__architecture": None}, "must be 'llama', but got None"),
        ({"llama__block_count": None}, "must contain llama.block_count"),
        ({"llama__rope__dimension_count": mx.array(32)}, "must equal the head size 64"),
        ({"llama__rope__scaling__type": "yarn"}, "must be unscaled, but got .*yarn"),
        ({"llama__feed_forward_length": mx.array(64)}, "must match the file's metadata"),
        ({"tokenizer__ggml__model": "llama"}, "must be 'gpt2' .*, but got 'llama'"),
        ({"tokenizer__ggml__pre": "qwen2"}, "tokenizer.ggml.pre must be .*, but got 'qwen2'"),
    ],
)
def test_refusals(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"\[load_gguf\] .*{message}"):
        load_gguf(write(tmp_path / "m.gguf", **changes))


@pytest.mark.parametrize(
    ("name", "message"),
    [("rope_freqs.weight", "unscaled"), ("blk.0.ffn_gate_inp.weight", "those of a plain llama")],
)
def test_refuses_tensors_it_does_not_know(tmp_path, name, message):
    path = write(tmp_path / "m.gguf", extra={name: mx.ones((32,))})
    with pytest.raises(ValueError, match=message):
        load_gguf(path)


def test_refuses_other_files_and_dtypes(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"\[load_gguf\] path must .*nothing.gguf"):
        load_gguf(tmp_path / "nothing.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ValueError, match=r"\[load_gguf\] the file must begin with GGUF"):
        load_gguf(other)
    with pytest.raises(ValueError, match=r"\[load_gguf\] dtype must be"):
        load_gguf(write(tmp_path / "m.gguf"), dtype=mx.int32)


@pytest.fixture(scope="module")
def smollm2():
    path = os.environ.get("VQKV_SMOLLM2", "")
    if not Path(path).is_file():
        pytest.skip("VQKV_SMOLLM2 names no file")
    return path


@pytest.mark.model
def test_smollm2_answers(smollm2):
    from mlx_lm import generate

    model, tokenizer = load_gguf(smollm2)
    prompt = chat_prompt(tokenizer, "What is the capital of France?")
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=12)


@pytest.mark.model
def test_smollm2_dequantised_is_the_same_model(smollm2):
    quantised, tokenizer = load_gguf(smollm2, dtype=mx.float32)
    dense, _ = load_gguf(smollm2, dtype=mx.float32, dequantize=True)
    ids = mx.array([tokenizer.encode("The harbour was quiet that morning.")])
    difference = mx.abs(quantised(ids) - dense(ids)).max().item()
    assert difference < 1e-2
