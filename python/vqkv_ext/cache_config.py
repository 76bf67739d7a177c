"""Which tokens of a compressed cache stay uncompressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .packed import coded_tokens


@dataclass(frozen=True)
class CacheConfig:
    """Which tokens stay uncompressed.

    Attributes:
        sink_tokens: First tokens, kept for good (attention sinks, arXiv 2309.17453).
        window: Each query reads at least this many last tokens uncompressed.
        block: Tokens are coded in blocks of this many.
        use_metal_kernels: See :func:`vqkv_ext.ops.native`.
        prefill: What a chunk of several tokens reads of its own tokens. ``"coded"``: what each of
            them would read if they came one by one, so that no chunking changes a result.
            ``"dense"``: all of them uncompressed, which is nearer to an uncompressed cache.
        start: Nothing is coded before a chunk ends with this many tokens or more; that chunk still
            reads everything uncompressed. Like ``quantized_kv_start`` of mlx_lm, results then
            depend on where chunks end.
    """

    sink_tokens: int = 4
    window: int = 64
    block: int = 64
    use_metal_kernels: bool | None = None
    prefill: Literal["coded", "dense"] = "coded"
    start: int = 0

    def __post_init__(self) -> None:
        if self.prefill not in ("coded", "dense"):
            raise ValueError(
                f"[CacheConfig] prefill must be 'coded' or 'dense', but got {self.prefill!r}."
            )
        if self.use_metal_kernels not in (None, True, False):
            raise ValueError(
                "[CacheConfig] use_metal_kernels must be None, True or False, but got "
                f"{self.use_metal_kernels!r}."
            )
        for name, least in (("sink_tokens", 0), ("window", 0), ("block", 1), ("start", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"[CacheConfig] {name} must be an integer >= {least}, but got {value!r}."
                )

    def coded_tokens(self, seen: int) -> int:
        """Tokens a query that sees ``seen`` tokens reads as codes."""
        return coded_tokens(seen, self.sink_tokens, self.window, self.block)

    def due(self, held: int) -> int:
        """Tokens that are coded when a chunk ends with ``held`` tokens."""
        return self.coded_tokens(held) if held >= self.start else 0

    def trimmed(self, offset: int, coded: int, tail_start: int) -> tuple[int, int]:
        """``coded`` and ``tail_start`` of a row of which ``offset`` tokens are kept. Tokens that
        the tail still holds are un-coded, where a row that never saw more would not code them."""
        sinks = self.sink_tokens
        tail_start = max(sinks, min(tail_start, offset))
        return min(coded, max(self.coded_tokens(offset), tail_start - sinks)), tail_start

    def slot(self, position: int, tail_start: int) -> int:
        """Where the tail of a row holds a position."""
        sinks = self.sink_tokens
        return position if position < sinks else position - tail_start + sinks
