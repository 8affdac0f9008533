"""How `up` waits for its processes while etcd comes and goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import members, plan, supervisor
from pullfill.errors import RegistryUnavailable
from tests.support.workers import record

REF = ClusterRef("n", "http://h:1", "nats://h:1")


class Children:
    """Stands for running processes."""

    names = ("frontend-0",)

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.view = self

    def raise_if_dead(self, name: str) -> None:
        pass

    def set(self, name: str, state: str, note: str) -> None:
        self.shown.append(f"{name} {state}")

    def describe(self, name: str, what: str) -> str:
        return f"{name} {what}"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What etcd answers at each look. The last one is repeated."""
    answers: list[Any] = []

    @asynccontextmanager
    async def etcd_of(*_: object, **__: object) -> AsyncIterator[None]:
        yield

    async def workers(*_: object) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(members, "etcd_of", etcd_of)
    monkeypatch.setattr(members, "workers", workers)
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    return answers


async def wait(
    timeout_s: float = 20.0, options: plan.UpOptions | None = None, away_s: float = 20.0
) -> Children:
    children: Any = Children()
    spec = plan.ProcessSpec(
        name="frontend-0", role="frontend", argv=[], env={}, instance_id="f-1", url="http://all"
    )
    options = options or plan.UpOptions(ready_timeout_s=timeout_s)
    await supervisor.wait_ready(options, children, REF, [spec], away_s)
    return children


async def test_etcd_may_be_away_for_a_while(
    looks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "frontend_ready", lambda _: True)
    away = RegistryUnavailable("away")
    looks += [away, away, [record("f-1", role="frontend")]]
    assert (await wait()).shown == ["frontend-0 ready"]
    looks[:] = [away]
    with pytest.raises(RegistryUnavailable, match="away"):
        await wait(away_s=0.01)


def test_why_a_frontend_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    no = (503, b'{"reasons": ["why"]}')
    answers = [no, no, (200, b"{}"), (503, b"no JSON")]
    monkeypatch.setattr(members, "http_get", lambda url, _: answers.pop(0))
    assert members.why_not_ready("http://f", 0.0) == ["why"]
    assert members.why_not_ready("http://f", 20.0) == []
    assert len(members.why_not_ready("http://f", 0.0)) == 1
