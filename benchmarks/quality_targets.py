"""How near to the uncompressed cache the presets that need no calibration must stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PRESETS = ("trellis-4bit", "trellis-3bit", "trellis-2bit", "trellis-1bit")
# Most KL in nats per token, or most multiples of mlx-lm's 4 bits, by text and tokens.
KL: dict[tuple[str, int], Sequence[float]] = {
    ("persuasion", 1024): (0.0010, 0.0042, 0.0155, 0.075),
    ("persuasion", 3072): (0.0016, 0.0055, 0.025, 0.155),
}
MULTIPLE: dict[tuple[str, int], Sequence[float]] = {
    ("electronic_texts", 1024): (0.009, 0.036, 0.135, 0.65),
    ("electronic_texts", 3072): (0.016, 0.055, 0.25, 1.55),
}


def verdicts(text: str, tokens: int, quality: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each target of a text that was measured."""
    for field, unit, bounds in (("kl", "nats", KL), ("multiple", "of kv_bits=4", MULTIPLE)):
        for preset, most in zip(PRESETS, bounds.get((text, tokens), ()), strict=False):
            if preset in quality:
                found = quality[preset][field]
                met = "met" if found <= most else "MISSED"
                what = f"{preset}, {text}, {tokens} tokens"
                yield f"{what}: {found:.5f} {unit}, at most {most:g}: {met}"
