"""A codec: the basis in which vectors are coded, and the code."""

from __future__ import annotations

import hashlib

import mlx.core as mx

from .. import reference
from ..packed import CodedBody, TableCode, Transform

CodedArrays = dict[str, mx.array]
"""Fields of :class:`vqkv_ext.packed.CodedBody` by name; axis 2 is tokens (or blocks of them)."""


class Codec:
    """How the keys or the values of one layer are stored. Immutable, and shared by caches.

    Subclasses set the attributes and implement :meth:`encode`.

    Attributes:
        name: Of the method and its size, such as ``"vecinfer-2bit"``.
        width: Values per vector, D.
        heads: KV heads the tables are for, or None when they serve any number.
        code: How attention reads the codes.
        transform: Basis of the codes, or None.
        centred: Whether the tokens of a block share a centre.
    """

    name: str
    width: int
    heads: int | None
    code: TableCode
    transform: Transform | None
    centred: bool = False

    def encode(
        self,
        x: mx.array,
        *,
        block: int = 64,
        frozen: CodedArrays | None = None,
        use_metal_kernels: bool | None = None,
    ) -> CodedArrays:
        """Code vectors ``[B, H, S, D]``.

        Tokens are coded by themselves, or, by a centred codec, in blocks: any split of S between
        blocks gives the same bits.

        Args:
            x: The vectors. For a centred codec S is a multiple of ``block``, or all tokens are of
                one block with the centre ``frozen``.
            block: Tokens that share a centre.
            frozen: ``centres`` [B, H, 1, D] and ``centre_scales`` [B, H, 1] coded earlier, for
                tokens that join their block later; they are not among the results then.
            use_metal_kernels: See :func:`vqkv_ext.ops.native`.
        """
        raise NotImplementedError

    def empty(self, batch: int, heads: int) -> CodedArrays:
        """What :meth:`encode` gives for no tokens."""
        return {
            "codes": mx.zeros((batch, heads, 0, self.code.bytes_per_token(self.width)), mx.uint8)
        }

    def body(self, arrays: CodedArrays) -> CodedBody:
        """Coded arrays as attention reads them."""
        return CodedBody(code=self.code, transform=self.transform, **arrays)

    def _decode(self, arrays: CodedArrays, block: int) -> mx.array:
        """Coded arrays as vectors ``[B, H, S, channels]`` in the basis of the code."""
        x = reference.decode(
            arrays["codes"],
            self.code.table,
            self.code.stride,
            block,
            arrays.get("scales"),
            arrays.get("centres"),
            arrays.get("centre_scales"),
        )
        return x[..., : self.width]

    def decode(self, arrays: CodedArrays, block: int = 64) -> mx.array:
        """Coded arrays back to vectors ``[B, H, S, D]``, float32."""
        x = self._decode(arrays, block)
        return x if self.transform is None else self.transform.inverse(x)

    def bytes_per_token_in(self, block: int) -> float:
        """Bytes one token of one KV head takes in a cache with blocks of ``block`` tokens, beyond
        the windows; tables not included."""
        return float(self.code.bytes_per_token(self.width))

    @property
    def bytes_per_token(self) -> float:
        """:meth:`bytes_per_token_in` the default blocks of 64."""
        return self.bytes_per_token_in(64)

    def arrays(self) -> list[mx.array]:
        """Tables and transforms: what the codec itself holds."""
        held = [self.code.table]
        if self.transform is not None:
            held += self.transform.arrays()  # type: ignore[attr-defined]
        return held

    @property
    def nbytes(self) -> int:
        """Bytes of :meth:`arrays`, shared by all caches of the codec."""
        return sum(a.nbytes for a in self.arrays())

    @property
    def fingerprint(self) -> str:
        """Identifies the codec in saved states: equal for codecs that decode alike."""
        cached = self.__dict__.get("_fingerprint")
        if cached is None:
            digest = hashlib.sha256(f"{self.name} {self.width} {self.code.stride}".encode())
            for a in self.arrays():
                digest.update(f"{a.shape}{a.dtype}".encode())
                digest.update(bytes(memoryview(a.astype(mx.float32))))
            cached = f"{self.name}:{digest.hexdigest()[:16]}"
            self.__dict__["_fingerprint"] = cached
        return cached

    def __deepcopy__(self, memo: dict) -> Codec:
        return self
