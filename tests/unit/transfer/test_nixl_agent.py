"""A NIXL agent over GPU memory, against a NIXL whose UCX copies on a stream of its own."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu import cuda
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.nixl import agent as nixl
from pullfill.transfer.nixl.agent import Agent
from tests.support.fake_gpu import FakeDriver
from tests.support.transfer_rigs import extent, memory_over

LAYOUT = dense_layout(1, 4, 1, 64)


class _Core:
    """What UCX is destroyed with."""


def nixl_agent(driver: FakeDriver) -> SimpleNamespace:
    """nixl's nixl_agent. A transfer is queued and never reported as done; destroying the agent
    waits for nothing, as nothing in NIXL's or UCX's documentation promises that it does."""
    stream = driver.stream(0)

    def queue(verb: str, ours: np.ndarray, theirs: np.ndarray, name: str) -> object:
        assert verb == "READ"
        stream.copy_batch(*map(np.ascontiguousarray, (ours[:, 0], theirs[:, 0], ours[:, 1])))
        return object()

    def register(regions: object, kind: str) -> None:
        assert kind == "VRAM"

    return SimpleNamespace(
        agent=_Core(), backends={"UCX": None}, register_memory=register, initialize_xfer=queue,
        get_agent_metadata=lambda: b"m", add_remote_agent=lambda _: "them",
        remove_remote_agent=lambda _: None, deregister_memory=lambda _: None,
        get_xfer_descs=lambda rows, _: rows, transfer=lambda _: "PROC",
        check_xfer_state=lambda _: "PROC",
    )  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    api = SimpleNamespace(
        nixl_agent_config=lambda **_: None, nixl_agent=lambda *_: nixl_agent(made)
    )
    monkeypatch.setattr(nixl, "_import", lambda: api)
    monkeypatch.setattr(cuda, "load", lambda: made)
    return made


def give_up() -> None:
    raise TransferFailed("the peer is gone")


def stalled(driver: FakeDriver) -> tuple[Agent, np.ndarray]:
    """An agent with a read under way that was given up, and the bytes it reads into."""
    ours, theirs = (driver.allocate(extent(LAYOUT)).data for _ in range(2))
    theirs[:] = 7
    agent = Agent(replace(memory_over(ours, LAYOUT), device=0))
    agent.connect(b"m")
    rows = [np.array([[data.ctypes.data, 64]], np.uint64) for data in (ours, theirs)]
    with pytest.raises(TransferFailed, match="the peer is gone"):
        agent.move("READ", *rows, their_device=0, check=give_up)
    return agent, ours


def test_nothing_lands_after_an_agent_was_dropped(driver: FakeDriver) -> None:
    agent, ours = stalled(driver)
    assert (ours[:64] == 0).all()
    agent.close()
    ours[:] = 1
    driver.synchronize(0)
    assert (ours == 1).all(), "a copy that was given up landed later"
    agent.close()


def test_a_gpu_error_keeps_the_memory(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _ = stalled(driver)
    driver.fail_sync = True
    looks = 0

    def recover(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            driver.fail_sync, driver.error = False, ""

    monkeypatch.setattr(time, "sleep", recover)
    agent.close()
    assert looks == 3, "it returned while copies might run"
    assert caplog.text.count("restart it") == 1
