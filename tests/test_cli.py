"""The vqkv command, on a model of mlx_lm saved to disk."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import tiny
from vqkv_ext import cli, info
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.cli import common
from vqkv_ext.codecs import Calibration

FAST = ["--tokens", "300", "--iterations", "2"]


def save_model(folder: Path, model=None) -> Path:
    """A llama, by default ``tiny.llama()``, and a tokenizer of its 97 characters, as mlx_lm.load
    wants them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = model or tiny.llama()
    folder.mkdir(parents=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {k: v for k, v in vars(model.args).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    characters = ["<eos>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="?")
    fast.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model") / "tiny"))


def fails(capsys, *arguments: str) -> str:
    """The one line on stderr of a command that must exit with 2."""
    try:
        code = cli.main(arguments)
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_info(capsys):
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in info()) and mx.__version__ in shown
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info()


def test_info_needs_no_extras():
    """As after `pip install vqkv-ext`: neither mlx_lm nor rich; the other command says so."""
    code = """
import sys
for name in ("mlx_lm", "rich", "transformers", "tokenizers"):
    sys.modules[name] = None
from vqkv_ext.cli import main
assert main(["info"]) == 0
sys.exit(main(["calibrate", "m", "builtin", "-o", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "x.safetensors"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "executor" in done.stdout
    assert done.stderr.count("\n") == 1 and 'pip install "vqkv-ext[lm]"' in done.stderr


def test_calibrate(model, tmp_path, capsys):
    text, target = tmp_path / "text.txt", tmp_path / "c.safetensors"
    text.write_text("It was a dark and stormy night.\n" * 12, encoding="utf-8")
    assert cli.main(["calibrate", model, str(text), "-o", str(target), *FAST]) == 0
    out = capsys.readouterr().out
    calibration = Calibration.load(target)
    assert (calibration.preset, calibration.tokens) == ("query-aware-2bit", 300)
    held = sum(x.key.nbytes + x.value.nbytes for x in calibration.layers)
    assert f"codecs: {held:,} bytes" in out
    # 2 layers, 2 heads, keys and values of 64 values: 2 bits each and 6 more, a 16-bit scale, and
    # for a block of keys 64 bytes and a 16-bit scale; 2 bytes each value in float16
    assert "2 layers" in out and "beyond the windows: 156 bytes; float16 takes 1,024 (6.6x)" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "text.txt"]
    loaded, _ = common.load_model(model)
    assert len(make_prompt_cache(loaded, target)) == 2


@pytest.mark.skipif(
    info()["executor"] == "cuda",
    reason="MLX's CUDA backend adds up scattered values in no fixed order",
)
def test_same_seed_same_file(model, tmp_path):
    def make(name: str, *more: str) -> bytes:
        path = tmp_path / f"{name}.safetensors"
        assert cli.main(["calibrate", model, "builtin", "-o", str(path), *FAST, *more]) == 0
        return path.read_bytes()

    assert make("aware") == make("again", "--seed", "1")  # nothing is drawn
    fit = ("--preset", "vecinfer-2bit")
    assert make("a", *fit) == make("b", *fit, "--seed", "0") != make("c", *fit, "--seed", "1")


def test_standard_input_is_utf8(model, tmp_path, monkeypatch, capsys):
    target = tmp_path / "c.safetensors"
    raw = io.BytesIO(("naïve - " * 60).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="ascii"))
    command = ["calibrate", model, "-", "-o", str(target), "--preset", "vecinfer-4bit", *FAST]
    assert cli.main(command) == 0
    assert Calibration.load(target).preset == "vecinfer-4bit"


def test_unusable_output_is_refused_before_the_work(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli.calibrate, "read_text", lambda name: pytest.fail("work began"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.safetensors").mkdir()
    text = tmp_path / "text.safetensors"
    text.write_text("a" * 400)
    for output, message in (
        (tmp_path / "none" / "c.safetensors", "cannot write to .*none"),
        (tmp_path / "file" / "c.safetensors", "cannot write to .*file"),
        (tmp_path / "folder.safetensors", "is a directory"),
        (tmp_path / "c.npz", "must end in .safetensors, but got 'c.npz'"),
        (text, "is also an input"),
    ):
        assert re.search(message, fails(capsys, "calibrate", model, str(text), "-o", str(output)))


def test_bad_input(model, tmp_path, capsys):
    short, latin = tmp_path / "short.txt", tmp_path / "latin.txt"
    short.write_text("too short")
    latin.write_bytes(b"caf\xe9 " * 100)
    gguf = tmp_path / "bad.gguf"
    gguf.write_bytes(b"nothing of the kind")
    (tmp_path / "empty").mkdir()
    target = tmp_path / "c.safetensors"

    def refused(model: str, text: str, *more: str) -> str:
        message = fails(capsys, "calibrate", model, text, "-o", str(target), *more)
        assert message.startswith("vqkv calibrate: ") and not target.exists()
        return message

    assert "must have at least 256 tokens, but has 9" in refused(model, str(short))
    assert "cannot read" in refused(model, str(tmp_path / "none.txt"))
    assert "as UTF-8" in refused(model, str(latin))
    assert "neither a directory" in refused("missing", "builtin")
    assert "neither a directory" in refused(str(tmp_path / "none"), "builtin")
    assert "must begin with GGUF" in refused(str(gguf), "builtin")
    assert "cannot load" in refused(str(tmp_path / "empty"), "builtin")
    assert "--preset: invalid choice" in refused(model, "builtin", "--preset", "vecinfer-5bit")
    assert "must be at least 256, but got 9" in refused(model, "builtin", "--tokens", "9")
    assert "invalid int value: 'x'" in refused(model, "builtin", "--iterations", "x")
    assert "COMMAND" in fails(capsys)
    assert "invalid choice" in fails(capsys, "nonsense")
