"""benchmarks/{demo,quality,cache_bytes}.py on a tiny model, so that they cannot rot; the real one
is marked `model`."""

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
from vqkv_ext.adapters.calibrate import PRESETS
from vqkv_ext.adapters.mlx_lm import model_shape
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs import Calibration, LayerCodecs
from vqkv_ext.codecs.calibration import ModelShape
from vqkv_ext.codecs.presets import codec
from vqkv_ext.evaluation import cache_bytes, stock_cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import cache_bytes as counting  # noqa: E402
import demo  # noqa: E402
import numpy_blas  # noqa: E402
import quality  # noqa: E402
import smollm2  # noqa: E402
from quality_targets import verdicts  # noqa: E402

SIZES = demo.Sizes(calibration=300, iterations=2, tokens=150, answer=5)


@pytest.fixture
def show() -> Console:
    return Console(record=True, width=140, file=open(os.devnull, "w"))


def arguments(tmp_path: Path, *more: str):
    args, _ = demo.parse(more)
    args.folder, args.output = tmp_path / "cache", tmp_path / "output"
    return args


def test_whole_demo(tmp_path, show, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "LENGTHS", (256, 512, 1024))
    model = save_model(tmp_path / "tiny")
    args = arguments(tmp_path, "--model", str(model))
    results = demo.run(args, SIZES, show)
    assert json.loads(json.dumps(results, allow_nan=False))["dtype"] == "float32"
    judged = {*quality.PRESETS, "mlx-lm kv_bits=8", "mlx-lm kv_bits=4"}
    assert set(results["quality"]) == judged
    assert set(results["bytes_per_further_token"]) == judged | {"float32 (mlx-lm)"}
    assert results["quality"]["mlx-lm kv_bits=4"]["multiple"] == 1
    writing = {"float32 (mlx-lm)", *demo.WRITING}
    assert set(results["answers"]) == set(results["continuations"]) == writing
    for generated in results["continuations"].values():
        # the last generated token may not be run
        assert generated["context"] in range(SIZES.tokens, SIZES.tokens + SIZES.answer + 1)
    assert results["continuations"]["vecinfer-2bit"]["coded_tokens"] == 64
    assert (tmp_path / "output" / "cache_bytes.png").read_bytes()[1:4] == b"PNG"
    text = show.export_text()
    assert "ΔPPL" in text and all(name in text for name in judged) and "earlier run" not in text

    files = {p.name: p.read_bytes() for p in args.folder.iterdir()}
    assert len(files) == len(PRESETS)
    again = demo.run(args, SIZES, show)
    assert "earlier run" in show.export_text()
    assert {p.name: p.read_bytes() for p in args.folder.iterdir()} == files
    assert again["quality"]["vecinfer-2bit"]["kl"] == results["quality"]["vecinfer-2bit"]["kl"]


def test_quality_script(tmp_path, show):
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night.\n" * 9, encoding="utf-8")
    args = quality.parse(
        ["--model", str(save_model(tmp_path / "tiny")), "--texts", str(text), "--tokens", "150"]
        + ["--presets", "none", "turboquant-1bit", "--json", str(tmp_path / "q.json")]
    )
    args.folder = tmp_path / "cache"
    results = quality.run(args, show)
    found = json.loads(json.dumps(results, allow_nan=False))["quality"]["text"]
    assert set(found) == {"none", "turboquant-1bit", "mlx-lm kv_bits=8", "mlx-lm kv_bits=4"}
    assert 10 * found["none"]["multiple"] < found["turboquant-1bit"]["multiple"]
    lines = [line.split() for line in show.export_text().splitlines()]
    order = ["float16", "none", "kv_bits=8", "kv_bits=4", "turboquant-1bit"]
    rows = [name for line in lines for name in order if name in line[:2] and len(line) > 5]
    assert rows == order  # by bytes


