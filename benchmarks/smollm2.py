"""The model that the demo and quality.py run, and VecInfer's codecs fitted to it."""
# ruff: noqa: E402

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from numpy_blas import use_numpy, worthwhile
from rich.console import Console
from rich.progress import Progress
from stages import stage

from vqkv_ext import __version__
from vqkv_ext.adapters.calibrate import collect, fit_layers, with_factors
from vqkv_ext.adapters.gguf import best_expanded, load_gguf
from vqkv_ext.adapters.mlx_lm import model_shape
from vqkv_ext.adapters.query_statistics import key_factors
from vqkv_ext.codecs import Calibration, query_aware
from vqkv_ext.evaluation import calibration_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from fetch_smollm2 import fetch

CHUNK = 64  # tokens per forward pass, and so how often a bar moves


def load(
    path: str | None, console: Console, dtype: mx.Dtype = mx.float16
) -> tuple[nn.Module, Any, str]:
    """Model, tokenizer and a name for files.

    Args:
        path: A .gguf file or what ``mlx_lm.load`` takes; None for SmolLM2-135M-Instruct.
        console: Where to say what takes time.
        dtype: Of the parameters of a .gguf file, and so of its keys and values.
    """
    if path is None:
        with console.status("fetching SmolLM2-135M-Instruct (93 MB, once)"):
            path = str(fetch())
    with console.status(f"loading {path}"):
        if path.endswith(".gguf"):
            model, tokenizer = load_gguf(path, dtype=dtype, dequantize=best_expanded())
        else:
            model, tokenizer = mlx_lm.load(path)[:2]
    if worthwhile():
        use_numpy(model)
        console.print(
            "[dim]This machine has no GPU for MLX: to save minutes the model multiplies its dense "
            "weights by NumPy. Caches and attention are MLX.[/dim]"
        )
    return model, tokenizer, Path(path).name.removesuffix(".gguf")


def calibrations(
    model: nn.Module, tokenizer: Any, presets: Sequence[str], tokens: int, iterations: int,
    name: str, folder: Path, console: Console,
) -> dict[str, Calibration]:  # fmt: skip
    """One per preset, from an earlier run where there is one; those of a method share a pass over
    the text.

    Args:
        model, tokenizer: From :func:`load`.
        presets: Those that are calibrated.
        tokens: Of the text that ships with the package.
        iterations: Rounds of k-means (VecInfer).
        name: Of the model, for files.
        folder: Of the files.
        console: Where to show progress.
    """
    shape = model_shape(model)
    ids = tokenizer.encode(calibration_text())[:tokens]
    key = f"{len(ids)}t-{iterations}i-{__version__}.safetensors"
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
            read, factors = None, None
            for preset, path in missing:
                what = f"{preset}, reading the text"
                if preset in query_aware.PRESETS:
                    if factors is None:
                        factors = key_factors(model, ids, chunk=CHUNK, progress=_bar(bars, what))
                    fitted[preset] = with_factors(shape, factors, preset, tokens=len(ids))
                else:
                    if read is None:
                        read = collect(model, ids, chunk=CHUNK, progress=_bar(bars, what))
                    fitted[preset] = fit_layers(
                        shape,
                        read,
                        preset,
                        iterations=iterations,
                        progress=_bar(bars, f"fitting {preset}, layers"),
                    )
                fitted[preset].save(path)
    return {preset: fitted[preset] for preset in presets}


def _bar(bars: Progress, what: str) -> Callable[[int, int], None]:
    task = bars.add_task(what, total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)
