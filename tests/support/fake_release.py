"""A few files that stand for a release of vLLM."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files, by their paths below a folder. Returns the folder."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def wheel(path: Path, files: Mapping[str, str]) -> Path:
    """Make a wheel of files. Returns its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path
