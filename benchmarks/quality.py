"""How much each preset changes SmolLM2-135M's predictions, and how many bytes it takes.

A text goes through the model in chunks, once with mlx_lm's own cache and once with each compressed
one, and the distributions over the next token are compared (`vqkv_ext.evaluation`). KL and top-1 in
the README and in docs/quality.md are what this prints. A long run can be divided: `--from-json`
draws what several wrote.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Before anything imports NumPy, for numpy_blas.py: threads that wait for each other by spinning
# make small products 20 times slower when another program wants the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mlx.core as mx
import mlx.nn as nn
from cache_bytes import MakeCache, fill, per_token
from quality_targets import verdicts
from report import COLORS, MARKERS, make_console
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from smollm2 import CHUNK, calibrations, load
from stages import stage

from vqkv_ext import info
from vqkv_ext.adapters import calibrate
from vqkv_ext.adapters.mlx_lm import make_prompt_cache, model_shape
from vqkv_ext.codecs import Calibration, presets, query_aware, vecinfer
from vqkv_ext.codecs.calibration import ModelShape
from vqkv_ext.evaluation import LATE, Quality, compare, quantized_caches, stock_cache

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from fetch_smollm2 import cache_dir

PRESETS = (*presets.PRESETS, *calibrate.PRESETS)
YARDSTICK = "mlx-lm kv_bits=4"
GROWTH = (4096, 8192)  # tokens between which the growth of caches is counted
TEXTS = [ROOT / "benchmarks" / "texts" / f"{n}.txt" for n in ("persuasion", "electronic_texts")]


def suitable(names: Sequence[str], shape: ModelShape) -> tuple[list[str], dict[str, str]]:
    """The presets that take the model's head dimensions, and why the others do not."""
    taken, refused = [], {}
    for name in names:
        try:
            if name in vecinfer.PRESETS:
                vecinfer.check_width(vecinfer.PRESETS[name], shape.key_dim, shape.value_dim)
            elif name in query_aware.PRESETS:
                query_aware.check_width(name, shape.key_dim)
            else:
                presets.codec(name, shape.key_dim, "key")
                presets.codec(name, shape.value_dim, "value")
            taken.append(name)
        except ValueError as error:
            refused[name] = str(error)
    return taken, refused


def compressed(
    model: nn.Module, names: Sequence[str], fitted: Mapping[str, Calibration]
) -> dict[str, MakeCache]:
    """Makes mlx_lm's quantised caches and those of the presets."""
    return quantized_caches(model) | {
        n: partial(make_prompt_cache, model, fitted.get(n, n)) for n in names
    }


def kinds(cache: Sequence[Any]) -> dict[Any, list[Any]]:
    """The caches of a model's layers, those that grow alike together."""
    found: dict[Any, list[Any]] = {}
    for layer in cache:
        found.setdefault(getattr(layer, "fingerprint", None), []).append(layer)
    return found


def count_bytes(
    caches: Mapping[str, MakeCache], shape: ModelShape, dtype: mx.Dtype, lengths: Sequence[int],
    console: Console,
) -> dict[str, list[int]]:  # fmt: skip
    """Bytes of each cache at each of the lengths. Of layers that are alike one is filled."""
    with stage(console, f"filled caches with up to {lengths[-1]} random tokens") as bars:
        task = bars.add_task("caches", total=len(caches))
        sizes = {}
        for name, make in caches.items():
            parts = [
                [len(alike) * size for size in fill(alike[:1], shape, dtype, lengths)]
                for alike in kinds(make()).values()
            ]
            sizes[name] = [sum(each) for each in zip(*parts, strict=True)]
            bars.advance(task)
    return sizes


def multiple(quality: Mapping[str, Quality], name: str) -> float:
    """KL as a multiple of that of mlx_lm's 4 bits, which says more than KL from text to text."""
    return quality[name].kl / quality[YARDSTICK].kl


