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
    """

    name: str
    width: int
    heads: int | None
    code: TableCode
    transform: Transform | None

    def encode(self, x: mx.array, *, use_metal_kernels: bool | None = None) -> CodedArrays:
        """Code vectors ``[B, H, S, D]``. Every token is coded by itself: any split of S gives the
        same bits."""
        raise NotImplementedError

    def empty(self, batch: int, heads: int) -> CodedArrays:
        """What :meth:`encode` gives for no tokens."""
        return {
            "codes": mx.zeros((batch, heads, 0, self.code.bytes_per_token(self.width)), mx.uint8)
        }

    def body(self, arrays: CodedArrays) -> CodedBody:
        """Coded arrays as attention reads them."""
        return CodedBody(code=self.code, transform=self.transform, **arrays)

    def decode(self, arrays: CodedArrays, block: int = 64) -> mx.array:
        """Coded arrays back to vectors ``[B, H, S, D]``, float32."""
        x = reference.decode(
            arrays["codes"],
            self.code.table,
            self.code.stride,
            block,
            arrays.get("scales"),
            arrays.get("centres"),
            arrays.get("centre_scales"),
        )
        x = x[..., : self.width]
        return x if self.transform is None else self.transform.inverse(x)

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token of one KV head takes, beyond the windows; tables not included."""
        return float(self.code.bytes_per_token(self.width))

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
