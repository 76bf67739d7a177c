"""What attention reads: coded tokens, an uncompressed tail, and where each position lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

MAX_CHANNELS = 576
"""Values of a key or value, and channels of a key's code, that the attention kernels hold."""


class Transform(Protocol):
    """A linear change of basis between vectors and codes. Attention is linear in it, so it acts on
    the query (keys) and once on the output (values), never on every token.

    A transform may have an attribute ``diagonal``, ``[1 or H, D]``: then :meth:`query` is
    ``(diagonal * q) H`` and :meth:`inverse` is ``diagonal * (y H^T)``, H being the orthonormal
    Hadamard matrix, and the attention kernel does both by itself.
    """

    def forward(self, x: mx.array) -> mx.array:
        """Vectors ``[B, H, S, D]`` to the code basis, float32."""
        ...

    def query(self, q: mx.array) -> mx.array:
        """Queries ``[B, Hq, L, D]`` in the channels of the codes, float32: ``query(q)`` times a
        decoded key estimates ``q . k``."""
        ...

    def inverse(self, y: mx.array) -> mx.array:
        """From the code basis back, ``[B, H, L, D]``, float32."""
        ...


@dataclass(frozen=True)
class TableCode:
    """A code as a table look-up over a bit stream.

    Entry ``t`` of a token is the ``window`` bits (``2**window`` table rows) at bit offset
    ``stride * t`` of its bytes, least significant bit first; it selects a row of ``dims`` values.

    Attributes:
        table: ``[1 or H, 1 or entries, 2**window, dims]``, floating.
        stride: Bits from one entry to the next; ``window`` for codes that do not overlap.
    """

    table: mx.array
    stride: int

    @property
    def dims(self) -> int:
        return self.table.shape[-1]

    @property
    def window(self) -> int:
        return self.table.shape[-2].bit_length() - 1

    def bytes_per_token(self, width: int) -> int:
        """Bytes of one token's codes for vectors of ``width`` values."""
        entries = width // self.dims
        return ((entries - 1) * self.stride + self.window + 7) // 8


@dataclass(frozen=True)
class CodedBody:
    """The coded tokens of keys or values: body token ``j`` is logical position ``sink_tokens + j``.

    Attributes:
        codes: ``[B, H, S, bytes]`` uint8, ``S`` being the capacity.
        code: How to read them.
        scales: ``[B, H, S]`` bfloat16, one factor per token, or None.
        centres: ``[B, H, ceil(S / block), D]`` int8, added per block and channel, or None.
        centre_scales: ``[B, H, ceil(S / block)]`` bfloat16, the unit of ``centres``.
        transform: The basis of the codes, or None for that of the vectors.
        pair: Keys only: a second code of the same tokens, whose channels follow those of the first
            in the code basis, or None.
    """

    codes: mx.array
    code: TableCode
    scales: mx.array | None = None
    centres: mx.array | None = None
    centre_scales: mx.array | None = None
    transform: Transform | None = None
    pair: CodedBody | None = None

    def arrays(self) -> list[mx.array]:
        """The arrays that grow with the number of tokens."""
        optional = (self.scales, self.centres, self.centre_scales)
        held = [self.codes, *(a for a in optional if a is not None)]
        return held if self.pair is None else held + self.pair.arrays()


@dataclass(frozen=True)
class Layout:
    """Which tokens exist and where they are stored.

    Attributes:
        rows: ``[B, 3]`` int32. Per batch row: tokens in all (those of the query included), tokens
            held as codes, and the logical position of the first tail token after the sinks. Or
            three integers, the same for all rows.
        sink_tokens: First tokens, never coded; tail slots ``[0, sink_tokens)``.
        window: A query reads at least this many last tokens from the tail.
        block: Tokens are coded in blocks of this many.
    """

    rows: mx.array | tuple[int, int, int]
    sink_tokens: int
    window: int
    block: int

    def array(self, batch: int) -> mx.array:
        """:attr:`rows` of so many rows as an array."""
        if isinstance(self.rows, mx.array):
            return self.rows
        return mx.broadcast_to(mx.array([self.rows], mx.int32), (batch, 3))

    def coded_tokens(self, seen: int) -> int:
        """Tokens a query that sees ``seen`` tokens reads as codes."""
        return coded_tokens(seen, self.sink_tokens, self.window, self.block)


def coded_tokens(seen: int, sink_tokens: int, window: int, block: int) -> int:
    """``block * max(0, floor((seen - sink_tokens - window) / block))``."""
    return block * max(0, (seen - sink_tokens - window) // block)


@dataclass(frozen=True)
class PackedKV:
    """Keys or values as attention reads them.

    Attributes:
        body: Coded tokens.
        tail: ``[B, H, T, D]``, the sink tokens and then the recent ones, in the query's dtype.
        layout: Shared by keys and values.
    """

    body: CodedBody
    tail: mx.array
    layout: Layout
