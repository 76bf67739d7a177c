"""What attention over compressed caches must reach against the other ways, on an H200."""

from __future__ import annotations

from collections.abc import Sequence

from report import Row, Target

PRODUCT, TWO, FOUR = "vecinfer-2bit", "centred-2bit", "centred-4bit"
# Times as fast as mx.fast on dense float16.
OVER_MLX: dict[str, dict[str, float]] = {
    "32/8x128:131072": {PRODUCT: 1.8, TWO: 1.8, FOUR: 1.6},
    "32/8x128:32768": {PRODUCT: 1.3, TWO: 1.3, FOUR: 1.2},
    "32/8x128:4096": dict.fromkeys((PRODUCT, TWO, FOUR), 0.9),
    "16/4x256:131072": dict.fromkeys((PRODUCT, TWO, FOUR), 6.0),
    "9/3x64:131072": dict.fromkeys((PRODUCT, TWO, FOUR), 1.2),
    "8x32/8x128:32768": {PRODUCT: 1.8, TWO: 1.8, FOUR: 1.6},
    "32/8x128:2048x32768": dict.fromkeys((PRODUCT, TWO, FOUR), 1 / 1.5),
}
# Times as fast as mlx-lm's 4-bit cache.
OVER_MLX_LM: dict[str, dict[str, float]] = {
    "32/8x128:131072": dict.fromkeys((PRODUCT, TWO, FOUR), 8.0),
}


def targets(rows: Sequence[Row]) -> list[Target]:
    """Each target with what was found; those of shapes not in the rows are not measured."""
    measured = {(row["case"], row["preset"]): row for row in rows}
    found = []
    for other, key, bounds in (
        ("mx.fast", "mlx_us", OVER_MLX),
        ("mlx-lm 4 bit", "mlx_lm_4bit_us", OVER_MLX_LM),
    ):
        for case, presets in bounds.items():
            for preset, least in presets.items():
                row = measured.get((case, preset))
                ratio = None if row is None or row[key] is None else row[key] / row["ours_us"]
                found.append(Target(f"{case}, {preset}, speed over {other}", ratio, least))
    return found
