"""Several frontends with the same workers: a suspect of one frontend is a suspect of all.

Real etcd, real ZMQ, fake workers that can die."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pullfill.engine.fingerprint import fingerprint
from pullfill.frontend import probation
from pullfill.registry import keys
from pullfill.registry import probations as module
from pullfill.registry.client import EtcdClient
from pullfill.registry.probations import Probations, Told
from tests.support.etcd import EtcdServer
from tests.support.fake_vllm import answer, request
from tests.support.frontend_pair import FATAL, SharedFleet, frontends_of
from tests.support.frontend_rig import until

ENOUGH_S = 40.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits, since fake workers need less time than real ones."""
    monkeypatch.setattr(probation, "OTHERS_S", 0.2)
    monkeypatch.setattr(module, "SETTLE_S", 0.05)


async def ended(fleet: SharedFleet) -> None:
    async with asyncio.timeout(ENOUGH_S):
        while fleet.in_flight:  # noqa: ASYNC110 - as `until`, for longer
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("quick")
async def test_a_deadly_request_and_its_copy_at_the_other_frontend_end_two_workers(
    etcd: EtcdServer, ns: str
) -> None:
    """The copy arrives while the first request waits for its probation."""
    async with frontends_of(etcd, ns) as ((one, two), fleet):
        one.dispatcher.submit(request("d", [FATAL]))
        await until(lambda: bool(two.dispatcher.suspects.listed()))
        two.dispatcher.submit(request("copy", [FATAL]))
        await ended(fleet)
        assert fleet.deaths == [(FATAL,)] * 2
        assert (one.sink.refused, two.sink.refused) == ({"d"}, {"copy"})


@pytest.mark.usefixtures("quick")
async def test_copies_sent_to_two_frontends_at_once_end_two_workers(
    etcd: EtcdServer, ns: str
) -> None:
    async with frontends_of(etcd, ns, workers=4) as ((one, two), fleet):
        two.dispatcher.submit(request("s", [1], max_tokens=1))  # the next one goes elsewhere
        await until(lambda: "s" in two.sink.finished)
        one.dispatcher.submit(request("d", [FATAL]))
        two.dispatcher.submit(request("copy", [FATAL]))
        await ended(fleet)
        assert len(fleet.deaths) == 2
        assert (one.sink.refused, two.sink.refused) == ({"d"}, {"copy"})


@pytest.mark.usefixtures("quick")
async def test_a_copy_in_the_queue_of_a_living_worker_is_taken_back(
    etcd: EtcdServer, ns: str
) -> None:
    """Otherwise it would kill that worker, the third one, when its turn comes in the queue."""
    async with frontends_of(etcd, ns, workers=2, slots=1) as ((one, two), fleet):
        # Each frontend sends to the two workers in turn.
        one.dispatcher.submit(request("short", [1], max_tokens=300))
        one.dispatcher.submit(request("long", [2], max_tokens=1100))
        await until(lambda: len(one.sink.tokens) == 2)
        two.dispatcher.submit(request("after short", [3], max_tokens=1))
        one.dispatcher.submit(request("d", [FATAL]))
        two.dispatcher.submit(request("copy", [FATAL]))
        # Another worker may have come in the place of the first one already.
        await until(lambda: [len(fake.added) for fake in fleet.all[:2]] == [3, 2])
        await ended(fleet)
        assert fleet.deaths == [(FATAL,)] * 2
        assert not fleet.all[1].killed_by
        assert (one.sink.refused, two.sink.refused) == ({"d"}, {"copy"})
        assert one.sink.tokens["long"] == answer([2], 1100)


@pytest.mark.usefixtures("quick")
async def test_a_suspect_is_not_tried_where_another_request_waits_in_the_queue(
    etcd: EtcdServer, ns: str
) -> None:
    """Several requests may leave a full worker's queue at the same time. If it then dies, the
    suspect is not proved, and a third worker would have to die."""
    async with frontends_of(etcd, ns, workers=1, slots=2) as ((one, two), fleet):
        one.dispatcher.submit(request("d", [FATAL]))
        await until(lambda: len(fleet.all) == 2)
        fleet.all[1].hold = True
        for name, prompt in (("long", [1]), ("as long", [2]), ("waits", [3])):
            two.dispatcher.submit(request(name, prompt, max_tokens=700))
        await until(lambda: len(fleet.all[1].added) == 3)
        fleet.all[1].hold = False
        await ended(fleet)
        assert fleet.deaths == [(FATAL,)] * 2
        assert two.sink.tokens == {
            name: answer([i], 700) for i, name in enumerate(("long", "as long", "waits"), 1)
        }


