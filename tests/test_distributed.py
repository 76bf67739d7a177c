"""A model split over two processes of one machine: each compresses its own heads or layers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import distributed_ranks as ranks
import tiny
from vqkv_ext.adapters import sharding
from vqkv_ext.adapters.calibrate import calibrate
from vqkv_ext.adapters.mlx_lm import model_shape
from vqkv_ext.adapters.query_statistics import key_factors
from vqkv_ext.codecs import Calibration, LayerCodecs, presets, query_aware

SCRIPT = Path(ranks.__file__)
LAUNCH = Path(sys.executable).with_name("mlx.launch")


@pytest.fixture(scope="module")
def models():
    return {kind: make(**ranks.SIZES) for kind, make in ranks.MODELS.items()}


@pytest.fixture(scope="module")
def codecs(models, tmp_path_factory) -> dict[str, list[str]]:
    """Presets and files for each model, codebooks per head and per layer."""
    folder, found = tmp_path_factory.mktemp("calibrations"), {}
    for kind, model in models.items():
        found[kind] = ["centred-2bit"]
        for preset in ("vecinfer-2bit", "vecinfer-1.5bit")[: 2 if kind == "tensor" else 1]:
            path = folder / f"{kind}-{preset}.safetensors"
            calibrate(model, tiny.ids(256 if preset == "vecinfer-2bit" else 600), preset,
                      iterations=1).save(path)  # fmt: skip
            found[kind].append(str(path))
    path = folder / "mixture.safetensors"
    mixture(models["tensor"]).save(path)
    found["tensor"].append(str(path))
    return found


def mixture(model) -> Calibration:
    """Layers of keys and values that differ in kind and size."""
    shape, factors = model_shape(model), key_factors(model, tiny.ids(256))
    width = shape.key_dim
    layers = [
        LayerCodecs(
            query_aware.key_codec(f"query-aware-{bits}bit", smooth),
            presets.codec(f"trellis-{4 - bits}bit", width, "value"),
        )
        for bits, smooth in zip((3, 1, 2), factors, strict=True)
    ]
    layers[2] = LayerCodecs(presets.codec("centred-2bit", width, "key"), layers[2].value)
    return Calibration("mixed-2.4bit", shape, layers, 256)


@pytest.fixture(scope="module")
def alone(models, codecs):
    """The prompts, and what one process writes: {name: (tokens, bytes)}. The prompts are such that
    the order of sums, which differs between one process and two, decides no token."""
    prompts, found = {}, {}
    for kind, model in models.items():
        for seed in range(100):
            prompt = tiny.ids(220, seed=seed)
            each = {c: ranks.write(model, c, prompt) for c in codecs[kind]}
            if min(margin for *_, margin in each.values()) > 0.01:
                break
        else:
            pytest.fail("no prompt without a close call")
        prompts[kind] = prompt
        found |= {f"{kind} {c}": (tokens, nbytes) for c, (tokens, nbytes, _) in each.items()}
    return prompts, found


@pytest.fixture(scope="module")
def split(codecs, alone):
    """What two processes found."""
    if not LAUNCH.exists() and shutil.which("mlx.launch") is None:
        pytest.skip("mlx.launch is not installed")
    job = json.dumps([alone[0], codecs])
    launcher = str(LAUNCH) if LAUNCH.exists() else "mlx.launch"
    done = subprocess.run(
        [launcher, "-n", "2", "--backend", "ring", "--", sys.executable, str(SCRIPT), job],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout + done.stderr
    return json.loads(lines[0])


def test_tokens_are_those_of_one_process(alone, split):
    assert split["size"] == 2
    for name, (tokens, _) in alone[1].items():
        assert split[name][0] == tokens, name
    # the codecs matter to what is written
    assert len({str(t) for n, (t, _) in alone[1].items() if n.startswith("tensor")}) > 1


def test_ranks_share_the_bytes(alone, split):
    for name, (_, whole) in alone[1].items():
        _, total, first = split[name]
        assert total == whole, name
        # half of the heads; of three layers, rank 0 has the two last ones
        assert first == (whole // 2 if name.startswith("tensor") else whole * 2 // 3), name


def test_a_whole_calibration_is_refused_by_name(split):
    assert "vecinfer-2bit must be used with the model" in split["tensor refusal"]
    assert "kv_heads 4 but the model has 2" in split["tensor refusal"]
    assert "layers 3 but the model has 2" in split["pipeline refusal"]


def test_heads_of_a_rank(codecs):
    """Each rank's part decodes as these heads of the whole do."""
    whole = Calibration.load(codecs["tensor"][1])
    assert "vecinfer-2bit" == whole.preset
    x = mx.random.normal((1, 4, 5, 64))
    for rank in range(2):
        part = sharding._heads(whole, rank, 2)
        assert part.shape.kv_heads == 2 and len(part.layers) == 3
        for mine, theirs in zip(part.layers, whole.layers, strict=True):
            for a, b in ((mine.key, theirs.key), (mine.value, theirs.value)):
                heads = slice(2 * rank, 2 * rank + 2)
                codes = b.encode(x)["codes"][:, heads]
                assert mx.array_equal(a.encode(x[:, heads])["codes"], codes)
    with pytest.raises(
        ValueError, match=r"\[for_rank\] vecinfer-2bit must .* 3 ranks, but is for 4"
    ):
        sharding._heads(whole, 0, 3)
    with pytest.raises(ValueError, match=r"\[for_rank\] vecinfer-2bit must have codecs for layers"):
        sharding._layers(whole, 2, 4)


def test_a_whole_model_takes_the_whole_calibration(models, codecs):
    whole = Calibration.load(codecs["tensor"][1])
    assert sharding.for_rank(whole, models["tensor"]) is whole
