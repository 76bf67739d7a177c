"""benchmarks/{attention,encode,generate,host_cost}.py at tiny sizes: that they run, that what they
compare does the same, and what they write."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import tiny
from vqkv_ext import ops
from vqkv_ext.evaluation import stock_cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import attention  # noqa: E402
import attention_alone  # noqa: E402
import attention_case  # noqa: E402
import attention_targets  # noqa: E402
import encode  # noqa: E402
import generate  # noqa: E402
import generate_models  # noqa: E402
import host_cost  # noqa: E402
import kernels  # noqa: E402
import report  # noqa: E402
import token_stages  # noqa: E402

gpu = mx.default_device().type == mx.DeviceType.gpu
SHAPES = ("4/2x64:256", "4/2x64:512", "2x4/2x64:256", "4/2x64:8x256")


def run(script, tmp_path: Path, *argv: str) -> dict:
    """Runs a benchmark and reads the numbers it wrote."""
    file = tmp_path / "numbers.json"
    script.main([*argv, "--json", str(file)])
    return json.loads(file.read_text())


def redraw(script, tmp_path: Path, monkeypatch) -> None:
    """Draws what :func:`run` wrote, and measures nothing."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(script, "measure", None)
    picture = tmp_path / "picture.png"
    numbers = str(tmp_path / "numbers.json")
    script.main(["--from-json", numbers, "--plot", str(picture), "--targets"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_shapes():
    parse = attention_case.Shape.parse
    assert parse("8x32/8x128:2048x32768") == attention_case.Shape(32, 8, 128, 32768, 8, 2048)
    for text in (*attention.GPU_SHAPES, *attention.CPU_SHAPES, *SHAPES):
        assert str(parse(text)) == text
    for bad in ("32x128:4", "32/5x128:4", "32/8x128:9x4", "0x32/8x128:4", "32/8x128:0"):
        with pytest.raises(ValueError, match="a shape must"):
            parse(bad)
    assert parse("2x4/2x64:3x10").operations == 4 * 2 * 4 * 64 * (8 + 9 + 10)


def test_attention_targets_are_measured_by_default():
    named = {*attention_targets.OVER_MLX, *attention_targets.OVER_MLX_LM}
    assert named <= set(attention.GPU_SHAPES)
    presets = {p for bounds in attention_targets.OVER_MLX.values() for p in bounds}
    assert presets <= set(attention.CHOSEN)
    row = {"case": "32/8x128:131072", "preset": "centred-4bit", "ours_us": 10.0,
           "mlx_us": 15.0, "mlx_lm_4bit_us": None}  # fmt: skip
    found = attention_targets.targets([row])
    assert {t.found: t.met for t in found} == {None: None, 1.5: False}


def test_attention(tmp_path, monkeypatch, capsys):
    presets = ("centred-4bit", "vecinfer-2bit")
    results = run(attention, tmp_path, "--shapes", *SHAPES, "--presets", *presets, "--rounds", "1")
    assert [(r["case"], r["preset"]) for r in results["rows"]] == [
        (shape, preset) for shape in SHAPES for preset in presets
    ]
    for row in results["rows"]:
        assert row["ours_us"] > 0 and row["mlx_us"] > 0 and 0 < row["floor_us"] < 1e6
        assert row["share"] == pytest.approx(row["floor_us"] / row["ours_us"])
        assert (row["decoded_us"] is None) == (row["queries"] == 1)
        assert gpu or row["not_there"] == {}
    redraw(attention, tmp_path, monkeypatch)
    assert "wrote" in capsys.readouterr().out


def test_attention_says_what_is_not_there(tmp_path, monkeypatch, capsys):
    def refuse(case):
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(attention_case.Case, "mlx_lm_4bit", refuse)
    results = run(attention, tmp_path, "--shapes", SHAPES[0], "--presets", "none", "--rounds", "1")
    (row,) = results["rows"]
    assert row["mlx_lm_4bit_us"] is None and row["not_there"] == {"mlx-lm 4 bit": "no kernel"}
    assert "not there: no kernel" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["4/2x64:512", "2x4/2x64:64x512"])
def test_attention_ways_agree(shape):
    case = attention_case.Case(attention_case.Shape.parse(shape), mx.float32)
    cache, handles = case.cache("turboquant-4bit")
    ours, decoded = case.ours(handles)(), case.decoded(cache, handles)()
    dense = case.dense()
    # 64 queries: early ones read more tokens uncompressed than the last, which `decoded` follows
    rows = slice(-1, None)
    assert mx.abs(ours - decoded)[:, :, rows].max() < 1e-3
    assert 1e-3 < mx.abs(ours - dense).max() < 0.1
    calls, alone, missing = attention.others(case, attention.parse(["--rounds", "1"]), 1)
    assert gpu or not missing and not alone
    for _ in range(3 if "mlx_lm_4bit" in calls else 0):
        assert mx.abs(calls["mlx_lm_4bit"]() - dense).max() < 0.2
    assert mx.array_equal(case.dense(), dense)
    coded, held = 384, 512 - 384  # blocks of 64 in 512 - 4 - 64
    side = case.shape.batch * 2 * (coded * (32 + 2) + held * 64 * 4)
    assert attention_case.least_bytes(case, cache, handles) == 2 * side + 2 * case.q.nbytes


def test_mlx_lm_alone():
    assert attention_alone.measured("4/2x64:64", "float32", 1, 1) > 0
    with pytest.raises(RuntimeError, match="a shape must read like"):
        attention_alone.measured("4", "float32", 1, 1)


@pytest.mark.parametrize("op", encode.OPS, ids=lambda op: op.name)
def test_encode_ways_agree(op):
    calls = op.make(5000)
    kernels.check(op.name, calls)
    for way in op.others.values():
        assert (way(*calls.reads) == calls.ours()).mean() > 0.999
    assert calls.reads


def test_encode(tmp_path, monkeypatch, capsys):
    results = run(encode, tmp_path, "--values", "4096", "--vectors", "1024", "--rounds", "1")
    assert [row["case"] for row in results["rows"]] == [op.name for op in encode.OPS]
    for row in results["rows"]:
        assert row["ours_ms"] > 0 and row["mlx_ms"] > 0 and row["share"] > 0
        assert row["equal"] > 0.98 and row["extra_bytes"] >= 0
    names = [op.name for op in encode.OPS]
    first, pack = results["rows"][0], results["rows"][names.index("pack_bits, 1 bit")]
    assert first["values"] == 4096 and set(first["others"]) == set(encode.OPS[0].others)
    assert all(way["ms"] > 0 and way["extra_bytes"] > 0 for way in first["others"].values())
    assert pack["case"] == "pack_bits, 1 bit" and pack["bytes"] == 4096 + 512
    redraw(encode, tmp_path, monkeypatch)
    assert "pack_bits, 4 bits, of the copy bandwidth" in capsys.readouterr().out


def test_generate(tmp_path, monkeypatch, capsys):
    caches = ("kv_bits=4", "kv_bits=9", "centred-4bit")
    results = run(
        generate, tmp_path, "--models", "tiny", "no/such.gguf", "--contexts", "256", "2x256",
        "--caches", *caches, "--tokens", "8", "--rounds", "1",
    )  # fmt: skip
    *rows, absent = results["rows"]
    kinds = (generate.PLAIN, *caches)
    assert [(r["batch"], r["cache"]) for r in rows] == [(b, kind) for b in (1, 2) for kind in kinds]
    for row in rows:
        if row["cache"] == "kv_bits=9":
            assert "kv_bits must be" in row["not_there"]["kv_bits=9"]
            continue
        if gpu and row["not_there"]:  # MLX's CUDA backend lacks some quantised products
            assert row["cache"] == "kv_bits=4"
            continue
        assert row["tokens_per_second"] > 0 and row["ratio"] > 0
        assert row["peak_bytes"] > row["cache_bytes"] > 0
    assert rows[0]["cache_bytes"] > rows[3]["cache_bytes"]
    assert "model" in absent["not_there"]
    redraw(generate, tmp_path, monkeypatch)
    assert "speed over uncompressed" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [generate.PLAIN, "kv_bits=8", "centred-2bit"])
