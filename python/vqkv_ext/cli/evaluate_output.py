"""What ``vqkv eval`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..info import info

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from ..agreement import Agreement
    from ..evaluation import Quality
    from ..needles import Retrieval


def facts(
    args: argparse.Namespace,
    tokens: int,
    plain: str,
    quality: Mapping[str, Quality],
    same: Mapping[str, Agreement],
    found: Sequence[Retrieval],
) -> dict[str, Any]:
    """Everything as one JSON object."""
    first = next(iter(quality.values()))
    return {
        "info": info(),
        "model": args.model,
        "text": args.text,
        "tokens": tokens,
        "chunk": args.chunk,
        "reference": {
            "name": plain,
            "ppl": first.to_dict()["ppl_reference"],
            "cache_bytes": first.reference_bytes,
        },
        "caches": {name: q.to_dict() for name, q in quality.items()},
        "greedy": {name: a.to_dict() for name, a in same.items()},
        "needles": [r.to_dict() for r in found],
    }


def show(
    args: argparse.Namespace,
    tokens: int,
    plain: str,
    quality: Mapping[str, Quality],
    same: Mapping[str, Agreement],
    found: Sequence[Retrieval],
) -> None:
    """Tables on the terminal."""
    from rich.console import Console

    console = Console()
    console.print(_quality(args, tokens, plain, quality, same))
    if found:
        console.print(_needles(found))


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _quality(
    args: argparse.Namespace,
    tokens: int,
    plain: str,
    quality: Mapping[str, Quality],
    same: Mapping[str, Agreement],
) -> Table:
    from rich.markup import escape

    caption = (
        "KL to the uncompressed cache in nats per token; bytes: all arrays that the cache holds "
        "after the text, spare capacity included"
    )
    columns = ["bytes", "", "KL", "top-1", "perplexity", ""]
    if same:
        length = next(iter(same.values())).tokens
        caption += f"; same: of {length} tokens generated greedily, those before the first other"
        columns.append("same")
    title = f"{args.model}, {args.text}: {tokens} tokens in chunks of {args.chunk}"
    table = _table(title, caption, columns)
    first = next(iter(quality.values()))
    table.add_row(plain, f"{first.reference_bytes:,}", "", "", "", f"{first.ppl_reference:.4g}")
    for name, q in quality.items():
        table.add_row(
            escape(name),
            f"{q.cache_bytes:,}",
            f"1/{q.reference_bytes / q.cache_bytes:.1f}",
            f"{q.kl:.2g}",
            f"{100 * q.top1:.1f} %",
            f"{q.ppl:.4g}",
            f"{q.delta_ppl:+.1f} %",
            *([f"{same[name].mean:.1f}"] if same else []),
        )
    return table


def _needles(found: Sequence[Retrieval]) -> Table:
    from rich.markup import escape

    finds = ", ".join(
        f"{sum(r.reference)} of {len(r.reference)} at {r.length} tokens" for r in found
    )
    table = _table(
        "needles found",
        f"of those found without compression: {finds}; by length, and by depth of all lengths",
        [*(f"{r.length}" for r in found), *(f"{20 * i}-{20 * i + 20} %" for i in range(5))],
    )
    depths = sorted({d for r in found for d in r.depths})
    for name in found[0].found:
        by_length = ["/".join(map(str, r.count(name))) for r in found]
        by_depth = []
        for fifth in range(5):
            counts = [r.count(name, d) for r in found for d in depths if int(5 * d) == fifth]
            hits, known = (sum(n[i] for n in counts) for i in (0, 1))
            by_depth.append(f"{hits}/{known}")
        table.add_row(escape(name), *by_length, *by_depth)
    return table
