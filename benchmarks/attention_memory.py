"""Memory that one call of attention over a chunk of the prompt needs beside its inputs.

On a CPU it is by how much the call raises the peak of a process of its own, since the native kernel
allocates outside MLX; on a GPU it is MLX's own peak.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import mlx.core as mx
from attention_case import Case, Shape
from report import make_console, on_gpu
from timing import extra_bytes


def peak(shape: Shape, preset: str) -> int:
    """By how many bytes one call raises the peak of this process."""
    case = Case(shape, mx.float32)
    call = case.ours(case.cache(preset)[1])
    case.k = case.v = None
    mx.clear_cache()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reach = mx.zeros((before << 10) - mx.get_active_memory(), mx.uint8)  # up to the peak so far
    mx.eval(reach)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mx.eval(call())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def extra(shape: Shape, preset: str) -> int:
    """Bytes that one call needs beside its inputs, the result included."""
    if on_gpu():
        case = Case(shape, mx.float16)
        call = case.ours(case.cache(preset)[1])
        case.k = case.v = None
        return extra_bytes(call)
    command = [sys.executable, __file__, "--shape", str(shape), "--presets", preset, "--peak"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    presets = ["centred-4bit", "centred-2bit", "vecinfer-2bit"]
    parser.add_argument("--presets", nargs="+", default=presets)
    parser.add_argument("--shape", default="32/8x128:512x32768", help="as of attention.py")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        shape = Shape.parse(args.shape)
    except ValueError as error:
        parser.error(str(error))
    if args.peak:
        print(peak(shape, args.presets[0]))
        return
    size = 2 if on_gpu() else 4
    dense = 2 * shape.batch * shape.kv_heads * shape.tokens * shape.width * size
    console = make_console()
    for preset in args.presets:
        console.print(
            f"{shape}, {preset}: {extra(shape, preset) / 1e6:.1f} MB beside the inputs; decoded "
            f"keys and values alone are {dense / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
