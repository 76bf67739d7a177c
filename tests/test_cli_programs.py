"""vqkv generate, chat, eval and bench, and what all commands share."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import weakref
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import cache as stock
from rich.console import Console

import writing
from test_cli import fails, save_model
from vqkv_ext import cli
from vqkv_ext.adapters.calibrate import calibrate
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.adapters.programs import MakePromptCache, compressed_caches
from vqkv_ext.agreement import agreement
from vqkv_ext.cli.evaluate_output import _needles
from vqkv_ext.evaluation import calibration_text, compare, quantized_caches
from vqkv_ext.needles import Retrieval

PROMPT = "".join(chr(33 + 7 * i % 94) for i in range(200))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model") / "tiny", writing.llama()))


@pytest.fixture(scope="module")
def loaded(model):
    return mlx_lm.load(model)[:2]


@pytest.fixture(scope="module")
def calibration(loaded, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("calibration") / "mine.safetensors"
    network, tokenizer = loaded
    tokens = tokenizer.encode(calibration_text()[:400])
    calibrate(network, tokens, "vecinfer-2bit", iterations=2).save(path)
    return str(path)


def generate(capsys, model: str, *more: str) -> str:
    command = ["generate", "--model", model, "--prompt", PROMPT, "--max-tokens", "12"]
    assert cli.main([*command, "--ignore-chat-template", "--temp", "0", *more]) == 0
    return capsys.readouterr().out.split("==========\n")[1].rstrip("\n")


def test_help_is_fast_and_needs_no_extras():
    code = """
import sys
for name in ("mlx_lm", "rich", "transformers", "matplotlib"):
    sys.modules[name] = None
