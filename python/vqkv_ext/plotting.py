"""Pictures of measurements. Needs the ``plot`` extra (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe-Ito: told apart with every kind of colour vision. The first is for the baseline.
_COLORS = ("#444444", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vPX"
_MIB = 2.0**20
_STYLE = {
    "font.size": 12,
    "axes.titlesize": 15,
    "axes.labelsize": 12.5,
    "lines.linewidth": 2.2,
    "lines.markersize": 7.5,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.8,
    "legend.edgecolor": "white",
    "legend.framealpha": 0.9,
    "legend.fancybox": False,
}

Rows = Mapping[str, tuple[Sequence[int], Sequence[int]]]


def plot_cache_bytes(
    rows: Rows,
    path: str | Path,
    *,
    title: str = "KV cache memory against context length",
    log: bool = False,
) -> Path:
    """Draw the bytes of several caches against the context length and save a PNG.

    Args:
        rows: for each cache its measured points: context lengths in tokens and bytes held, two
            sequences of equal length. Colours follow the order of the caches.
        path: the PNG file to write; missing folders are made.
        title: heading of the picture.
        log: powers of two on both axes instead of linear ones.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing to draw, or sequences that do not pair up.
    """
    if not rows:
        raise ValueError("[plot_cache_bytes] rows must hold at least one cache, but got none")
    for name, (lengths, sizes) in rows.items():
        if len(lengths) != len(sizes) or not lengths:
            raise ValueError(
                f"[plot_cache_bytes] {name!r} must have one size for each length, but got "
                f"{len(lengths)} lengths and {len(sizes)} sizes"
            )
        if log and min(*lengths, *sizes) <= 0:
            raise ValueError(
                f"[plot_cache_bytes] {name!r} must be positive on log axes, but got "
                f"{min(*lengths, *sizes)}"
            )
    matplotlib, figure_type = _matplotlib()
    with matplotlib.rc_context(_STYLE):
        figure = figure_type(figsize=(8.4, 4.8), dpi=160, layout="constrained", facecolor="white")
        _draw(figure.add_subplot(), rows, title, log)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    return path


def plot_quality(
    points: Mapping[str, tuple[int, float]],
    path: str | Path,
    *,
    title: str = "Divergence against KV cache memory",
) -> Path:
    """Draw how far the predictions of several caches are from the uncompressed ones, over their
    bytes, and save a PNG.

    Args:
        points: for each cache the bytes held and the mean KL divergence in nats per token. A KL of
            zero or less has no place on the logarithmic axis and is drawn at its lower end.
        path: the PNG file to write; missing folders are made.
        title: heading of the picture.

    Returns:
        ``path``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing to draw.
    """
    if not points:
        raise ValueError("[plot_quality] points must hold at least one cache, but got none")
    matplotlib, figure_type = _matplotlib()
    least = min((kl for _, kl in points.values() if kl > 0), default=1e-6)
    with matplotlib.rc_context(_STYLE):
        figure = figure_type(figsize=(8.4, 4.8), dpi=160, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for index, (name, (size, kl)) in enumerate(points.items()):
            axes.plot(
                [size / _MIB],
                [max(kl, least / 2)],
                label=name,
                linestyle="none",
                color=_COLORS[index % len(_COLORS)],
                marker=_MARKERS[index // len(_COLORS) % len(_MARKERS)],
            )
        axes.set_title(title, loc="left", fontweight="bold", pad=12)
        axes.set_xlabel("Cache size (MiB)")
        axes.set_ylabel("KL divergence (nats per token)")
        axes.set_yscale("log")
        axes.set_xlim(left=0)
        axes.grid(True, color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    return path


def _draw(axes: Any, rows: Rows, title: str, log: bool) -> None:
    for index, (name, (lengths, sizes)) in enumerate(rows.items()):
        points = sorted(zip(lengths, sizes, strict=True))
        axes.plot(
            [length for length, _ in points],
            [size / _MIB for _, size in points],
            label=name,
            color=_COLORS[index % len(_COLORS)],
            marker=_MARKERS[index % len(_MARKERS)],
        )
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    axes.set_xlabel("Context length (tokens)")
    axes.set_ylabel("Cache size (MiB)")
    _scale(axes, log)
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # Largest first, as the lines lie on the right-hand side.
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -max(rows[labels[i]][1]))
    axes.legend([handles[i] for i in order], [labels[i] for i in order], loc="upper left")


def _matplotlib() -> tuple[Any, Any]:
    """The module and its Figure; no pyplot, so no global state and no display."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "[plotting] matplotlib must be installed, but got none: pip install 'vqkv-ext[plot]'"
        ) from error
    return matplotlib, Figure


def _scale(axes: Any, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter

    def tokens(value: float, _: int) -> str:
        return f"{value:,.0f}"

    def mebibytes(value: float, _: int) -> str:
        return f"{value:g}" if value < 1000 else f"{value:,.0f}"

    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    else:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(tokens))
    axes.yaxis.set_major_formatter(FuncFormatter(mebibytes))