@pytest.mark.usefixtures("quick")
async def test_ten_deadly_prompts_at_both_frontends_end_two_workers_each(
    etcd: EtcdServer, ns: str
) -> None:
    """Every second deadly request is sent again, to the other frontend. Forty streams survive."""
    async with frontends_of(etcd, ns) as (rigs, fleet):
        for i in range(40):
            rigs[i % 2].dispatcher.submit(request(f"s{i}", [i], max_tokens=60))
        for i in range(10):
            rigs[i % 2].dispatcher.submit(request(f"d{i}", [i, FATAL]))
            await asyncio.sleep(0.01)
        deadly = {fingerprint(request("", [i, FATAL])) for i in range(10)}

        def all_known() -> bool:
            """Whether the first frontend has heard of every deadly prompt."""
            deadly.difference_update(
                row["fingerprint"] for row in rigs[0].dispatcher.suspects.listed()
            )
            return not deadly

        await until(all_known)
        for i in range(1, 10, 2):
            rigs[0].dispatcher.submit(request(f"copy{i}", [i, FATAL]))
        await ended(fleet)
        for i in range(40):
            assert rigs[i % 2].sink.tokens[f"s{i}"] == answer([i], 60)
        refused = rigs[0].sink.refused | rigs[1].sink.refused
        assert refused == {f"d{i}" for i in range(10)} | {f"copy{i}" for i in range(1, 10, 2)}
        assert rigs[0].sink.failures.keys() | rigs[1].sink.failures.keys() == refused
        killed = Counter(fleet.deaths)
        assert max(killed.values()) <= 2, killed


@pytest.mark.usefixtures("quick")
async def test_what_one_frontend_has_cleared_is_no_suspect_of_the_other(
    etcd: EtcdServer, ns: str
) -> None:
    async with frontends_of(etcd, ns) as ((one, two), fleet):
        for fake in fleet.all:
            fake.hold = True
        one.dispatcher.submit(request("a", [1]))
        await until(lambda: any(fake.added for fake in fleet.all))
        (held,) = [fake for fake in fleet.all if fake.added]
        for fake in fleet.all:
            fake.hold = False
        held.killed_by = [0]  # killed by something else
        held.die()
        await until(lambda: bool(two.dispatcher.suspects.listed()))
        await until(lambda: "a" in one.sink.finished)
        await until(lambda: not two.dispatcher.suspects.listed())


# ---------------------------------------------------------------------------- what is in etcd


class Ear:
    """A frontend as `Probations` sees it. busy: workers where it has requests without an output."""

    def __init__(self) -> None:
        self.deaths: list[tuple[str, set[str], bool]] = []
        self.absolved: list[tuple[str, set[str]]] = []
        self.busy: set[str] = set()

    def on_death_elsewhere(self, process: str, names: set[str], fresh: bool) -> None:
        self.deaths.append((process, names, fresh))

    def on_absolved_elsewhere(self, process: str, names: set[str]) -> None:
        self.absolved.append((process, names))

    def on_probations(self) -> None: ...

    def quiet(self, instance_id: str) -> bool:
        return instance_id not in self.busy


@asynccontextmanager
async def told(
    etcd: EtcdServer, ns: str, *names: str, frontends: int = 2
) -> AsyncIterator[list[tuple[Probations, Ear]]]:
    client = await EtcdClient.connect(etcd.url, wait_s=10, timeout_s=0.5)
    made = [(Probations(client, ns, name, lambda: frontends), Ear()) for name in names]
    try:
        for each, ear in made:
            each.start(ear)
        await until(lambda: all(each._fresh for each, _ in made))
        yield made
    finally:
        for each, _ in made:
            await each.close()
        await client.close()


def ready(each: Probations, fingerprint: str) -> bool:
    mine = each.mine(fingerprint)
    return mine is not None and mine.ready


async def test_a_probation_begins_when_the_others_have_nothing_unproven_there(
    etcd: EtcdServer, ns: str
) -> None:
    async with told(etcd, ns, "frontend-1", "frontend-2") as ((one, _), (two, ear)):
        ear.busy = {"decode-1"}
        one.take("f1", "decode-1", 20)
        await until(lambda: two.taken("decode-1") and two.elsewhere("f1"))
        await asyncio.sleep(0.1)
        assert not ready(one, "f1")
        ear.busy = set()
        await until(lambda: ready(one, "f1"))
        one.release("f1")
        await until(lambda: not two.any and not one.any)


async def test_a_request_and_a_worker_have_one_probation_over_all_frontends(
    etcd: EtcdServer, ns: str
) -> None:
    async with told(etcd, ns, "frontend-1", "frontend-2") as ((one, _), (two, _)):
        one.take("f1", "decode-1", 20)
        await until(lambda: ready(one, "f1"))
        two.take("f1", "decode-2", 20)
        two.take("f2", "decode-1", 20)
        two.take("f3", "decode-3", 20)
        await until(lambda: two.mine("f1") is None and two.mine("f2") is None)
        await until(lambda: ready(two, "f3"))
        one.release("f1")
        await until(lambda: not two.elsewhere("f1"))
        two.take("f1", "decode-1", 20)
        await until(lambda: ready(two, "f1"))


