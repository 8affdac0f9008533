"""What `pullfill doctor` finds in a cluster."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest
from msgspec.structs import replace

from pullfill.config import ClusterRef
from pullfill.deploy import doctor
from pullfill.deploy.doctor import Seen
from pullfill.deploy.local_servers import free_port
from pullfill.deploy.machine import FAIL, OK, WARN
from pullfill.registry.client import EtcdClient
from pullfill.wire import WorkerRecord
from tests.support.http_stub import serving
from tests.support.workers import compat, record

REF = ClusterRef("ns", "http://h", "nats://h")


class _Empty:
    """An etcd without a key."""

    @classmethod
    async def connect(cls, *_: object, **__: object) -> Self:
        return cls()

    async def get_prefix(self, _: str) -> tuple[list[Any], int]:
        return [], 1

    async def close(self) -> None:
        """Nothing was opened."""


def live(instance_id: str, http: str) -> WorkerRecord:
    return record(instance_id, http=http)


@pytest.mark.essential
def test_workers_that_do_not_fit() -> None:
    other = record("prefill-p", compat=compat(dtype="bfloat16"))
    found = list(doctor.fit(Seen(REF, [record("decode-d"), other])))
    assert found[-1].level == FAIL
    assert "decode-d and prefill-p cannot exchange KV: dtype" in found[-1].what
    assert found[-1].advice


def test_stock_servers_serve_without_workers() -> None:
    told = [
        {"role": "decode", "url": "http://a", "state": "ready", "why": ""},
        {"role": "decode", "url": "http://b", "state": "refused", "why": "it is bare: do this"},
        {"role": "prefill", "url": "http://c", "state": "failing", "why": "no answer (X: y)"},
    ]
    with serving(lambda path, _: (200, {"stock": told}) if "status" in path else (404, {})) as url:
        workers = [live("frontend-a", url), live("frontend-b", url)]
        seen = Seen(REF, statuses=doctor.statuses(REF, workers))
    assert seen.stock == told
    assert list(doctor.fit(seen)) == []
    assert [(f.level, f.what, f.advice) for f in doctor.stock(seen)] == [
        (OK, "1 stock decode server(s) ready", ""),
        (WARN, "stock decode server http://b is refused: it is bare", "do this"),
        (WARN, "stock prefill server http://c is failing: no answer (X: y)",
         "look whether it runs, and at its log"),
    ]  # fmt: skip


def test_each_pair_of_workers_has_its_line() -> None:
    route = {"transport": "tcp", "why_not_better": ["shm: on another host"]}
    told = {"routes": {"decode-a": route}, "load": {}}
    with serving(lambda path, _: (200, told) if path == "/status" else (404, {})) as url:
        names = ("decode-a", "decode-b", "prefill-a", "frontend-a")
        used, unused = doctor.pairs(Seen(REF, [live(name, url) for name in names]))
    assert used.what == "prefill-a writes to decode-a over tcp"
    assert used.advice == "not shm: on another host"
    assert "decode-b yet" in unused.what


def test_workers_whose_cached_blocks_frontends_do_not_know() -> None:
    def found(**prefix: str) -> list[tuple[str, str, str]]:
        told = {"workers": [{"instance_id": "decode-a", "routing": {"prefix": prefix}}, {}]}
        answer = {"/pullfill/status": (200, told)}
        with serving(lambda path, _: answer.get(path, (404, {}))) as url:
            workers = [live(name, url) for name in ("decode-a", "frontend-a", "frontend-b")]
            workers.append(live("frontend-gone", f"http://127.0.0.1:{free_port()}"))
            seen = Seen(REF, statuses=doctor.statuses(REF, workers))
            return [(f.level, f.what, f.advice) for f in doctor.prefixes(seen)]

    assert found(state="warm") == [
        (OK, "frontends know the cached blocks of 1 decode worker(s)", "")
    ]
    assert found(state="none") == []
    assert found(state="cold", trouble="for 30 s") == [
        (WARN, f"frontend-{name} does not know what decode-a has cached", "for 30 s")
        for name in "ab"
    ]


def test_prompts_whose_jobs_nats_does_not_take() -> None:
    workers = [replace(live("decode-a", ""), max_model_len=300_000), live("prefill-a", "")]
    assert list(doctor.payload(8 << 20, Seen(REF, workers))) == []
    (finding,) = doctor.payload(1 << 20, Seen(REF, workers))
    assert finding.level == WARN
    assert "more than about 243832 tokens stay local (job_too_large)" in finding.what
    assert "raise max_payload" in finding.advice


def test_prefill_workers_that_take_shorter_prompts() -> None:
    of = {"decode-a": 300, "prefill-a": 200, "prefill-b": 300, "prefill-c": 0}
    workers = [replace(live(name, ""), max_model_len=n) for name, n in of.items()]
    (finding,) = doctor.lengths(Seen(REF, workers))
    assert finding.what.startswith("prefill-a takes prompts of up to 200 tokens")


def test_dead_letters_without_nats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says that it is down; nobody waits for it, and no library prints tracebacks."""
    with serving(lambda *_: (200, {"health": "true"})) as etcd:
        monkeypatch.setattr(EtcdClient, "connect", _Empty.connect)
        login = etcd.replace("://", "://user:s3cr3t@")
        ref = ClusterRef("ns", login, f"nats://user:s3cr3t@127.0.0.1:{free_port()}")
        told = [f.what for f in doctor.cluster(ref)]
    assert f"etcd answers at {etcd}" in told
    assert "s3cr3t" not in str(told)
    assert "no frontend" in told
    assert sum("NATS" in what for what in told) == 1
    assert not any("dead letters" in what for what in told)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay: float, *rest: Any) -> Any:
        pauses.append(delay)
        assert len(pauses) < 10
        return await sleep(min(delay, 0.01), *rest)

    monkeypatch.setattr(asyncio, "sleep", counted)
    (finding,) = doctor.jobs(Seen(ref))
    assert "cannot be counted" in finding.what
    assert sum(pauses) < 1.0
    assert caplog.records == []
