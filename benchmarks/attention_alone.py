"""mlx-lm's 4-bit attention, timed in a process of its own.

On CUDA, MLX 0.32.4's `quantized_matmul` at times hangs or faults when several calls share their
inputs, without any code of this package; that must not end a measurement of other ways.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx

SECONDS = 40


def measured(shape: str, dtype: str, rounds: int, together: int) -> float:
    """Microseconds per call.

    Raises:
        RuntimeError: The process failed, or did not end in time.
    """
    command = [sys.executable, str(Path(__file__)), shape, dtype, str(rounds), str(together)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"mlx-lm's path hung for {SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
    return float(done.stdout.split()[-1])


def main() -> None:
    from attention_case import Case, Shape
    from timing import milliseconds

    shape, dtype, rounds, together = sys.argv[1:]
    call = Case(Shape.parse(shape), getattr(mx, dtype)).mlx_lm_4bit()
    print(1e3 * milliseconds(call, rounds=int(rounds), together=int(together))[0])


if __name__ == "__main__":
    main()