def judge(
    title: str, model: nn.Module, ids: Sequence[int], caches: Mapping[str, MakeCache],
    sizes: Mapping[str, int], slopes: Mapping[str, float], refused: Mapping[str, str],
    console: Console,
) -> dict[str, Quality]:  # fmt: skip
    """Compare all caches with the first and print a row for each, the largest first.

    Args:
        title: Names the text.
        model: From ``smollm2.load``.
        ids: The tokens of the text.
        caches: The first is mlx_lm's own.
        sizes: Their bytes after the text.
        slopes: Bytes that one more token takes.
        refused: Presets left out, and why.
        console: Where to print.
    """
    plain = next(iter(caches))
    title = f"{title}: {len(ids)} tokens in chunks of {CHUNK}"
    with stage(console, title) as bars:
        task = bars.add_task(f"the same text through {len(caches)} caches", total=len(ids))
        quality = compare(
            model, ids, {n: make for n, make in caches.items() if n != plain},
            chunk=CHUNK, reference=caches[plain],
            progress=lambda n, _: bars.update(task, completed=n),
        )  # fmt: skip
    table = Table(
        title=title,
        caption="bytes: all arrays held, spare capacity included; KL in nats per token, and as a "
        f"multiple of that of {YARDSTICK}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("cache", no_wrap=True)
    late = f"KL from\n{LATE} on"
    for column in ("bytes", "each further\ntoken", "", "KL", late, "multiple", "top-1", "ΔPPL"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in sorted(caches, key=lambda n: (-slopes[n], n != plain, -sizes[n])):
        judged = ("-",) * 5
        if (q := quality.get(name)) is not None:
            judged = (
                f"{q.kl:.5f}",
                f"{q.kl_late:.5f}",
                f"{multiple(quality, name):.3f}",
                f"{100 * q.top1:.1f} %",
                f"{q.delta_ppl:+.1f} %",
            )
        table.add_row(
            name,
            f"{sizes[name]:,}",
            f"{slopes[name]:,.0f}",
            f"1/{slopes[plain] / slopes[name]:.1f}",
            *judged,
        )
    console.print(table)
    for name, why in refused.items():
        console.print(f"{name} is left out: {escape(why)}")
    return quality


def to_json(quality: Mapping[str, Quality]) -> dict[str, Any]:
    return {n: {**q.to_dict(), "multiple": multiple(quality, n)} for n, q in quality.items()}


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Evaluate and print; returns what ``--json`` writes."""
    model, tokenizer, name = load(args.model, console, getattr(mx, args.dtype))
    shape = model_shape(model)
    names, refused = suitable(args.presets, shape)
    fitted = calibrations(
        model, tokenizer, [n for n in names if n in calibrate.PRESETS], args.calibration,
        args.iterations, f"{name}-{args.dtype}", args.folder, console,
    )  # fmt: skip
    for path in args.files:
        fitted[path.stem] = Calibration.load(path)
        names.append(path.stem)
    # Bytes are those of a cache in use, whatever type this evaluation computes in.
    caches = {"float16 (mlx-lm)": partial(stock_cache, model), **compressed(model, names, fitted)}
    sizes = count_bytes(caches, shape, mx.float16, (args.tokens,), console)
    long = count_bytes(caches, shape, mx.float16, GROWTH, console)
    slopes = {n: per_token(GROWTH, s) for n, s in long.items()}
    found = {}
    for path in args.texts:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))[: args.tokens]
        found[path.stem] = judge(
            f"{path.stem}, computing in {args.dtype} (bytes: float16)", model, ids, caches,
            {n: s[0] for n, s in sizes.items()}, slopes, refused, console,
        )  # fmt: skip
    return {
        "info": info(),
        "model": name,
        "dtype": args.dtype,
        "tokens": args.tokens,
        "numbers_per_token": shape.layers * shape.kv_heads * (shape.key_dim + shape.value_dim),
        "calibration": {"tokens": args.calibration, "iterations": args.iterations},
        "left_out": refused,
        "bytes_per_further_token": slopes,
        "quality": {text: to_json(quality) for text, quality in found.items()},
    }


FAMILIES = (
    "mlx-lm", "trellis", "centred", "turboquant", "turboquant-rvq", "turboquant-prod", "qjl",
    "vecinfer", "query-aware", "mixed", "mixed-query-aware",
)  # fmt: skip


def family(name: str) -> str | None:
    """The method of a cache, or None for what is not drawn."""
    found = [f for f in FAMILIES if name.startswith(f"{f}-") or name.startswith(f"{f} ")]
    return max(found, key=len, default=None)


def drawing(figure: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """KL over stored bits per number, a panel for each text of each run."""
    panels = [(run, text) for run in runs for text in run["quality"]]
    columns = min(2, len(panels))
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False, sharey=True)
    for at in axes.flat[len(panels) :]:
        at.remove()
    for at, (run, text) in zip(axes.flat, panels, strict=False):
        slopes = run["bytes_per_further_token"]
        for i, method in enumerate(FAMILIES):
            points = sorted(
                (8 * slopes[name] / run["numbers_per_token"], q["kl"])
                for name, q in run["quality"][text].items()
                if family(name) == method and q["kl"] > 0
            )
            if points:
                turn = i // len(COLORS)
                style = {
                    "color": COLORS[(i + turn) % len(COLORS)],
                    "marker": MARKERS[(i + 3 * turn) % len(MARKERS)],
                    "linestyle": ("-", "--")[turn],
                }
                at.plot(*zip(*points, strict=True), label=method, **style)
        at.set_title(f"{text}, {run['tokens']} tokens")
        at.set_yscale("log")
        at.grid(alpha=0.3, which="both")
    for at in axes[-1]:
        at.set_xlabel("stored bits per number")
    for at in axes[:, 0]:
        at.set_ylabel("KL, nats per token")
    axes[0, 0].legend()


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table with a row for each cache: stored bits per number, then KL over all positions and
    over late ones, its multiple, and top-1 for each text of each run."""
    panels = [(run, text) for run in runs for text in run["quality"]]
    head = ["cache", "bits", *(f"{text}, {run['tokens']}" for run, text in panels)]
    bits = {
        name: 8 * slope / run["numbers_per_token"]
        for run in runs
        for name, slope in run["bytes_per_further_token"].items()
        if family(name)
    }
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name in sorted(bits, key=lambda n: -bits[n]):
        cells = []
        for run, text in panels:
            q = run["quality"][text].get(name)
            late = "-" if q is None or q["kl_late"] is None else f"{q['kl_late']:.5f}"
            cells.append(
                f"{q['kl']:.5f} / {late} / {q['multiple']:.3f} / {100 * q['top1']:.0f}" if q else ""
            )
        lines.append([f"`{name}`", f"{bits[name]:.2f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = -(-sum(len(run["quality"]) for run in runs) // 2)
    figure = Figure(figsize=(11, 4.5 * rows), dpi=130, layout="constrained")
    drawing(figure, runs)
    figure.savefig(path)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", choices=PRESETS, metavar="NAME", default=PRESETS)
    parser.add_argument("--texts", nargs="+", type=Path, metavar="FILE", default=TEXTS)
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of each text")
    parser.add_argument("--model", help="a .gguf file or an mlx_lm model")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "float16", "bfloat16"],
        help="of the parameters of a .gguf model",
    )  # fmt: skip
    parser.add_argument("--calibration", type=int, default=2048, metavar="N", help="tokens")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="of k-means")
    parser.add_argument(
        "--files", nargs="+", type=Path, default=(), metavar="FILE",
        help="of `vqkv calibrate`, besides the presets",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    parser.add_argument("--targets", action="store_true", help="say which targets are met")
    parser.add_argument("--markdown", action="store_true", help="one table of all texts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (matplotlib)")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", metavar="FILE", help="use these, measure nothing"
    )
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error(f"--tokens must be at least 2, but got {args.tokens}")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name} must be in an existing folder, but got {path}")
    args.folder = cache_dir()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), make_console()
    try:
        if args.from_json:
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in args.from_json]
        else:
            runs = [run(args, console)]
    except (RuntimeError, OSError) as error:  # no network, no such model or text
        print(error, file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps(runs[0], indent=1) + "\n", encoding="utf-8")
    if args.targets:
        for r in runs:
            for text, quality in r["quality"].items():
                for line in verdicts(text, r["tokens"], quality):
                    console.print(line, soft_wrap=True, highlight=False)
    if args.markdown:
        print(markdown(runs))
    if args.plot:
        draw(runs, args.plot)
        console.print(f"wrote {args.plot}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
