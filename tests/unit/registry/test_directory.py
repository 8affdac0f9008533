"""What a directory says of workers that go."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.registry.directory import Directory


async def test_of_many_workers_that_go_in_etcd_trouble_one_line_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client: Any = SimpleNamespace(last_failed_at=time.monotonic())
    directory = Directory(client, "ns", ["decode"])
    members: Any = {f"decode-{number}".encode(): object() for number in range(300)}
    directory._members.update(members)
    with caplog.at_level("INFO", "pullfill.registry.directory"):
        for key in members:
            directory._delete(key)
    assert len(directory._leaving) == 300
    for timer in directory._leaving.values():
        timer.cancel()
    assert caplog.messages == ["decode-0 went during etcd trouble: waiting for it"]
