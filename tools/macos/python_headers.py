"""CPython's headers for any version, as a build for arm64 macOS needs them.

They are those of an interpreter of that version, found on this machine, or of a package of Debian;
``pyconfig.h``, which differs between machines, is replaced by that of a Mac.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PYCONFIG = Path(__file__).resolve().parent / "shim_python" / "pyconfig.h"
_ASK = (
    "import sys, sysconfig; print(sysconfig.get_path('include'), sys.version_info[:2], "
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED')), sep='\\n')"
)
_SUITES = ("bookworm", "trixie", "forky", "sid")
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def _interpreters(version: str) -> Iterator[str]:
    """Interpreters that may be of this version."""
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local" / "share" / "uv" / "python"))
    for folder, pattern in ((pyenv, f"{version}.*"), (uv, f"cpython-{version}.*")):
        for found_folder in sorted(folder.glob(pattern), reverse=True):
            yield str(found_folder / "bin" / "python3")


def _of_interpreters(version: str) -> Path | None:
    wanted = str(tuple(map(int, version.split("."))))
    for interpreter in dict.fromkeys(_interpreters(version)):
        try:
            done = subprocess.run([interpreter, "-c", _ASK], capture_output=True, text=True)
        except OSError:
            continue
        said = done.stdout.splitlines()
        if done.returncode or said[1:] != [wanted, "False"]:
            continue
        if (Path(said[0]) / "Python.h").is_file():
            return Path(said[0])
    return None


def _of_debian(version: str, folder: Path) -> Path | None:
    """Headers of Debian's libpython, unpacked into ``folder``; apt's own state stays as it is."""
    if shutil.which("apt-get") is None or not _KEYS.is_file():
        return None
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    options = [f"Dir::State={folder}", "Dir::State::status=/dev/null", "APT::Sandbox::User="]
    options += [f"Dir::Cache={folder / 'cache'}", f"Dir::Etc::sourcelist={folder / 'suites.list'}"]
    apt = ["apt-get", "-qq", *(x for o in (*options, "Dir::Etc::sourceparts=-") for x in ("-o", o))]
    for suite in _SUITES:
        line = f"deb [signed-by={_KEYS}] http://deb.debian.org/debian {suite} main\n"
        (folder / "suites.list").write_text(line)
        package = f"libpython{version}-dev"
        for command in (["update"], ["download", package]):
            if subprocess.run([*apt, *command], cwd=folder, capture_output=True).returncode:
                break
        if debs := sorted(folder.glob(f"{package}_*.deb")):
            subprocess.run(["dpkg-deb", "-x", debs[0], folder / "root"], check=True)
            return folder / "root" / "usr" / "include" / f"python{version}"
    return None


def include_folder(version: str, cache: Path) -> Path:
    """A folder with the headers of CPython ``version`` ("3.12") for arm64 macOS, made once.

    Raises:
        RuntimeError: They are not to be found.
    """
    target = cache / f"python-{version}-macos"
    if not target.exists():
        with tempfile.TemporaryDirectory() as scratch:
            source = _of_interpreters(version) or _of_debian(version, Path(scratch))
            if source is None:
                raise RuntimeError(
                    f"no headers of Python {version}: install that Python, with uv or pyenv "
                    f"(`uv python install {version}`)"
                )
            part = target.with_name(f"{target.name}.part{os.getpid()}")
            shutil.copytree(source, part)
            shutil.copyfile(_PYCONFIG, part / "pyconfig.h")
            part.rename(target)
    return target
