"""Credits: what is charged comes back, once, and the puller waits for no more than it says."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.prefill_worker.puller import Budget, Puller
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.runtime import metrics
from pullfill.runtime.health import ServerHealth


def test_charged_and_given_back() -> None:
    rooms: list[int] = []
    credits = Credits(100, on_room=lambda: rooms.append(1))
    one, two = credits.open("decode-1"), credits.open("decode-2")
    one.add(60)
    two.add(99)
    assert credits.gone == []
    one.add(40)
    two.add(1)
    assert credits.gone == ["decode-1", "decode-2"]
    assert credits.describe() == {
        "limit_bytes": 100,
        "used_bytes": {"decode-1": 100, "decode-2": 100},
        "gone": ["decode-1", "decode-2"],
    }
    one.add(-1)
    assert rooms == [], "the other has none"
    two.add(-100)
    assert rooms == [1]
    assert credits.used == {"decode-1": 99, "decode-2": 0}


def test_a_closed_account_is_written_off() -> None:
    rooms: list[int] = []
    credits = Credits(100, on_room=lambda: rooms.append(1))
    old = credits.open("decode-1")
    old.add(500)
    new = credits.open("decode-1")
    new.add(7)
    assert credits.used == {"decode-1": 507}
    old.close()
    old.close()
    old.add(-500)
    old.add(500)
    assert credits.used == {"decode-1": 7}
    assert (credits.gone, rooms) == ([], [1])


def test_metrics() -> None:
    credits = Credits(1000)
    for name, nbytes in (("a", 10), ("b", 30)):
        credits.open(name).add(nbytes)
    credits.refresh_metrics()
    found = {w: metrics.KV_CREDITS.labels(w)._value.get() for w in ("limit", "most", "all")}
    assert found == {"limit": 1000, "most": 30, "all": 40}


def test_from_many_threads_nothing_is_lost() -> None:
    credits = Credits(50)
    account = credits.open("decode-1")

    def work() -> None:
        for _ in range(500):
            account.add(3)
            account.add(-3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert credits.used == {"decode-1": 0}
    assert credits.gone == []


# ------------------------------------------------------------------ the puller


class Rig:
    """A puller over a consumer that counts."""

    def __init__(self, patience_s: float) -> None:
        self.pulls = 0
        budget = Budget(10)
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, budget.room.set)
        self.credits = Credits(100, on_room=wake)
        self.account = self.credits.open("decode-1")
        consumer: Any = SimpleNamespace(pull=self._pull, drain=self._drain, ack_wait_s=60.0)
        links: Any = SimpleNamespace(pause=lambda _: None, trials=asyncio.Queue())
        (nats := ServerHealth("nats")).ok()
        self.puller = Puller(
            consumer, links, links, budget, self.credits, ReadGrants(None), nats,
            max_prompt_tokens=1, patience_s=patience_s,
        )  # fmt: skip

    async def _pull(self, *_: float, **__: bool) -> None:
        self.pulls += 1
        await asyncio.sleep(0.001)

    async def _drain(self) -> None: ...


async def until(what: Any) -> None:
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_nothing_is_pulled_without_credit() -> None:
    rig = Rig(patience_s=10)
    rig.account.add(100)
    rig.puller.start()
    try:
        await asyncio.sleep(0.03)
        assert rig.pulls == 0
        await asyncio.to_thread(rig.account.add, -1)
        await until(lambda: rig.pulls)
    finally:
        await rig.puller.close()


@pytest.mark.parametrize("takes", [0, 1])
async def test_a_peer_that_takes_little_stops_nobody_for_long(takes: int) -> None:
    rig = Rig(patience_s=0.02)
    rig.account.add(1000)
    rig.puller.start()
    try:
        while rig.pulls < 3:
            rig.account.add(-takes)
            await asyncio.sleep(0.005)
        assert rig.credits.gone == ["decode-1"]
    finally:
        await rig.puller.close()


@pytest.mark.parametrize("waits", [True, False])
async def test_stopping_does_not_wait_for_credits(waits: bool) -> None:
    rig = Rig(patience_s=100)
    if waits:
        rig.account.add(100)
    rig.puller.start()
    await asyncio.sleep(0.005)
    async with asyncio.timeout(5):
        await rig.puller.close()