from vqkv_ext.cli import main
main(["--help"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "chat", "serve", "calibrate", "eval", "bench", "info"):
        assert f"\n    {command}" in done.stdout
    for command in (["generate", "--prompt", "x"], ["serve"], ["eval", "m", "t"], ["bench"]):
        one = code.replace('main(["--help"])', f"sys.exit(main({command!r}))")
        done = subprocess.run([sys.executable, "-c", one], capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and 'pip install "vqkv-ext[lm]"' in done.stderr


def test_generate_is_mlx_lm_with_another_cache(model, loaded, calibration, capsys):
    texts = set()
    for kv in ("centred-2bit", "turboquant-1bit", calibration):
        cache = make_prompt_cache(loaded[0], kv)
        expected = mlx_lm.generate(*loaded, PROMPT, max_tokens=12, prompt_cache=cache)
        assert generate(capsys, model, "--kv", kv) == expected
        assert generate(capsys, model, f"--kv={kv}") == expected
        texts.add(expected)
    assert len(texts) == 3  # else a cache that is not replaced would not be seen
    default = mlx_lm.generate(
        *loaded, PROMPT, max_tokens=12, prompt_cache=make_prompt_cache(loaded[0], "centred-4bit")
    )
    assert generate(capsys, model) == default
    # a draft changes the speed alone
    assert generate(capsys, model, "--draft-model", model) == default
    # nothing stays replaced
    program = sys.modules["mlx_lm.generate"]
    assert program.make_prompt_cache is stock.make_prompt_cache


def test_chat(model, loaded, monkeypatch, capsys):
    """Two turns share one cache; `r` begins another."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\nmore\nr\nmore\nq\n"))
    assert cli.main(["chat", "--model", model, "--kv", "centred-2bit", "--max-tokens", "12"]) == 0
    shown = capsys.readouterr().out
    network, tokenizer = loaded
    last = -1
    for turns in ([PROMPT, "more"], ["more"]):
        cache = make_prompt_cache(network, "centred-2bit")
        for turn in turns:
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}], add_generation_prompt=True
            )
            text = mlx_lm.generate(*loaded, prompt, max_tokens=12, prompt_cache=cache)
            at = shown.find(text.strip(), last + 1)
            assert at > last, (turn, text, shown)
            last = at


def test_arguments_that_do_not_fit(model, calibration, capsys):
    prompt = ["generate", "--model", model, "--prompt", "x"]
    for option in ("--kv-bits", "--max-kv-size", "--prompt-cache-file"):
        assert f"{option} must not be given" in fails(capsys, *prompt, option, "4")
        assert f"{option} must not be given" in fails(capsys, *prompt, f"{option}=4")
    assert "--kv-bits must not be given" in fails(capsys, "serve", "--kv-bits", "4")
    assert "--max-kv-size must not be given" in fails(capsys, "chat", "--max-kv-size", "9")
    for given in (["--model", "x.gguf"], ["--model=x.gguf"]):
        assert "only `vqkv eval` and `vqkv calibrate` read GGUF" in fails(capsys, "chat", *given)
    assert "unrecognized arguments: --tokens 3" in fails(capsys, "info", "--tokens", "3")
    assert "expected one argument" in fails(capsys, *prompt, "--kv")
    assert "but got 'vecinfer-2bit'" in fails(capsys, *prompt, "--kv", "vecinfer-2bit")
    # of another model: three layers instead of two
    other = save_model(Path(calibration).with_name("other"), writing.llama(num_hidden_layers=3))
    command = ["generate", "--model", str(other), "--prompt", "x", "--kv", calibration]
    assert cli.main(command) == 2
    err = capsys.readouterr().err
    assert "it is for layers 2 but the model has 3" in err and err.count("\n") == 1


def test_help_of_programs(capsys):
    pytest.raises(SystemExit, cli.main, ["generate", "--help"])
    shown = capsys.readouterr().out
    assert "--kv PRESET|FILE" in shown and "--max-tokens" in shown


def test_eval(model, loaded, calibration, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "q.png"
    command = ["eval", model, "builtin", "--tokens", "300", "--kv", "centred-2bit", calibration]
    assert cli.main([*command, "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert picture.read_bytes()[1:4] == b"PNG"
    network, tokenizer = loaded
    caches = quantized_caches(network) | {
        "centred-2bit": lambda: make_prompt_cache(network, "centred-2bit"),
        "mine": lambda: make_prompt_cache(network, calibration),
    }
    tokens = tokenizer.encode(calibration_text())[:300]
    for name, q in compare(network, tokens, caches).items():
        for field in ("kl", "top1", "ppl", "cache_bytes", "positions"):
            assert found["caches"][name][field] == getattr(q, field), (name, field)
        assert found["reference"]["ppl"] == q.ppl_reference
        assert found["reference"]["cache_bytes"] == q.reference_bytes
    quantized = list(quantized_caches(network))
    assert quantized == ["mlx-lm kv_bits=8", "mlx-lm kv_bits=4"] or mx.default_device() == mx.gpu
    assert list(found["caches"]) == [*quantized, "centred-2bit", "mine"]
    assert found["reference"]["name"] == "float32 (mlx-lm)" and found["tokens"] == 300
    assert found["caches"]["centred-2bit"]["kl"] > 0

    assert cli.main([*command, "--dtype", "float16", "--tokens", "20"]) == 0
    shown = capsys.readouterr().out
    assert "float16 (mlx-lm)" in shown and "mine" in shown and "perplexity" in shown


def test_eval_of_generation(model, loaded, capsys):
    command = ["eval", model, "builtin", "--tokens", "300", "--kv", "turboquant-1bit"]
    command += ["--greedy", "3", "--chunk", "150"]
    assert cli.main([*command, "--json", "--needle", "750", "--needles", "10"]) == 0
    found = json.loads(capsys.readouterr().out)
    network, tokenizer = loaded
    tokens = tokenizer.encode(calibration_text())[:300]
    caches = {"turboquant-1bit": lambda: make_prompt_cache(network, "turboquant-1bit")}
    (alone,) = agreement(network, tokens, 3, caches, chunk=150).values()
    assert found["greedy"]["turboquant-1bit"] == alone.to_dict()
    assert list(found["greedy"]) == list(found["caches"])
    (needles,) = found["needles"]
    assert (needles["length"], needles["needles"]) == (750, 10)
    assert set(needles["caches"]) == set(found["caches"])
    assert {c["of"] for c in needles["caches"].values()} == {needles["reference_finds"]}
    assert "--needle 99 --needles 10: [haystacks] length" in fails(
        capsys, "eval", model, "builtin", "--needle", "99", "--needles", "10"
    )


def test_table_of_needles():
    depths = [0.05, 0.35, 0.95]
    found = [
        Retrieval(100, depths, [True, True, False], {"a": [True, False, True]}),
        Retrieval(200, depths, [True, True, True], {"a": [False, True, True]}),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_needles(found))
    shown = console.export_text()
    (row,) = (line.split() for line in shown.splitlines() if line.split()[:1] == ["a"])
    assert row == ["a", "1/2", "2/3", "1/2", "1/2", "0/0", "0/0", "1/1"]
    text = " ".join(shown.split())
    assert "2 of 3 at 100 tokens, 3 of 3 at 200 tokens" in text and "80-100 %" in text


def test_eval_refuses_before_the_work(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli.evaluate, "load_model", lambda name: pytest.fail("work began"))
    command = ["eval", model, "builtin"]
    assert "got 'centred-9bit'" in fails(capsys, *command, "--kv", "centred-9bit")
    assert "must end in .png" in fails(capsys, *command, "--plot", str(tmp_path / "x.jpg"))
    assert "cannot write" in fails(capsys, *command, "--plot", str(tmp_path / "no" / "x.png"))
    assert "at least 2, but got 1" in fails(capsys, *command, "--tokens", "1")
    assert "multiple of 10, but got 15" in fails(capsys, *command, "--needles", "15")


def test_caches_that_mlx_lm_quantises(loaded):
    """Heads of 96 are not whole groups of 64, those of 40 of none; mlx_lm has no quantised sliding
    window."""
    if not quantized_caches(loaded[0]) and mx.default_device() == mx.gpu:
        pytest.skip("MLX has no quantised products here")
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    assert quantized_caches(writing.llama(**windows)) == {}
    caches = quantized_caches(writing.llama(head_dim=96))
    assert {c.group_size for make in caches.values() for c in make()} == {32}
    assert {c.group_size for make in quantized_caches(loaded[0]).values() for c in make()} == {64}
    assert quantized_caches(writing.llama(head_dim=40)) == {}


def test_bench(capsys):
    command = [
        "bench",
        "--tokens",
        "100",
        "300",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--rounds",
        "2",
    ]
    command += ["--head-dim", "64", "--kv", "centred-4bit", "none"]
    for queries in ("1", "70"):
        assert cli.main([*command, "--queries", queries, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert [(r["tokens"], r["preset"]) for r in rows] == [
            (n, p) for n in (100, 300) for p in ("centred-4bit", "none")
        ]
        assert all(r["mlx_ms"] > 0 and r["vqkv_ms"] > 0 for r in rows)
        assert rows[0]["mlx_bytes"] == 2 * 2 * 100 * 64 * 2
        assert rows[2]["vqkv_bytes"] < rows[3]["vqkv_bytes"]
    assert cli.main(command) == 0
    assert "times faster" in capsys.readouterr().out
    assert "--queries must be at most" in fails(capsys, *command, "--queries", "101")
    assert "multiple of --kv-heads 2" in fails(capsys, *command, "--heads", "5")


def test_codecs_are_built_once_and_models_let_go():
    make = MakePromptCache("centred-2bit")
    model = writing.llama()
    one, two = make(model), make(model)
    assert one[0] is not two[0] and one[0].key_codec is two[0].key_codec
    mx.eval(model(mx.array([[1, 2]]), cache=one))
    assert one[0].offset == 2 and two[0].offset == 0 and make(model)[0].offset == 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="max_kv_size"):
        make(writing.llama(), 100)


def test_context_restores_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), compressed_caches("centred-2bit"):
        assert isinstance(sys.modules["mlx_lm.chat"].make_prompt_cache, MakePromptCache)
        raise RuntimeError("inside")
    for name in ("generate", "chat", "server"):
        assert sys.modules[f"mlx_lm.{name}"].make_prompt_cache is stock.make_prompt_cache
