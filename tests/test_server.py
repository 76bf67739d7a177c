"""vqkv serve over HTTP: concurrent streams, bad requests, memory. The server is a process of its
own, judged by what it answers: on a CPU, MLX may abort at the exit of a process that ran a model
on another thread."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny
from test_cli import save_model
from vqkv_ext.adapters.mlx_lm import make_prompt_cache

PRESET = "centred-2bit"
TOKENS = 24  # of an answer
KEPT = 6  # entries of the server's prompt cache
LIMIT = 60.0  # seconds that an answer may take

# Answers a line on standard input with what MLX and the server's prompt cache hold.
SERVER = """
import gc, sys, threading
import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache
from vqkv_ext.cli import main

def report():
    for _ in sys.stdin:
        gc.collect()
        held = [o.nbytes for o in gc.get_objects() if isinstance(o, LRUPromptCache)]
        print("memory", mx.get_active_memory(), sum(held), flush=True)

threading.Thread(target=report, daemon=True).start()
main(sys.argv[1:])
"""


class Server:
    """The process, its port and what it logs."""

    def __init__(self, model: Path, *more: str):
        command = ["serve", "--model", str(model), "--port", "0", "--kv", PRESET, *more]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        self.log: list[str] = []
        self.ports: queue.Queue[int] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.port = self.ports.get(timeout=LIMIT)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening on http://127.0.0.1:(\d+)", line):
                self.ports.put(int(found[1]))

    def memory(self) -> tuple[int, int]:
        """Bytes that MLX holds, and of these the prompt cache's by its own count."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        _, active, held = self.process.stdout.readline().split()
        return int(active), int(held)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str):
        """(status, body) of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, body) -> tuple[int, bytes]:
        return self.request("POST", "/v1/completions", json.dumps(body).encode())

    def stream(self, prompt: str, tokens: int = TOKENS) -> str:
        """The text of a streamed answer."""
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
        status, raw = self.post(body)
        assert status == 200, raw
        events = [e[6:] for e in raw.decode().split("\n\n") if e.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(e)["choices"][0]["text"] for e in events)

    def healthy(self) -> bool:
        return self.request("GET", "/health") == (200, b'{"status": "ok"}')

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose texts depend on what it remembers: with the plain tiny one every token would
    follow from the last alone."""
    model = tiny.llama()
    mx.random.seed(4)
    embedding = 0.15 * mx.random.normal((97, 32))
    weights = [(k, 4 * v if v.ndim == 2 else v) for k, v in tree_flatten(model.parameters())]
    model.load_weights([(k, embedding if "embed" in k else v) for k, v in weights])
    return save_model(tmp_path_factory.mktemp("server") / "tiny", model)


@pytest.fixture(scope="module")
def loaded(folder):
    return mlx_lm.load(str(folder))[:2]


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder, "--prompt-cache-size", str(KEPT))
    yield server
    server.stop()


def prompt(length: int, seed: int, first: str = "") -> str:
    characters = np.random.default_rng(seed).integers(33, 127, length - len(first))
    return first + "".join(map(chr, characters))


def alone(loaded, text: str, cache=None, tokens: int = TOKENS) -> tuple[str, float]:
    """What the model writes without a server, and the least margin of a token over the next."""
    model, tokenizer = loaded
    cache = cache or make_prompt_cache(model, PRESET)
    written, margin = "", float("inf")
    for response in mlx_lm.stream_generate(
        model, tokenizer, text, max_tokens=tokens, prompt_cache=cache
    ):
        written += response.text
        second, best = mx.sort(response.logprobs)[-2:].tolist()
        margin = min(margin, best - second)
    return written, margin
