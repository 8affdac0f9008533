"""What pip and uv have done so far, read from what they print; and what to do when they fail.

For install.py, so it imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_UNITS = {"k": 2**10, "K": 2**10, "M": 2**20, "G": 2**30}
_UV_STARTED = re.compile(r"^ *Downloading (\S+) \(([\d.]+)([KMG])iB\)$", re.M)
_UV_DONE = re.compile(r"^ *Downloaded (\S+)$", re.M)
_PIP_STARTED = re.compile(r"^ *Downloading \S+ \(([\d.]+) ([kMG])B\)$", re.M)
_PIP_FOUND = re.compile(r"^ *(?:Collecting|Processing|Obtaining) ", re.M)
_PIP_WRITING = re.compile(r"^Installing collected packages: (.+)$", re.M)

ADVICE = {
    r"No space left|disk quota": "free some disk space: about 10 GB are needed",
    r"[Pp]ermission denied|Read-only file system": (
        "run as the owner of this folder, or name another: PULLFILL_VENV=/path/to/venv"
    ),
    r"certificate|SSL": "name your proxy's certificate: PIP_CERT=/path/to/ca.pem",
    r"[Tt]imed? ?out|resol[uv].* host|[Nn]ame resolution|[Cc]onnection|[Mm]ax retries|ProxyError": (
        "check the network, and the proxy in HTTPS_PROXY"
    ),
    r"No matching distribution|No solution found|[Rr]equires.Python": (
        "check that Python is 3.11 to 3.13 (make install PYTHON=python3.12), and which package "
        "index pip asks (python3 -m pip config list)"
    ),
}
"""What to try next, by what the error says. The first that fits counts."""


def advice(text: str) -> str:
    """Return what to try next, for people.

    text: what pip or uv has printed."""
    said = "\n".join([*re.findall(r"^(?:ERROR|error|WARNING):.*", text, re.M), last_error(text)])
    fitting = (then for pattern, then in ADVICE.items() if re.search(pattern, said))
    then = next(fitting, "look for the first error in the log")
    return f"{then}. Then run make install again: it goes on from there"


def last_error(text: str) -> str:
    """Return the line of the output that says best what went wrong."""
    errors = re.findall(r"^(?:ERROR|error): *(.+(?:\n +(?:cause|Caused by): .+)*)", text, re.M)
    if errors:
        return re.sub(r"\s+", " ", errors[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def told(text: str, site: Path) -> str:
    """Return how far pip or uv is, for people. Empty: not known yet.

    text: what it has printed so far.
    site: the site-packages that it writes to."""
    if wanted := re.search(r"^Resolved (\d+) packages", text, re.M):
        return _of_uv(text, int(wanted[1]), site)
    if writing := _PIP_WRITING.findall(text):
        names = writing[-1].split(", ")
        return f"wrote {_written(names, site)} of {len(names)} packages"
    found = len(_PIP_FOUND.findall(text))
    size = sum(float(size) * _UNITS[unit] for size, unit in _PIP_STARTED.findall(text))
    return f"found {found} packages, downloaded {size / 2**20:.0f} MiB" if found else ""


def _of_uv(text: str, wanted: int, site: Path) -> str:
    if re.search(r"^Installed \d+ packages", text, re.M):
        compiled = sum(1 for _ in site.glob("**/*.pyc"))
        return f"compiled {compiled} of {sum(1 for _ in site.glob('**/*.py'))} files"
    if re.search(r"^Prepared \d+ packages", text, re.M):
        return f"writing {wanted} packages"
    sizes = {name: float(n) * _UNITS[unit] for name, n, unit in _UV_STARTED.findall(text)}
    done = sum(sizes.get(name, 0.0) for name in _UV_DONE.findall(text))
    return f"downloaded {done / 2**20:.0f} of {sum(sizes.values()) / 2**20:.0f} MiB"


def _written(names: Iterable[str], site: Path) -> int:
    """Return how many of the packages are there. pip writes them one after the other."""
    there = {_plain(path.name.partition("-")[0]) for path in site.glob("*.dist-info")}
    return sum(_plain(name) in there for name in names)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


# --------------------------------------------------------------------------- pip's settings

_FOR_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "constraint": "--constraints",
}
_SWITCHES = {"no-index": "--no-index", "no-cache-dir": "--no-cache"}
_VARIABLES = {"cert": "SSL_CERT_FILE", "proxy": "HTTPS_PROXY", "timeout": "UV_HTTP_TIMEOUT"}
_NO_MATTER = frozenset(
    """
    break-system-packages cache-dir default-timeout disable-pip-version-check no-color no-input
    progress-bar quiet require-virtualenv retries root-user-action verbose
    """.split()
)


def uv_settings(pip_config: str) -> tuple[list[str], dict[str, str]]:
    """Return flags and environment that make uv ask the package indexes that pip asks.

    pip_config: what `pip config list` prints.
    Raises ValueError: pip has a setting, which it names, that uv would not follow."""
    found: dict[str, str] = {}
    # In the order of pip: what is set for `pip install`, then the environment, wins.
    rank = {"global": 0, "install": 1, ":env:": 2}
    lines = re.findall(r"^(global|install|:env:)\.([\w-]+)='(.*)'$", pip_config, re.M)
    for _, name, value in sorted(lines, key=lambda line: rank[line[0]]):
        found[name] = value
    flags: list[str] = ["--index-strategy", "unsafe-best-match"]  # all indexes are equal, as in pip
    variables: dict[str, str] = {}
    for name, value in found.items():
        if name in _FOR_UV:
            for each in value.replace("\\n", " ").split():
                flags += [_FOR_UV[name], each]
        elif name in _SWITCHES:
            flags += [_SWITCHES[name]] * (value.lower() in ("1", "true", "yes", "on"))
        elif name in _VARIABLES:
            variables[_VARIABLES[name]] = value
        elif name not in _NO_MATTER:
            raise ValueError(name)
    return flags, variables