def test_generate_leaves_caches_as_they_were(kind):
    model = generate_models.random_model("tiny", mx.float32)
    cache = generate.make_cache(model, kind)
    generate.fill(cache, generate.model_shape(model), mx.float32, 2, 256)
    ids = mx.array([[5], [6]])
    before = model(ids, cache=copy.deepcopy(cache))
    for _ in range(2):  # the first makes room; each codes a block and trims it off
        assert generate.tokens_per_second(model, cache, 2, 64) > 0
    assert cache[0].offset == 256
    if kind == "centred-2bit":
        assert [c.coded_tokens for c in cache] == [128, 128]
    assert mx.allclose(model(ids, cache=cache), before, atol=1e-6, rtol=1e-5)


def test_batches_run_what_generate_step_runs():
    model = generate_models.random_model("tiny", mx.float32)
    one, other = stock_cache(model), stock_cache(model)
    list(generate.generate_step(mx.array([1]), model, max_tokens=6, prompt_cache=one))
    list(generate.batch_steps(model, other, 1, 6))
    assert one[0].offset == other[0].offset == 7
    for a, b in zip(one, other, strict=True):
        assert mx.allclose(a.state[0], b.state[0], atol=1e-5)


def test_models_with_random_weights():
    model = generate_models.random_model("tiny", mx.float16, bits=4, layers=1)
    assert len(model.layers) == 1
    projection = model.layers[0].mlp.up_proj
    assert projection.bits == 4 and projection.scales.dtype == mx.float16
    assert mx.isfinite(model(mx.array([tiny.ids(3)]))).all()


