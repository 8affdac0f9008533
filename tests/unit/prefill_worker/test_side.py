"""What a prefill worker sets up before it pulls."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.errors import ConfigError
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.side import PrefillRole
from pullfill.transfer.gpu import copies


async def test_its_engine_is_told_when_gpu_copies_have_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would take job after job, and fail to write each."""

    told: list[str] = []
    role = PrefillRole(ClusterRef("n", "http://e", "nats://q"), WorkerOptions(model="m"))
    monkeypatch.setattr(role, "open_memory", print)
    monkeypatch.setattr(copies, "_watchers", [])
    engine: Any = SimpleNamespace(fail=told.append, submit=None)
    with pytest.raises(ConfigError, match="takes no requests of ours"):
        await role.build(engine, None, AsyncExitStack())  # type: ignore[arg-type]
    for tell in copies._watchers:
        tell("copies on a GPU have failed")
    assert told == ["copies on a GPU have failed"]
