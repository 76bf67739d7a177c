"""What each process of test_distributed.py runs; rank 0 prints what it found as one JSON object."""

from __future__ import annotations

import json
import sys

import mlx.core as mx

import writing
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.adapters.programs import MakePromptCache
from vqkv_ext.codecs import Calibration

TOKENS = 8
SIZES = {"num_key_value_heads": 4, "num_attention_heads": 8, "num_hidden_layers": 3}
MODELS = {"tensor": writing.llama, "pipeline": writing.qwen2}


def write(model, codec, prompt):
    """(tokens, bytes of the caches, least margin)"""
    cache = MakePromptCache(codec)(model)
    tokens, margin = writing.greedy(model, prompt, cache, TOKENS)
    return tokens, sum(c.nbytes for c in cache), margin


def main(prompts: dict[str, list[int]], codecs: dict[str, list[str]]) -> None:
    group = mx.distributed.init(strict=True)
    found = {"size": group.size()}
    for kind, make in MODELS.items():
        model = make(**SIZES)
        if kind == "tensor":
            model.shard(group)
        else:
            model.model.pipeline(group)
        for codec in codecs[kind]:
            tokens, nbytes, _ = write(model, codec, prompts[kind])
            total = mx.distributed.all_sum(mx.array(nbytes)).item()
            same = mx.distributed.all_sum(mx.array(tokens))  # all ranks must agree
            assert same.tolist() == [group.size() * t for t in tokens]
            found[f"{kind} {codec}"] = tokens, total, nbytes
        whole = next(c for c in codecs[kind] if c.endswith(".safetensors"))
        try:
            make_prompt_cache(model, Calibration.load(whole))
        except ValueError as e:
            found[f"{kind} refusal"] = str(e)
    if group.rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