def test_quality_of_files(tmp_path, monkeypatch, capsys):
    """A calibration whose layers differ; then numbers of two runs in one picture."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(quality, "cache_dir", lambda: tmp_path)
    text, model = tmp_path / "persuasion.txt", tiny.llama()
    text.write_text("It was a dark and stormy night.\n" * 9, encoding="utf-8")
    pairs = [[codec(n, 64, s) for s in ("key", "value")] for n in ("trellis-1bit", "none")]
    layers = [LayerCodecs(*pair) for pair in pairs]
    Calibration("mixed-9bit", model_shape(model), layers, 300).save(
        tmp_path / "mixed-9.safetensors"
    )
    common = ["--model", str(save_model(tmp_path / "tiny")), "--texts", str(text), "--tokens"]
    common += ["150", "--presets", "trellis-1bit", "none", "--files"]
    numbers, picture = tmp_path / "q.json", tmp_path / "q.png"
    assert (
        quality.main([*common, str(tmp_path / "mixed-9.safetensors"), "--json", str(numbers)]) == 0
    )
    found = json.loads(numbers.read_text())
    slopes = found["bytes_per_further_token"]
    assert slopes["mixed-9"] == (slopes["trellis-1bit"] + slopes["none"]) / 2
    bits = 8 * slopes["none"] / found["numbers_per_token"]
    assert bits == 16 and slopes["trellis-1bit"] < slopes["none"] / 8
    found["tokens"] = 1024
    numbers.write_text(json.dumps(found))
    capsys.readouterr()
    monkeypatch.setattr(quality, "run", None)
    read = [
        "--from-json",
        str(numbers),
        str(numbers),
        "--plot",
        str(picture),
        "--targets",
        "--markdown",
    ]
    assert quality.main(read) == 0
    assert picture.read_bytes()[1:4] == b"PNG"
    shown = capsys.readouterr().out
    assert shown.count("trellis-1bit, persuasion, 1024 tokens: 0.0") == 2 and "met" in shown
    assert "| cache | bits | persuasion, 1024 | persuasion, 1024 |" in shown
    assert f"| `trellis-1bit` | {8 * slopes['trellis-1bit'] / 512:.2f} | 0.0" in shown


def test_targets_say_what_is_missed():
    found = {"trellis-2bit": {"kl": 0.0155, "multiple": 0.136}}
    assert list(verdicts("persuasion", 1024, found)) == [
        "trellis-2bit, persuasion, 1024 tokens: 0.01550 nats, at most 0.0155: met"
    ]
    (line,) = verdicts("electronic_texts", 1024, found)
    assert line.endswith("0.13600 of kv_bits=4, at most 0.135: MISSED")
    assert not list(verdicts("persuasion", 1025, found))


def test_families():
    names = ("turboquant-rvq-2bit", "turboquant-2bit", "mlx-lm kv_bits=4", "float16 (mlx-lm)",
             "mixed-2.44", "mixed-query-aware-2.44")  # fmt: skip
    want = ["turboquant-rvq", "turboquant", "mlx-lm", None, "mixed", "mixed-query-aware"]
    assert [quality.family(n) for n in names] == want


def test_presets_that_do_not_fit_are_left_out(show):
    model = tiny.llama()
    taken, refused = quality.suitable(quality.PRESETS, ModelShape("wide", 1, 1, 256, 256))
    assert list(refused) == ["qjl-4bit"] and "centred-4bit" in taken
    assert set(taken) | set(refused) == set(quality.PRESETS)
    _, narrow = quality.suitable(quality.PRESETS, ModelShape("odd", 1, 1, 72, 72))
    assert set(narrow) == set(PRESETS)  # 72 = 8 * 9 has no Hadamard matrix
    caches = {"float32": lambda: stock_cache(model), **quality.compressed(model, [], {})}
    ones = dict.fromkeys(caches, 1)
    quality.judge("text", model, tiny.ids(9), caches, ones, ones, refused, show)
    assert "qjl-4bit is left out: [qjl-4bit] head_dim" in show.export_text()


@pytest.mark.parametrize("preset", quality.PRESETS)
def test_coded_part_is_the_formula(preset):
    """The arrays of a cache beyond its windows, which alone do not grow with the text."""
    shape = ModelShape("one head", 1, 1, 128, 128)
    codecs = counting.any_codecs(preset, shape)
    each = sum(c.bytes_per_token for c in codecs)
    cache = CompressedKVCache(*codecs)
    windows = (4 + 64 + 2 * 64 + 8) * 512
    lengths = (1024, 4096, 32768)
    sizes = counting.fill([cache], shape, mx.float16, lengths)
    assert sizes[-1] == cache.nbytes
    for tokens, held in zip(lengths, sizes, strict=True):
        assert held - windows == pytest.approx(each * tokens, rel=0.01)


def test_table_of_bytes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cache_bytes.py", "--presets", "turboquant-2bit", "qjl-1bit"])
    counting.main()
    float16, _, _, two, one = capsys.readouterr().out.splitlines()[2:]
    assert float16.startswith("| float16 | 512 | 524,288 (1.0x) |")
    # 32 bytes of codes and a scale of 2, keys and values; 204 places in the windows
    assert two.startswith(f"| `turboquant-2bit` | 68 | {204 * 512 + 68 * 1024:,} (3.0x) |")
    assert one.startswith("| `qjl-1bit` | 36 |")
    for bad in ("1000", "2048 1024"):
        monkeypatch.setattr(sys, "argv", ["cache_bytes.py", "--lengths", *bad.split()])
        with pytest.raises(SystemExit):
            counting.main()


def test_bytes_per_further_token():
    """Against sizes by hand: 2 layers, 2 heads of 64, keys and values."""
    model = tiny.llama()
    shape, values = model_shape(model), 2 * 2 * 2 * 64
    fitted = {"vecinfer-1bit": tiny.calibration(preset="vecinfer-1bit")}
    names = ["vecinfer-1bit", "turboquant-2bit"]
    caches = {"float16": lambda: stock_cache(model), **quality.compressed(model, names, fitted)}
    lengths = (4096, 8192)
    sizes = quality.count_bytes(caches, shape, mx.float16, lengths, Console(quiet=True))
    assert {n: counting.per_token(lengths, s) for n, s in sizes.items()} == {
        "float16": 2 * values,
        "mlx-lm kv_bits=8": values * 8.5 / 8,
        "mlx-lm kv_bits=4": values * 4.5 / 8,
        "vecinfer-1bit": values / 8,
        "turboquant-2bit": values / 4 + 2 * 2 * 2 * 2,
    }
    whole = caches["turboquant-2bit"]()
    assert counting.fill(whole, shape, mx.float16, lengths) == sizes["turboquant-2bit"]
    assert cache_bytes(whole) == sizes["turboquant-2bit"][-1]  # caches report what they hold


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
    loaded, tokenizer, name = smollm2.load(str(model), show)
    made = (loaded, tokenizer, ["vecinfer-2bit"], 300, 2, name, tmp_path, show)
    first = smollm2.calibrations(*made)["vecinfer-2bit"]
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    second = smollm2.calibrations(*made)["vecinfer-2bit"]
    assert second.layers[0].key.fingerprint == first.layers[0].key.fingerprint


def test_options():
    _, sizes = demo.parse([])
    assert sizes == demo.Sizes()
    _, sizes = demo.parse(["--quick", "--tokens", "200"])
    assert sizes.tokens == 200 and sizes.calibration < demo.Sizes().calibration
    for bad in (["--tokens", "1"], ["--json", "no/such/folder.json"]):
        for script in (demo, quality):
            with pytest.raises(SystemExit):
                script.parse(bad)


@pytest.mark.model
@pytest.mark.skipif("VQKV_SMOLLM2" not in os.environ, reason="VQKV_SMOLLM2 names no model file")
def test_smollm2(tmp_path, show):
    args = arguments(tmp_path, "--quick", "--model", os.environ["VQKV_SMOLLM2"])
    results = demo.run(args, demo.QUICK, show)
    found = results["quality"]
    assert results["dtype"] == "float16"
    assert found["vecinfer-4bit"]["kl"] < 0.01 and found["centred-4bit"]["kl"] < 0.01
    assert found["vecinfer-4bit"]["kl"] < found["vecinfer-2bit"]["kl"] < 0.1
