"""What `pullfill doctor` finds in a cluster."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import doctor
from pullfill.deploy.local_servers import free_port
from pullfill.deploy.machine import FAIL, WARN
from pullfill.registry.client import EtcdClient
from tests.support.http_stub import serving
from tests.support.workers import compat, record


class _Empty:
    """An etcd without a key."""

    @classmethod
    async def connect(cls, *_: object, **__: object) -> Self:
        return cls()

    async def get_prefix(self, _: str) -> tuple[list[Any], int]:
        return [], 1

    async def close(self) -> None:
        """Nothing was opened."""


@pytest.mark.essential
def test_workers_that_do_not_fit() -> None:
    other = record("prefill-p", compat=compat(dtype="bfloat16"))
    found = list(doctor.fit([record("decode-d"), other]))
    assert found[-1].level == FAIL
    assert "decode-d and prefill-p cannot exchange KV: dtype" in found[-1].what
    assert found[-1].advice
    assert [finding.level for finding in doctor.fit([])] == [FAIL, WARN]
    assert list(doctor.fit([], by_stock=True)) == []


def test_each_pair_of_workers_has_its_line() -> None:
    route = {"transport": "tcp", "why_not_better": ["shm: on another host"]}
    told = {"routes": {"decode-a": route}, "load": {}}
    with serving(lambda path, _: (200, told) if path == "/status" else (404, {})) as url:
        names = ("decode-a", "decode-b", "prefill-a", "frontend-a")
        used, unused = doctor.pairs([record(name, http=url) for name in names])
    assert used.what == "prefill-a writes to decode-a over tcp"
    assert used.advice == "not shm: on another host"
    assert "decode-b yet" in unused.what


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
    (finding,) = doctor.dead_letters(ref)
    assert "cannot be counted" in finding.what
    assert sum(pauses) < 1.0
    assert caplog.records == []
