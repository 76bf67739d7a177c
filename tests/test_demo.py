"""benchmarks/demo.py on a tiny model, so that it cannot rot; the real one is marked `model`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from rich.console import Console

import tiny
from test_cli import save_model
from vqkv_ext.adapters.mlx_lm import model_shape
from vqkv_ext.evaluation import cache_bytes, stock_cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import cache_bytes as counting  # noqa: E402
import demo  # noqa: E402
import numpy_blas  # noqa: E402

SIZES = demo.Sizes(calibration=300, iterations=2, tokens=150, answer=5)


@pytest.fixture
def show() -> Console:
    return Console(record=True, width=140, file=open(os.devnull, "w"))


def arguments(tmp_path: Path, *more: str):
    args, _ = demo.parse(more)
    args.folder, args.output = tmp_path / "cache", tmp_path / "output"
    return args


@pytest.mark.parametrize("everything", [False, True])
def test_whole_demo(tmp_path, show, monkeypatch, everything):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "LENGTHS", (256, 512, 1024))
    model = save_model(tmp_path / "tiny")
    args = arguments(tmp_path, "--model", str(model), *(["--all"] if everything else []))
    results = demo.run(args, SIZES, show)
    assert json.loads(json.dumps(results, allow_nan=False))["dtype"] == "float32"
    presets = {"vecinfer-4bit", "vecinfer-2bit"}
    presets |= {"vecinfer-1bit", "mlx-lm kv_bits=4"} if everything else set()
    assert set(results["quality"]) == presets
    assert (
        set(results["answers"]) == set(results["continuations"]) == presets | {"float32 (mlx-lm)"}
    )
    for generated in results["continuations"].values():
        # the last generated token is not run
        assert generated["context"] in range(SIZES.tokens, SIZES.tokens + SIZES.answer + 1)
    assert results["continuations"]["vecinfer-2bit"]["coded_tokens"] == 64
    assert (tmp_path / "output" / "cache_bytes.png").read_bytes()[1:4] == b"PNG"
    text = show.export_text()
    assert "ΔPPL" in text and "vecinfer-2bit" in text and "earlier run" not in text

    files = {p.name: p.read_bytes() for p in args.folder.iterdir()}
    assert len(files) == (3 if everything else 2)
    again = demo.run(args, SIZES, show)
    assert "earlier run" in show.export_text()
    assert {p.name: p.read_bytes() for p in args.folder.iterdir()} == files
    assert again["quality"]["vecinfer-2bit"]["kl"] == results["quality"]["vecinfer-2bit"]["kl"]


def test_bytes_per_further_token(monkeypatch):
    """Against sizes by hand: 2 layers, 2 heads of 64, keys and values."""
    shape = model_shape(tiny.llama())
    values = 2 * 2 * 2 * 64
    for make, each in (
        (lambda: stock_cache(tiny.llama()), 2 * values),
        (lambda: stock_cache(tiny.llama(), 8), values * 8.5 / 8),
        (lambda: stock_cache(tiny.llama(), 4), values * 4.5 / 8),
        (counting.random_codecs("vecinfer-4bit", shape), values / 2),
        (counting.random_codecs("vecinfer-1bit", shape), values / 8),
    ):
        cache = make()
        sizes = counting.fill(cache, shape, mx.float16, (4096, 8192))
        assert sizes[1] == cache_bytes(cache)  # what the caches report is what they hold
        assert (sizes[1] - sizes[0]) / 4096 == each


def test_held_bytes_counts_what_nbytes_hides():
    class Hiding:
        nbytes = 0

        def __init__(self):
            a = mx.zeros((5, 2), mx.float32)
            self.parts = [{"a": a}, (a, mx.zeros(3, mx.uint8))]

    assert counting.held_bytes([Hiding(), Hiding()]) == 2 * (40 + 3)


def test_numpy_products():
    model, ids = tiny.llama(), mx.array([tiny.ids(9)])
    want = model(ids)
    assert mx.abs(want).max() > 1  # and so the comparison sees something
    numpy_blas.use_numpy(model)
    assert type(model.model.layers[1].mlp.up_proj) is numpy_blas._Linear
    assert type(model.model.embed_tokens) is numpy_blas._Embedding
    assert mx.allclose(model(ids), want, atol=1e-4, rtol=1e-4)
    model.set_dtype(mx.float16)
    assert model(ids).dtype == mx.float16


def test_damaged_calibration_is_fitted_again(tmp_path, show):
    model = save_model(tmp_path / "tiny")
    loaded, tokenizer, name = demo.load(str(model), show)
    made = (loaded, tokenizer, ["vecinfer-2bit"], SIZES, name, tmp_path, show)
    first = demo.calibrations(*made)["vecinfer-2bit"]
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    second = demo.calibrations(*made)["vecinfer-2bit"]
    assert second.layers[0].key.fingerprint == first.layers[0].key.fingerprint


def test_options():
    _, sizes = demo.parse([])
    assert sizes == demo.Sizes()
    _, sizes = demo.parse(["--quick", "--tokens", "200"])
    assert sizes.tokens == 200 and sizes.calibration < demo.Sizes().calibration
    for bad in (["--tokens", "1"], ["--json", "no/such/folder.json"]):
        with pytest.raises(SystemExit):
            demo.parse(bad)


@pytest.mark.model
@pytest.mark.skipif("VQKV_SMOLLM2" not in os.environ, reason="VQKV_SMOLLM2 names no model file")
def test_smollm2(tmp_path, show):
    args = arguments(tmp_path, "--quick", "--model", os.environ["VQKV_SMOLLM2"])
    results = demo.run(args, demo.QUICK, show)
    quality = results["quality"]
    assert results["dtype"] == "float16"
    assert quality["vecinfer-4bit"]["kl"] < 0.01
    assert quality["vecinfer-4bit"]["kl"] < quality["vecinfer-2bit"]["kl"] < 0.1
