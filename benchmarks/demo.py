"""SmolLM2-135M with mlx_lm's KV cache and with compressed ones: texts, speed, bytes, quality.

`make demo` runs this; on two CPU cores it takes about three minutes. The first run downloads the
model (93 MB) and calibrates the codecs on a text that the package ships; later runs reuse both.
Cache sizes are the bytes of all arrays that a cache object holds, spare capacity included.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before anything imports NumPy, for numpy_blas.py: threads that wait for each other by spinning
# make small products 20 times slower when another program wants the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from cache_bytes import MakeCache, fill, held_bytes, random_codecs
from numpy_blas import use_numpy, worthwhile
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vqkv_ext import __version__, info
from vqkv_ext.adapters.calibrate import collect, fit_layers
from vqkv_ext.adapters.gguf import chat_prompt, load_gguf
from vqkv_ext.adapters.mlx_lm import make_prompt_cache, model_shape
from vqkv_ext.codecs import Calibration, vecinfer
from vqkv_ext.codecs.calibration import ModelShape
from vqkv_ext.evaluation import Quality, calibration_text, compare, stock_cache
from vqkv_ext.plotting import plot_cache_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from fetch_smollm2 import cache_dir, fetch

PRESETS = sorted(vecinfer.PRESETS, reverse=True)  # the largest first
LENGTHS = (256, 512, 1024, 2048, 4096, 6144, 8192)
CHUNK = 64  # tokens per forward pass, and so how often a bar moves
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
    iterations: int = 20
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


@contextmanager
def stage(console: Console, what: str) -> Iterator[Progress]:
    """Bars for one part of the demo, and a line with its time once it is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    began = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield bars
    console.print(f"[dim]{what}: {time.perf_counter() - began:.1f} s[/dim]")


def load(path: str | None, console: Console) -> tuple[nn.Module, Any, str]:
    """Model, tokenizer and a name for files."""
    if path is None:
        with console.status("fetching SmolLM2-135M-Instruct (93 MB, once)"):
            path = str(fetch())
    with console.status(f"loading {path}"):
        if path.endswith(".gguf"):
            # 16-bit parameters make 16-bit keys and values, the usual cache. MLX's CPU multiplies
            # quantised weights of 16 bits 60 times slower than expanded ones; GPUs do not.
            on_cpu = mx.default_device().type == mx.DeviceType.cpu
            model, tokenizer = load_gguf(path, dtype=mx.float16, dequantize=on_cpu)
        else:
            model, tokenizer = mlx_lm.load(path)[:2]
    if worthwhile():
        use_numpy(model)
        console.print(
            "[dim]This machine has no GPU for MLX: to save minutes the model multiplies its dense "
            "weights by NumPy. Caches and attention are MLX.[/dim]"
        )
    return model, tokenizer, Path(path).name.removesuffix(".gguf")


def cache_dtype(model: nn.Module) -> str:
    """Type of the model's keys and values, read off its own cache after one token."""
    cache = stock_cache(model)
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    return str(cache[0].keys.dtype).removeprefix("mlx.core.")


def calibrations(
    model: nn.Module, tokenizer: Any, presets: Sequence[str], sizes: Sizes, name: str, folder: Path,
    console: Console,
) -> dict[str, Calibration]:  # fmt: skip
    """One per preset, from an earlier run where there is one; all share one pass over the text."""
    shape = model_shape(model)
    ids = tokenizer.encode(calibration_text())[: sizes.calibration]
    key = f"{len(ids)}t-{sizes.iterations}i-{__version__}.safetensors"
    fitted, missing = {}, []
    for preset in presets:
        path = folder / f"{name}-{preset}-{key}"
        try:
            fitted[preset] = Calibration.load(path)
            fitted[preset].check(shape)
            console.print(f"[dim]{preset}: calibration of an earlier run[/dim]")
        except (FileNotFoundError, ValueError):  # none, or not of this version or model
            missing.append((preset, path))
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with stage(console, f"calibrated on {len(ids)} tokens") as bars:
            task = bars.add_task("reading the calibration text", total=len(ids))
            read = collect(
                model, ids, chunk=CHUNK, progress=lambda n, _: bars.update(task, completed=n)
            )
            for preset, path in missing:
                task = bars.add_task(f"fitting {preset}, layers", total=shape.layers)
                fitted[preset] = fit_layers(
                    shape,
                    read,
                    preset,
                    iterations=sizes.iterations,
                    progress=lambda n, _, task=task: bars.update(task, completed=n),
                )
                fitted[preset].save(path)
    return {preset: fitted[preset] for preset in presets}


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


def show_answers(
    model: nn.Module, tokenizer: Any, caches: dict[str, MakeCache], sizes: Sizes, console: Console
) -> dict[str, Generated]:
    """A question about a short text, answered with each cache."""
    prompt = chat_prompt(tokenizer, QUESTION)
    with stage(console, f"answered a question of {len(prompt)} tokens") as bars:
        found = {
            name: generate(model, tokenizer, make(), prompt, sizes.answer, bars, name)
            for name, make in caches.items()
        }
    table = Table(
        title=f"Question: {QUESTION.splitlines()[0]}",
        caption="so short a text is mostly within the windows that stay uncompressed",
        show_lines=True,
    )
    table.add_column("cache")
    table.add_column("answer", ratio=1)
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


