"""Whether workers run on the CPU or on GPUs: what nvidia-smi and the environment say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pullfill.deploy import accelerator, plan
from pullfill.errors import ConfigError


class TestDevice:
    def machine(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, *devices: str
    ) -> None:
        """A machine whose nvidia-smi says this."""
        tool = tmp_path / "nvidia-smi"
        lines = "\n".join(devices)
        tool.write_text(
            f"#!/bin/sh\nif [ \"$1\" = -L ]; then cat <<'E'\n{lines}\nE\n"
            f"else echo '| NVIDIA-SMI 1  CUDA Version: {driver} |'; fi\n"
        )
        tool.chmod(0o755)
        monkeypatch.delenv(accelerator.DEVICE_ENV, raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    @pytest.mark.parametrize("name", ["tpu", "cuda12"])
    def test_an_unknown_device_is_refused(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(accelerator.DEVICE_ENV, name)
        with pytest.raises(ValueError, match="use one of cpu, cuda13"):
            accelerator.detect()

    def test_a_driver_too_old_for_vllm_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.machine(monkeypatch, tmp_path, "12.9", "GPU 0: A")
        with pytest.raises(ValueError, match=r"CUDA 12\.9.*driver 580.*PULLFILL_DEVICE=cpu") as why:
            accelerator.detect()
        assert "\n" not in str(why.value)
        monkeypatch.setenv(accelerator.DEVICE_ENV, "cuda13")
        assert accelerator.detect() == "cuda13"

    @pytest.mark.parametrize(
        ("visible", "refused"),
        [
            (None, True),
            ("0", False),
            ("GPU-a", False),
            ("MIG-a", False),
            ("MIG-a,MIG-b", True),
            ("GPU-a,MIG-b", True),
        ],
    )
    def test_kv_stays_within_one_instance_of_mig(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, refused: bool
    ) -> None:
        instances = (
            "  MIG 3g.71gb Device 0: (UUID: MIG-a)",
            "  MIG 3g.71gb Device 1: (UUID: MIG-b)",
        )
        self.machine(monkeypatch, tmp_path, "13.0", "GPU 0: H200 (UUID: GPU-a)", *instances)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        options = plan.UpOptions(frontends=0)
        if not refused:
            return plan.check(options)
        with pytest.raises(ConfigError, match=r"MIG .*set CUDA_VISIBLE_DEVICES to one") as why:
            plan.check(options)
        assert "\n" not in str(why.value)
        monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")
        plan.check(options)

    @pytest.mark.parametrize("driver", ["13.0", "13.2", "14.0"])
    def test_nvidia_smi_decides(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str
    ) -> None:
        self.machine(monkeypatch, tmp_path, driver, "GPU 0: A", "GPU 1: B")
        assert accelerator.detect() == "cuda13"
        assert accelerator.gpu_count() == 2
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert accelerator.gpu_count() == 1
        monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")
        assert (accelerator.detect(), accelerator.gpu_count()) == ("cpu", 0)
