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
from mlx_lm.models import cache as stock

import writing
from test_cli import save_model
from vqkv_ext.adapters.mlx_lm import make_prompt_cache

PRESET = "centred-2bit"
TOKENS = 16  # of an answer
KEPT = 6  # entries of the server's prompt cache
LIMIT = 60.0  # seconds that an answer may take

# Answers a line on standard input with the bytes that MLX and the server's prompt cache hold, and
# how many generators of batches there are.
SERVER = """
import gc, sys, threading
import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache
from vqkv_ext.cli import main

def instances(kind):
    return [o for o in gc.get_objects() if isinstance(o, kind)]

def report():
    for _ in sys.stdin:
        gc.collect()
        held = sum(o.nbytes for o in instances(LRUPromptCache))
        print(mx.get_active_memory(), held, len(instances(BatchGenerator)), flush=True)

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

    def report(self) -> list[int]:
        """See SERVER."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return list(map(int, self.process.stdout.readline().split()))

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
    return save_model(tmp_path_factory.mktemp("server") / "tiny", writing.llama())


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


def steady(loaded, lengths, seed: int, tokens: int = TOKENS) -> dict[str, str]:
    """Prompts of the given lengths with their texts. No token is so close a call that the order of
    sums, which differs between one row and a batch, could decide it; no two begin alike."""
    found, heads = {}, list(map(chr, range(33, 127)))
    for at, length in enumerate(lengths):
        for trial in range(40):
            text = prompt(length, 1000 * seed + 40 * at + trial, heads[at])
            written, margin = alone(loaded, text, tokens=tokens)
            if margin > 0.01:
                found[text] = written
                break
    assert len(found) == len(lengths)
    return found


def together(server: Server, texts) -> list[str]:
    """Streams all at once, each from a thread of its own."""
    answers: dict[str, str | Exception] = {}

    def ask(text: str) -> None:
        try:
            answers[text] = server.stream(text)
        except Exception as e:
            answers[text] = e

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[text] for text in texts]


def settled(server: Server) -> tuple[int, int]:
    """Bytes that MLX holds beside the prompt cache once requests are done, and the prompt cache's.

    A buffer of MLX may be some pages larger than its array, so a twentieth is left to these."""
    server.stream("settle", 2)  # until then the server's loop holds what it answered last
    last, same = None, 0
    while same < 3:
        now = server.report()
        last, same = now, same + 1 if now == last else 0
        time.sleep(0.05)
    active, held, _ = last
    return active - held, held


def test_32_streams_at_once(server, loaded):
    lengths = [(3, 20, 70, 150, 260, 500, 900, 131)[i % 8] + i for i in range(32)]
    expected = steady(loaded, lengths, seed=1)
    assert together(server, expected) == list(expected.values())
    assert server.report()[2] == 1
    # the codes matter to what is written
    for text in list(expected)[5::8]:
        assert alone(loaded, text, stock.make_prompt_cache(loaded[0]))[0] != expected[text]
    assert server.healthy()


def test_a_request_that_cannot_be_batched(server, loaded):
    """A seed is for one request alone: the batch ends first, and the text is the same."""
    text, expected = next(iter(steady(loaded, [170], seed=5).items()))
    body = {"prompt": text, "max_tokens": TOKENS, "temperature": 0, "seed": 1}
    status, raw = server.post(body)
    assert status == 200 and json.loads(raw)["choices"][0]["text"] == expected
    assert len(server.stream("abc", 3)) == 3


def test_a_conversation_goes_on_in_its_cache(server, loaded):
    """The second turn finds the first one's codes, and gives what one cache gives for both."""
    (first, answer), *_ = steady(loaded, [200], seed=2).items()
    model, _ = loaded
    cache = make_prompt_cache(model, PRESET)
    assert alone(loaded, first, cache)[0] == answer
    more = prompt(90, 77)
    expected, margin = alone(loaded, more, cache)
    assert margin > 1e-3
    assert server.stream(first) == answer
    body = {"prompt": first + answer + more, "max_tokens": TOKENS, "temperature": 0}
    status, raw = server.post(body)
    found = json.loads(raw)
    assert status == 200 and found["choices"][0]["text"] == expected
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(first + answer) - 1


def test_a_prompt_that_is_cached_as_a_whole(server, loaded):
    first, answer = next(iter(steady(loaded, [120], seed=3).items()))
    assert server.stream(first) == answer
    for _ in range(2):
        assert len(server.stream(first + answer, 4)) == 4
    assert server.healthy()


def test_memory_returns_to_its_base(server, loaded):
    texts = [prompt(300 + 10 * i, 500 + i, chr(33 + i)) for i in range(KEPT + 2)]
    base, _ = settled(server)
    for _ in range(2):
        assert all(len(a) == TOKENS for a in together(server, texts))
        rest, held = settled(server)
        assert held > KEPT * 400_000
        assert rest <= base + held // 20
    assert server.healthy()


def test_a_client_that_goes_away(server, loaded):
    text, expected = next(iter(steady(loaded, [180], seed=4).items()))
    base, _ = settled(server)
    body = {"prompt": prompt(400, 9), "max_tokens": 100_000, "stream": True, "temperature": 0}
    raw = json.dumps(body).encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n"
            s.sendall(head.encode() + raw)
            while b"data: " not in s.recv(4096):
                pass
    assert server.stream(text) == expected
    rest, held = settled(server)
    assert rest <= base + held // 20
    assert server.healthy()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 400),
        (b"[1, 2]", 400),
        (b"{}", 400),
        (b'{"prompt": "a", "max_tokens": -1}', 400),
        (b'{"prompt": "a", "temperature": "hot"}', 400),
        (b'{"prompt": ""}', 404),
        (b'{"prompt": 3}', 404),
        (b'{"prompt": "a", "model": "no/such/model"}', 404),
    ],
)
def test_malformed_bodies(server, loaded, raw, status):
    got, answer = server.request("POST", "/v1/completions", raw)
    assert got == status and json.loads(answer)["error"]
    assert server.healthy() and len(server.stream("abc", 3)) == 3


def test_malformed_requests(server):
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        server.request("POST", "/v1/completions", b"\xff\xfe")
    assert server.request("POST", "/v1/nothing", b"{}")[0] == 404
    assert server.request("POST", "/v1/completions", b"{}", **{"Content-Length": "x"})[0] == 400
    assert server.healthy() and len(server.stream("abc", 3)) == 3


def test_a_long_prompt(server, loaded):
    """Several steps of prefill, far beyond what the others ask, while another stream runs."""
    text, expected = next(iter(steady(loaded, [150], seed=6).items()))
    long = prompt(9000, 3)
    answers = together(server, [long, text])
    assert len(answers[0]) == TOKENS and answers[1] == expected
    assert server.healthy()


def test_a_server_that_cannot_answer_ends(tmp_path):
    command = [sys.executable, "-m", "vqkv_ext.cli", "serve", "--model", str(tmp_path), "--port"]
    done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=LIMIT)
    assert done.stderr.splitlines()[-1].startswith("vqkv serve: the generation thread has ended: ")
    assert done.returncode == 1
