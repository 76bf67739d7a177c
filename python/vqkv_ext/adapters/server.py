"""What ``vqkv serve`` adds to mlx_lm's server, by subclasses of its parts.

Its one generation thread answers all requests. An exception there ends it, and with it every answer
to come, while the process lives on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

__all__ = ["PromptCache", "robust"]


class PromptCache(LRUPromptCache):
    """Holds what it counts, and always leaves a token to run: with a cache of the whole prompt
    there would be nothing to predict from, which ends the generation thread."""

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any
    ) -> None:
        # a row taken out of a batch keeps all of the batch until it is evaluated
        mx.eval([c.state for c in prompt_cache])
        super().insert_cache(model, tokens, prompt_cache, **options)

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is None or rest:
            return cache, rest
        if not can_trim_prompt_cache(cache):
            return None, tokens
        trim_prompt_cache(cache, 1)
        return cache, tokens[-1:]


@contextlib.contextmanager
def robust() -> Iterator[None]:
    """Within this context ``mlx_lm.server`` refuses prompts that would end its generation thread,
    accepts many connections at once, and stops when the thread has ended.

    Raises:
        RuntimeError: The generation thread has ended, such as by a model that cannot be loaded.
    """
    failures: list[Exception] = []
    generators: list[Any] = []

    class Generator(server.ResponseGenerator):
        def __init__(self, *args: Any):
            generators.append(self)
            super().__init__(*args)

        def _generate(self) -> None:
            try:
                super()._generate()
            except Exception as e:
                failures.append(e)
                raise

        def _tokenize(self, *args: Any) -> tuple[Any, ...]:
            prompt, *others = super()._tokenize(*args)
            if not prompt:
                raise ValueError("the prompt must have at least one token")
            return prompt, *others

    class HTTPServer(ThreadingHTTPServer):
        request_queue_size = 128  # connections that wait to be accepted; 5 by default

        def server_activate(self) -> None:
            super().server_activate()
            logging.info("listening on http://%s:%d", *self.server_address[:2])

        def service_actions(self) -> None:
            if failures:
                raise RuntimeError(f"the generation thread has ended: {failures[0]}")

    names = {
        "ResponseGenerator": Generator,
        "LRUPromptCache": PromptCache,
        # run() takes a server_class, but does not pass it on
        "_run_http_server": partial(server._run_http_server, server_class=HTTPServer),
    }
    originals = {name: getattr(server, name) for name in names}
    for name, value in names.items():
        setattr(server, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(server, name, value)
        for generator in generators:
            generator.stop_and_join()