async def test_no_probation_of_a_refused_request_begins(etcd: EtcdServer, ns: str) -> None:
    """A frontend may hear of its refusal later than of the end of the probation before."""
    async with told(etcd, ns, "frontend-1", frontends=1) as ((one, _),):
        await one._client.put(keys.suspect(ns, "f1"), b"")
        one.take("f1", "decode-1", 20)
        await until(lambda: one.mine("f1") is None or ready(one, "f1"))
        assert one.mine("f1") is None
        await one._client.delete(keys.suspect(ns, "f1"))
        one.take("f1", "decode-1", 20)
        await until(lambda: ready(one, "f1"))


async def test_a_frontend_that_is_gone_delays_a_probation_and_keeps_none(
    etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not answer, and its own probation ends with its lease."""
    monkeypatch.setattr(module, "CLEAR_S", 0.3)
    async with told(etcd, ns, "frontend-1", "frontend-2") as ((one, _), (two, ear)):
        ear.busy = {"decode-1"}  # so it says as little as one that is gone
        one.take("f1", "decode-1", 2)
        await until(lambda: two.elsewhere("f1"))
        await until(lambda: ready(one, "f1"))
        await until(lambda: not two.elsewhere("f1") and not two.taken("decode-1"))


async def test_a_frontend_is_asked_until_it_says_what_it_had(
    etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    monkeypatch.setattr(module, "TELL_S", 10.0)
    async with told(etcd, ns, "frontend-1", "frontend-2") as ((one, _), (two, _)):
        asked = asyncio.create_task(one.testimony("decode-1", "f1"))
        await asyncio.sleep(0.3)
        assert not asked.done()
        two.testify("decode-1@1.0", "decode-1", {"f2": False})
        assert await asked == Told(0, 1)
        monkeypatch.setattr(module, "TELL_S", 0.1)
        assert not (await one.testimony("decode-2", "f1")).complete


async def test_a_late_answer_of_etcd_does_not_mean_that_nobody_had_a_request_there(
    etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a frontend on a busy machine refuses a request that another one's request has killed."""
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    monkeypatch.setattr(module, "ASK_S", 0.3)
    async with told(etcd, ns, "frontend-1", "frontend-2") as ((one, _), (two, _)):
        two.testify("decode-1@1.0", "decode-1", {"f2": True})
        await until(lambda: two._written.is_set())
        client, asked = one._client, list[str]()
        real = client.get_prefix

        async def late(prefix: str) -> object:
            asked.append(prefix)
            await asyncio.sleep(0 if len(asked) > 1 else 60)
            return await real(prefix)

        monkeypatch.setattr(client, "get_prefix", late)
        assert await one.testimony("decode-1", "f1") == Told(1, 0)
        assert len(asked) > 1


async def test_without_etcd_a_probation_begins_at_once(
    tmp_path: Path, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TELL_S", 0.1)
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd") as etcd:
        async with told(etcd, ns, "frontend-1") as ((one, _),):
            await asyncio.to_thread(etcd.kill)
            one.take("f1", "decode-1", 20)
            await until(lambda: ready(one, "f1"))
            assert (await one.testimony("decode-1", "f1")).complete, "nobody can say more"


async def test_deaths_are_told_taken_back_and_kept_for_who_comes_later(
    etcd: EtcdServer, ns: str
) -> None:
    async with told(etcd, ns, "frontend-1", "frontend-2") as ((one, own), (two, ear)):
        one.testify("decode-1@1.0", "decode-1", {"f1": True, "f2": False})
        await until(lambda: ear.deaths == [("decode-1@1.0", {"f1", "f2"}, True)])
        assert await two.testimony("decode-1", "f3") == Told(1, 1)
        assert await two.testimony("decode-1", "f1") == Told(0, 1), "its like does not count"
        two.testify("decode-1@1.0", "decode-1", {})
        assert await one.testimony("decode-1", "f3") == Told(0, 0), "we know our own"
        one.absolve("f2")
        await until(lambda: ear.absolved == [("decode-1@1.0", {"f2"})])
        async with told(etcd, ns, "frontend-3") as ((_, late),):
            await until(lambda: late.deaths == [("decode-1@1.0", {"f1"}, False)])
        one.retract("decode-1")
        await until(lambda: ear.absolved[1:] == [("decode-1@1.0", {"f1"})])
        assert not own.deaths


async def test_a_worker_that_died_is_not_clear_before_its_death_is_told(
    etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another frontend sends its suspect to a dead worker, and counts a death more."""
    async with told(etcd, ns, "frontend-1", "frontend-2") as ((one, own), (two, ear)):
        ear.busy = {"decode-1"}
        one.take("f1", "decode-1", 20)
        await until(lambda: two.taken("decode-1"))
        may, real = asyncio.Event(), two._background.put

        async def late(key: str, value: bytes, ttl_s: float) -> None:
            await may.wait()
            await real(key, value, ttl_s)

        monkeypatch.setattr(two._background, "put", late)
        two.testify("decode-1@1.0", "decode-1", {"f2": False})
        ear.busy = set()
        await asyncio.sleep(10 * module.LOOK_S)
        assert not ready(one, "f1")
        may.set()
        await until(lambda: ready(one, "f1"))
        assert own.deaths == [("decode-1@1.0", {"f2"}, True)]