@pytest.mark.skipif(gpu, reason="a GPU compiles kernels from strings")
def test_host_cost_needs_a_gpu(tmp_path, capsys):
    results = run(host_cost, tmp_path, "--targets", "--calls", "2", "--rounds", "1")
    assert results["backend"] is None and results["rows"] == []
    assert "not there: MLX compiles them on GPUs only" in capsys.readouterr().out


@pytest.mark.skipif(not gpu, reason="MLX compiles kernels from strings on GPUs only")
def test_host_cost(tmp_path):
    results = run(host_cost, tmp_path, "--calls", "5", "--rounds", "1")
    assert len(results["rows"]) == len(host_cost.OPS)
    assert all(row["equal"] and not row["not_there"] for row in results["rows"])


def test_host_cost_numbers(tmp_path, monkeypatch, capsys):
    a = mx.zeros((8, 64), mx.uint8)
    ways = {"primitive": lambda: ops.pack_bits(a, 4), "string": lambda: mx.sort(a) + 1}
    found = host_cost.compare(ways, 3, 2)
    assert all(t > 0 for times in found.values() for t in times.values())
    assert [tuple(times) for times in found.values()] == [host_cost.PHASES] * 2
    cost = {"primitive": {"build_us": 1.0, "queue_us": 2.0, "wait_us": 9.0},
            "string": {"build_us": 3.0, "queue_us": 4.5, "wait_us": 9.0}}  # fmt: skip
    row = {"case": "op", "not_there": {}, "equal": True, "ways": cost}
    (target,) = host_cost.targets([row])
    assert target.found == 2.5 and target.met
    results = {"info": {}, "backend": "cuda", "calls": 3, "rounds": 2, "rows": [row]}
    (tmp_path / "numbers.json").write_text(json.dumps(results))
    redraw(host_cost, tmp_path, monkeypatch)
    assert "2.50x, target 2.00x: met" in capsys.readouterr().out


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "picture.png"
    argv = ("--ops", "pack_bits, 1 bit", "--values", "4096", "--rounds", "1")
    run(encode, tmp_path, *argv, "--plot", str(picture))
    assert not picture.exists()
    assert "no picture: matplotlib is not there" in capsys.readouterr().out


@pytest.mark.parametrize("script", [attention, encode, generate, host_cost])
def test_options(script):
    for bad in (["--json", "no/such/folder.json"], ["--from-json", "no-such.json"]):
        with pytest.raises(SystemExit):
            script.parse(bad)


def test_targets():
    assert report.Target("a", 1.0, 1.0).met and not report.Target("a", 0.99, 1.0).met
    assert str(report.Target("speed", None, 1.0)) == "speed: not measured"
    assert str(report.Target("speed", 0.5, 1.0)).endswith("0.50x, target 1.00x: MISSED")


def test_token_stages(capsys):
    token_stages.main("--model tiny --context 40 --tokens 4 --rounds 2".split())
    rows = [r.split("│")[1:-1] for r in capsys.readouterr().out.splitlines() if r.startswith("│")]
    assert [r[0].strip().split(",")[0] for r in rows] == ["uncompressed", "centred-4bit"]
    for _, *parts, total in rows:
        spent = [float(x.replace(",", "")) for x in (*parts, total)]
        assert min(spent) >= 0 and sum(spent[:-1]) <= 1.01 * spent[-1] + 4