def run_continuation(
    model: nn.Module, tokenizer: Any, caches: dict[str, MakeCache], plain: str, sizes: Sizes,
    console: Console,
) -> tuple[dict[str, Generated], dict[str, Quality]]:  # fmt: skip
    """Run a text through all caches side by side, then let each continue from where it stands."""
    text = (ROOT / "benchmarks" / "texts" / "electronic_texts.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)[: sizes.tokens]
    kept: dict[str, list[Any]] = {}

    def keep(name: str) -> MakeCache:
        def make() -> list[Any]:
            kept[name] = caches[name]()
            return kept[name]

        return make

    with stage(console, f"compared over {len(ids)} tokens of benchmarks/texts") as bars:
        task = bars.add_task(f"the same text through {len(caches)} caches", total=len(ids))
        quality = compare(
            model,
            ids[:-1],  # the last one starts the continuation
            {name: keep(name) for name in caches if name != plain},
            chunk=CHUNK,
            reference=keep(plain),
            progress=lambda done, _: bars.update(task, completed=done),
        )
    with stage(console, f"continued it by {sizes.answer} tokens") as bars:
        found = {
            name: generate(model, tokenizer, kept[name], ids[-1:], sizes.answer, bars, name)
            for name in caches
        }
    return found, quality


def show_continuation(
    found: dict[str, Generated], quality: dict[str, Quality], slopes: dict[str, float], plain: str,
    fitted: dict[str, Calibration], console: Console,
) -> None:  # fmt: skip
    """The texts, and what they cost."""
    texts = Table(title="Continuations", show_lines=True)
    texts.add_column("cache")
    texts.add_column("text", ratio=1)
    for name, g in found.items():
        texts.add_row(name, escape(g.text))
    console.print(texts)

    table = Table(
        title=f"The caches after it, {found[plain].context} tokens, and agreement with {plain}",
        caption="bytes: all arrays held, spare capacity included; KL in nats per token",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("cache", no_wrap=True)
    for column in ("tokens/s", "bytes", "bytes per\nnext token", "KL", "top-1", "ΔPPL"):
        table.add_column(column, justify="right", no_wrap=True)
    base = found[plain].cache_bytes
    for name, g in found.items():
        judged = ("-", "-", "-")
        if (q := quality.get(name)) is not None:
            judged = (f"{q.kl:.4f}", f"{100 * q.top1:.1f} %", f"{q.delta_ppl:+.1f} %")
        table.add_row(
            name,
            f"{g.tokens_per_second:.1f}",
            f"{g.cache_bytes:,}\n1/{base / g.cache_bytes:.1f}",
            f"{slopes[name]:,.0f}\n1/{slopes[plain] / slopes[name]:.1f}",
            *judged,
        )
    console.print(table)
    for name, c in fitted.items():
        held = sum(x.key.nbytes + x.value.nbytes for x in c.layers)
        console.print(f"[dim]codecs of {name}: {held:,} bytes, shared by all its caches[/dim]")


def measure_bytes(
    caches: dict[str, MakeCache], shape: ModelShape, dtype: mx.Dtype, console: Console
) -> dict[str, list[int]]:
    """Bytes of each cache at each of ``LENGTHS``."""
    with stage(console, f"filled caches with up to {LENGTHS[-1]} random tokens") as bars:
        sizes = {}
        for name, make in caches.items():
            task = bars.add_task(f"{name}, tokens", total=LENGTHS[-1])
            sizes[name] = fill(
                make(), shape, dtype, LENGTHS,
                progress=lambda n, task=task: bars.update(task, completed=n),
            )  # fmt: skip
    return sizes


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
    presets = PRESETS if args.all else PRESETS[:2]
    plain = f"{dtype} (mlx-lm)"
    quantized = {f"mlx-lm kv_bits={b}": lambda b=b: stock_cache(model, b) for b in (8, 4)}

    made = {plain: lambda: stock_cache(model), **quantized}
    made |= {p: random_codecs(p, shape) for p in PRESETS}
    measured = measure_bytes(made, shape, getattr(mx, dtype), console)
    # Beyond the windows a cache grows evenly, by whole allocations at these two lengths.
    half = LENGTHS.index(LENGTHS[-1] // 2)
    slopes = {n: (s[-1] - s[half]) / (LENGTHS[-1] - LENGTHS[half]) for n, s in measured.items()}

    fitted = calibrations(model, tokenizer, presets, sizes, name, args.folder, console)
    caches: dict[str, MakeCache] = {plain: made[plain]}
    if args.all:
        caches["mlx-lm kv_bits=4"] = quantized["mlx-lm kv_bits=4"]
    caches |= {p: lambda c=c: make_prompt_cache(model, c) for p, c in fitted.items()}
    answers = show_answers(model, tokenizer, caches, sizes, console)
    found, quality = run_continuation(model, tokenizer, caches, plain, sizes, console)
    show_continuation(found, quality, slopes, plain, fitted, console)

    lines = {n: (LENGTHS, s) for n, s in measured.items()}
    picture = plot_cache_bytes(lines, args.output / "cache_bytes.png")
    seconds = time.perf_counter() - began
    console.print(f"picture: {picture}\ndone in {seconds:.0f} s")
    return {
        "info": info(),
        "model": name,
        "dtype": dtype,
        "sizes": asdict(sizes),
        "answers": {n: asdict(g) for n, g in answers.items()},
        "continuations": {n: asdict(g) for n, g in found.items()},
        "quality": {n: q.to_dict() for n, q in quality.items()},
        "bytes_per_further_token": slopes,
        "bytes": {"lengths": LENGTHS, **measured},
        "seconds": seconds,
    }


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Sizes]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file or an mlx_lm model (default: SmolLM2-135M)")
    parser.add_argument("--all", action="store_true", help="every preset, and mlx-lm's 4 bits")
    parser.add_argument("--quick", action="store_true", help="less of everything; worse codecs")
    parser.add_argument("--tokens", type=int, metavar="N", help="of the text that is continued")
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
        results = run(args, sizes, Console())
    except RuntimeError as error:  # no network, no such model
        print(error, file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
