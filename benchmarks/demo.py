"""SmolLM2-135M with mlx_lm's KV cache and with compressed ones: texts, speed, bytes, quality.

`make demo` runs this; on two CPU cores it takes about five minutes, later three: the first run
downloads the model (93 MB) and calibrates VecInfer on a text that the package ships. A few caches
write texts; then one table judges every preset, in float32 (quality.py). Cache sizes are the bytes
of all arrays that a cache object holds, spare capacity included.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before anything imports NumPy, for numpy_blas.py: threads that wait for each other by spinning
# make small products 20 times slower when another program wants the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from cache_bytes import MakeCache, held_bytes, per_token
from quality import PRESETS, compressed, count_bytes, judge, suitable, to_json
from report import make_console
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from smollm2 import CHUNK, calibrations, load
from stages import stage

from vqkv_ext import info
from vqkv_ext.adapters import calibrate
from vqkv_ext.adapters.gguf import chat_prompt
from vqkv_ext.adapters.mlx_lm import model_shape
from vqkv_ext.evaluation import stock_cache
from vqkv_ext.plotting import plot_cache_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from fetch_smollm2 import cache_dir

WRITING = ("centred-4bit", "centred-2bit", "vecinfer-2bit")  # besides mlx_lm's own cache
DRAWN = ("mlx-lm kv_bits=8", "mlx-lm kv_bits=4", *WRITING, "vecinfer-1bit")
LENGTHS = (256, 512, 1024, 2048, 4096, 6144, 8192)
# Longer than the windows that stay uncompressed, with facts at its beginning.
QUESTION = """\
Summarize this text in two sentences.

The town library closed in 1931. Its last librarian, Ada Finch, moved the oldest books to a room \
above the bakery, where the ovens kept the paper dry. For sixteen years children came up the back \
stairs on Saturday mornings, bought a warm roll for a penny, and read until noon. When the new \
library opened in 1947, the baker refused to give back one book, a history of bread that he had by \
then almost learned by heart. The town council voted to let him keep it, and it is still on a \
shelf behind the counter."""


@dataclass(frozen=True)
class Sizes:
    """How much the demo does: tokens, and rounds of k-means."""

    calibration: int = 2048
    iterations: int = 12
    tokens: int = 512
    answer: int = 48


QUICK = Sizes(calibration=512, iterations=8, tokens=256, answer=16)


@dataclass(frozen=True)
class Generated:
    """What a model wrote with one cache, and the cache afterwards."""

    text: str
    tokens_per_second: float
    context: int
    coded_tokens: int
    cache_bytes: int


def cache_dtype(model: nn.Module) -> str:
    """Type of the model's keys and values, read off its own cache after one token."""
    cache = stock_cache(model)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    return str(cache[0].keys.dtype).removeprefix("mlx.core.")


def generate(
    model: nn.Module, tokenizer: Any, cache: list[Any], prompt: Sequence[int], tokens: int,
    bars: Progress, name: str,
) -> Generated:  # fmt: skip
    """Greedy text after a prompt, of at most ``tokens`` tokens."""
    task = bars.add_task(f"{name}: prompt", total=len(prompt))
    text, response = "", None
    for response in mlx_lm.stream_generate(
        model,
        tokenizer,
        list(prompt),
        max_tokens=tokens,
        prompt_cache=cache,
        prefill_step_size=CHUNK,
        prompt_progress_callback=lambda done, total: bars.update(task, completed=done),
    ):
        text += response.text
        bars.update(
            task,
            description=f"{name}: answer",
            completed=response.generation_tokens,
            total=tokens,
        )
    assert response is not None
    mx.eval([c.state for c in cache])
    return Generated(
        text.strip(),
        response.generation_tps,
        cache[0].offset,
        getattr(cache[0], "coded_tokens", 0),
        held_bytes(cache),
    )


