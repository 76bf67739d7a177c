"""Write docs/architectures.md: what is compressed of every architecture of the installed mlx_lm.

Each model is built tiny with random weights and tried out, as ``make_prompt_cache`` does it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections import Counter
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.progress import track

from vqkv_ext.adapters.layers import CacheSlot, cache_slots, summary
from vqkv_ext.adapters.mlx_lm import disable_attention

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "docs" / "architectures.md"
sys.path.insert(0, str(ROOT / "tests"))
import architectures  # noqa: E402

TEXT = """\
# Architectures

All {n} model files of mlx_lm {version}: {counts}.
Written by `python tools/architecture_table.py`; do not edit.

Every model is built with a few small layers and random weights, and tried out as
`make_prompt_cache` does it: a few tokens run through it with probes in place of every `KVCache`,
and what the layers do with the keys and values they get back decides.
`tests/test_architectures.py` then compares logits with those of mlx_lm's own caches. Layers are
those of the tiny model; a real one has more of the same kinds.

- **compressed**: every cache is.
- **partly**: the others stay mlx_lm's own. Sliding windows, chunks and recurrent states do not
  grow with the text. A `KVCache` that stays does, and `make_prompt_cache` logs a warning.
- **declined**: `make_prompt_cache` raises `ValueError` with this reason.

Layers that read another layer's cache (afm7, gemma3n, gemma4, hunyuan, iquestloopcoder) read its
codes. In afm7 and gemma3n they ask for them once the chunk is stored: all its queries then read as
codes what the last one does. Logits within a prompt therefore depend on its chunks there; those of
its last token, and all tokens generated, do not.

`0.1` is member 1 of the `CacheList` of layer 0.

| model | outcome | caches compressed | the others, and why |
|---|---|---|---|
{rows}
"""
OUTCOMES = ("compressed", "partly", "declined")


def outcome(slots: list[CacheSlot] | ValueError) -> str:
    """One of :data:`OUTCOMES`: all caches are compressed, some, or the model is refused."""
    if isinstance(slots, ValueError):
        return "declined"
    return "partly" if any(slot.reason for slot in slots) else "compressed"


def row(name: str, slots: list[CacheSlot] | ValueError) -> str:
    """The line of a model."""
    if isinstance(slots, ValueError):
        rest = str(slots).partition(f"] {name} ")[2].removesuffix(".")
        served, rest = "none", rest.partition("can be compressed, but got ")[2] or rest
    else:
        count = sum(slot.reason is None for slot in slots)
        served, rest = f"{count} of {len(slots)}", summary(slots)
    return f"| {name} | {outcome(slots)} | {served} | {rest} |"


def counts(found: dict[str, list[CacheSlot] | ValueError]) -> str:
    """``N compressed, M partly, K declined``."""
    n = Counter(outcome(slots) for slots in found.values())
    return ", ".join(f"{n[o]} {o}" for o in OUTCOMES)


def document(found: dict[str, list[CacheSlot] | ValueError]) -> str:
    """The file."""
    rows = "\n".join(row(name, slots) for name, slots in found.items())
    version = importlib.metadata.version("mlx-lm")
    return TEXT.format(n=len(found), version=version, counts=counts(found), rows=rows)


def find(name: str) -> list[CacheSlot] | ValueError:
    """What ``make_prompt_cache`` finds out about a tiny model."""
    model = architectures.build(name)
    try:
        return cache_slots(model)
    except ValueError as error:
        return error
    finally:
        disable_attention(model)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    mx.disable_compile()
    console = Console()
    names = architectures.names()
    found = {n: find(n) for n in track(names, "trying out", console=console)}
    PATH.write_text(document(found))
    console.print(f"{PATH.relative_to(ROOT)}: {counts(found)}")


if __name__ == "__main__":
    main()
