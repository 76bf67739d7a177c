"""Every code block of README.md, CONTRIBUTING.md and docs/ is executed.

Blocks of a file run in order, Python ones in one namespace, in a folder where the names of models
they use are those of one tiny model, made here. A block that needs what this machine may not have
says so in its info string, ``title="needs ..."``; what such blocks there are is part of the test.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import mlx_lm
import pytest

import writing
from markdown import Block, blocks
from test_cli import save_model
from vqkv_ext import cli, ops
from vqkv_ext.evaluation import calibration_text

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HUB = "mlx-community/Llama-3.2-1B-Instruct-4bit"
NEEDS = ("needs a build", "needs a download", "needs a Mac", "needs an NVIDIA GPU")
LANGUAGES = ("python", "sh", "text")
# In place of what a reader would choose: sizes that take no time.
SMALLER = {
    "calibrate": ["--tokens", "300", "--iterations", "2"],
    "eval": ["--tokens", "300"],
    "bench": ["--rounds", "1"],
    "generate": ["--max-tokens", "5"],
    "chat": ["--max-tokens", "5"],
}
BLOCKS = [b for path in FILES for b in blocks(path)]


def test_blocks_that_are_not_executed():
    """They are counted here, so that none is added unseen."""
    left_out = Counter((b.path.name, b.title) for b in BLOCKS if b.title)
    assert left_out == EXPECTED_LEFT_OUT
    assert {b.language for b in BLOCKS} <= set(LANGUAGES)
    assert {title for _, title in left_out} <= set(NEEDS)


EXPECTED_LEFT_OUT = Counter(
    {
        ("README.md", "needs a build"): 2,
        ("index.md", "needs a build"): 1,
        ("README.md", "needs an NVIDIA GPU"): 1,
    }
)


def test_reference_has_every_op():
    shown = re.findall(
        r"^::: (vqkv_ext\.ops\.\w+\.\w+)$", (ROOT / "docs" / "ops.md").read_text(), re.M
    )
    assert sorted(name.rsplit(".", 1)[1] for name in shown) == sorted(ops.__all__)
    assert all(f"{o.__module__}.{o.__name__}" in shown for o in map(vars(ops).get, ops.__all__))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_model(tmp_path_factory.mktemp("docs") / "tiny", writing.llama()))


@pytest.fixture
def reader(model, tmp_path, monkeypatch):
    """A reader's folder and names: a text, a model, and what the text says they have."""
    monkeypatch.chdir(tmp_path)
    for name in (HUB, "MODEL"):  # mlx_lm takes a folder before it asks the hub
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(model)
    (tmp_path / "TEXT").write_text(calibration_text()[:2000])
    network, tokenizer = mlx_lm.load(model)[:2]
    prompt = tokenizer.encode(calibration_text()[:300])
    log = logging.getLogger("vqkv_ext")
    level = log.level  # a block of the docs sets it
    yield {
        "model": network,
        "tokenizer": tokenizer,
        "prompt": prompt,
        "prompts": [prompt, prompt[:90]],
        "draft_model": mlx_lm.load(model)[0],
    }
    log.setLevel(level)


def _python(block: Block, names: dict) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, str(block.path), "exec"), names)


def _served(arguments: list[str]) -> None:
    """A server starts, answers one request and is ended."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = [*arguments]
    arguments[arguments.index("--port") + 1] = str(port)
    code = f"import sys; from vqkv_ext.cli import main; sys.exit(main({arguments!r}))"
    body = {"model": "default_model", "prompt": "Hello", "max_tokens": 3}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    server = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            assert server.poll() is None
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert json.loads(answer.read())["choices"]
                return
            except urllib.error.URLError:
                time.sleep(0.2)
        raise AssertionError("the server does not answer")
    finally:
        server.kill()
        server.wait()


def _vqkv(arguments: list[str], monkeypatch) -> None:
    command = arguments[0]
    if command == "serve":
        return _served(arguments)
    if command == "bench":
        arguments = [re.sub(r"^\d{3,}$", "256", a) for a in arguments]
    if "--needle" in arguments:
        arguments = [*arguments, "--needle", "1024", "1100", "--needles", "10"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nq\n"))
    assert cli.main([*arguments, *SMALLER.get(command, [])]) == 0


def _shell(block: Block, monkeypatch) -> None:
    """Lines of vqkv run here; others in a shell, in the repository, which has what they name."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["vqkv"]:
            _vqkv(words[1:], monkeypatch)
        elif words:
            subprocess.run(["bash", "-ec", line], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.usefixtures("no_compile", "one_blas_thread")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_blocks_work(path, reader, monkeypatch):
    names = {"__name__": "__main__", **reader}
    for block in blocks(path):
        if block.title:
            continue
        try:
            if block.language == "python":
                _python(block, names)
            elif block.language == "sh":
                _shell(block, monkeypatch)
        except BaseException as e:
            e.add_note(f"in the block of {path.name} at line {block.line}")
            raise