def write(
    model: nn.Module, tokenizer: Any, caches: dict[str, MakeCache], prompt: Sequence[int],
    sizes: Sizes, title: str, caption: str, console: Console,
) -> dict[str, Generated]:  # fmt: skip
    """What the model writes after a prompt with each cache, as a table."""
    with stage(console, f"{title}: {len(prompt)} tokens and {sizes.answer} new ones") as bars:
        found = {
            name: generate(model, tokenizer, make(), prompt, sizes.answer, bars, name)
            for name, make in caches.items()
        }
    table = Table(title=title, caption=caption, show_lines=True)
    table.add_column("cache")
    table.add_column("text", ratio=1)
    for column in ("tokens/s", "tokens,\ncoded", "bytes"):
        table.add_column(column, justify="right")
    for name, g in found.items():
        table.add_row(
            name,
            escape(g.text),
            f"{g.tokens_per_second:.1f}",
            f"{g.context}\n{g.coded_tokens}",
            f"{g.cache_bytes:,}",
        )
    console.print(table)
    return found


def run(args: argparse.Namespace, sizes: Sizes, console: Console) -> dict[str, Any]:
    """The whole demo; returns what ``--json`` writes."""
    began = time.perf_counter()
    model, tokenizer, name = load(args.model, console)
    shape, dtype = model_shape(model), cache_dtype(model)
    console.print(
        f"[bold]{escape(name)}[/bold]: {shape.layers} layers, {shape.kv_heads} KV heads of "
        f"{shape.key_dim}, on {info()['executor']}; keys, values and the uncompressed parts of all "
        f"caches are [bold]{dtype}[/bold]"
    )
    names, refused = suitable(PRESETS, shape)
    fitted = calibrations(
        model, tokenizer, [n for n in names if n in calibrate.PRESETS], sizes.calibration,
        sizes.iterations, name, args.folder, console,
    )  # fmt: skip
    plain = f"{dtype} (mlx-lm)"
    caches = {plain: partial(stock_cache, model), **compressed(model, names, fitted)}
    text = (ROOT / "benchmarks" / "texts" / "electronic_texts.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)[: sizes.tokens]
    counted = count_bytes(caches, shape, getattr(mx, dtype), (len(ids),), console)
    measured = count_bytes(caches, shape, getattr(mx, dtype), LENGTHS, console)
    slopes = {n: per_token(LENGTHS, s) for n, s in measured.items()}

    writing = {n: caches[n] for n in (plain, *WRITING) if n in caches}
    answers = write(
        model, tokenizer, writing, chat_prompt(tokenizer, QUESTION), sizes,
        f"Question: {QUESTION.splitlines()[0]}",
        "so short a text is mostly within the windows that stay uncompressed", console,
    )  # fmt: skip
    continued = write(
        model, tokenizer, writing, ids, sizes, "Continuation of benchmarks/texts",
        "close texts say little of quality; the next table measures it", console,
    )  # fmt: skip
    # MLX's CPU multiplies mlx-lm's quantised caches 40 times slower in 16 bits than in 32.
    model.set_dtype(mx.float32)
    quality = judge(
        f"All caches, computing in float32 (bytes: {dtype})", model, ids, caches,
        {n: s[0] for n, s in counted.items()}, slopes, refused, console,
    )  # fmt: skip

    lines = {n: (LENGTHS, measured[n]) for n in (plain, *DRAWN) if n in measured}
    picture = plot_cache_bytes(lines, args.output / "cache_bytes.png")
    seconds = time.perf_counter() - began
    console.print(f"picture: {picture}\ndone in {seconds:.0f} s")
    return {
        "info": info(),
        "model": name,
        "dtype": dtype,
        "sizes": asdict(sizes),
        "answers": {n: asdict(g) for n, g in answers.items()},
        "continuations": {n: asdict(g) for n, g in continued.items()},
        "quality": to_json(quality),
        "left_out": refused,
        "bytes_per_further_token": slopes,
        "bytes": {"lengths": LENGTHS, **measured},
        "seconds": seconds,
    }


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Sizes]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file or an mlx_lm model (default: SmolLM2-135M)")
    parser.add_argument("--quick", action="store_true", help="less of everything; worse VecInfer")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="of the text that caches are judged by"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    args = parser.parse_args(argv)
    sizes = asdict(QUICK if args.quick else Sizes())
    if args.tokens is not None:
        if args.tokens < 3:
            parser.error(f"--tokens must be at least 3, but got {args.tokens}")
        sizes["tokens"] = args.tokens
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json must be in an existing folder, but got {args.json}")
    args.folder, args.output = cache_dir(), ROOT / "demo_output"
    return args, Sizes(**sizes)


def main() -> int:
    args, sizes = parse()
    try:
        results = run(args, sizes, make_console())
    except RuntimeError as error:  # no network, no such model
        print(error, file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
