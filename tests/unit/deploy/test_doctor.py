"""What `pullfill doctor` finds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pullfill import wire
from pullfill.config import ClusterRef
from pullfill.deploy import doctor, install, machine, servers
from pullfill.net.this_host import SHM_DIR_ENV
from pullfill.registry.orders import LiveWorker


def _worker(role: str, name: str, dtype: str = "float32") -> LiveWorker:
    compat = wire.Compat(
        model="m", model_fingerprint="f", vllm="0", dtype=dtype, kv_cache_dtype="auto",
        block_size=16, layout="L", num_layers=1, num_kv_heads=1, page_bytes=1, isa="x",
        attention="a", kv_scales="1",
    )  # fmt: skip
    record = wire.WorkerRecord(
        instance_id=name, incarnation="i", role=role, state=wire.WorkerState.READY, model="m",
        compat=compat, host="h", host_id="h", pid=1, started_at=0.0,
    )  # fmt: skip
    return LiveWorker(record, 1, 1)


class TestDoctor:
    def test_workers_that_fit(self) -> None:
        found = list(doctor.fit([_worker("decode", "d"), _worker("prefill", "p")]))
        assert [f.level for f in found] == [doctor.OK, doctor.OK]

    def test_workers_that_do_not_fit(self) -> None:
        found = list(doctor.fit([_worker("decode", "d"), _worker("prefill", "p", "bfloat16")]))
        assert found[-1].level == doctor.FAIL
        assert "dtype" in found[-1].what
        assert found[-1].advice

    def test_no_workers(self) -> None:
        assert [f.level for f in doctor.fit([])] == [doctor.FAIL, doctor.WARN]

    def test_this_machine_has_the_pins(self) -> None:
        for check in (machine.python_version, machine.packages, machine.server_binaries):
            assert all(f.level == doctor.OK for f in check()), check

    def test_another_vllm_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        versions = {"vllm": "0.31.0", "torch": None}
        monkeypatch.setattr(machine, "installed", lambda *names: versions.get(names[0]))
        found = list(machine.packages())
        assert [f.level for f in found] == [doctor.FAIL, doctor.FAIL]
        assert "0.31.0" in found[0].what
        assert install.VLLM in found[0].what

    def test_the_torchvision_trap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
        monkeypatch.setattr(machine, "installed", lambda *names: versions.get(names[0]))
        (finding,) = machine.torch_add_ons()
        assert finding.level == doctor.FAIL
        assert "uninstall" in finding.advice
        versions["torchvision"] = "0.28.0+cpu"
        assert list(machine.torch_add_ons()) == []

    def test_left_over_shared_memory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "pullfill-decode-1").touch()
        monkeypatch.setenv(SHM_DIR_ENV, str(tmp_path))
        levels = {f.level: f for f in machine.shared_memory()}
        assert "pullfill-decode-1" in levels[doctor.WARN].what
        assert levels[doctor.WARN].advice == f"rm {tmp_path}/pullfill-decode-1"
        monkeypatch.setenv(SHM_DIR_ENV, str(tmp_path / "none"))
        (missing,) = machine.shared_memory()
        assert missing.what == f"{tmp_path}/none is missing"

    def test_dead_letters_without_nats(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One line says that it is down; nobody waits for it, and no library prints tracebacks."""
        ref = ClusterRef("ns", "http://h", f"nats://127.0.0.1:{servers.free_port()}")

        async def workers(_: ClusterRef) -> list[LiveWorker]:
            return [_worker("decode", "d")]

        monkeypatch.setattr(doctor, "_workers", workers)
        monkeypatch.setattr(servers, "etcd_ready", lambda *_: None)
        for where, name in ((doctor, "frontend_urls"), (doctor.recheck, "findings")):
            monkeypatch.setattr(where, name, lambda _: [])  # they would wait for etcd
        with monkeypatch.context() as first:
            first.setattr(doctor, "_dead_letters", lambda _: 1 / 0)
            told = [f.what for f in doctor.cluster(ref)]
        assert sum("NATS" in what for what in told) == 1
        assert not any("dead letters" in what for what in told)
        pauses: list[float] = []
        sleep = asyncio.sleep

        async def counted(delay: float, *rest: Any) -> Any:
            pauses.append(delay)
            assert len(pauses) < 10
            return await sleep(min(delay, 0.01), *rest)

        monkeypatch.setattr(asyncio, "sleep", counted)
        (finding,) = doctor.dead_letters(ref)
        assert "cannot be counted" in finding.what
        assert sum(pauses) < 1.0
        assert caplog.records == []
