"""One deadly request must not kill the whole fleet: real ZMQ, fake workers that die of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pullfill.frontend import counters
from pullfill.frontend.flight import Waits
from tests.support.fake_vllm import answer, request
from tests.support.frontend_rig import FakeDecode, Rig, rig
from tests.support.waiting import soon

FATAL = 666
QUICK = Waits(sure=0.1)


def convicted() -> float:
    return counters.SUSPECTS.labels("convicted")._value.get()


@asynccontextmanager
async def fleet_of(count: int, *, fatal_length: int = 0) -> AsyncIterator[Rig]:
    """A frontend and so many workers that die of FATAL."""
    workers = [
        FakeDecode(f"decode-{i}", step_s=0.004, fatal_token=FATAL, fatal_length=fatal_length)
        for i in range(count)
    ]
    async with rig(*workers, waits=QUICK) as r:
        yield r


def deaths(r: Rig) -> int:
    return sum(bool(worker.killed_by) for worker in r.workers)


async def test_one_deadly_request_leaves_a_fleet_of_three_alive() -> None:
    """Every other answer is whole, also those of streams that were at both deaths."""
    async with fleet_of(3) as r:
        for i in range(9):
            r.dispatcher.submit(request(f"s{i}", [i], max_tokens=80))
        await soon(lambda: len(r.sink.tokens) == 9)
        r.dispatcher.submit(request("d", [FATAL]))
        await soon(lambda: "d" in r.sink.failures)
        assert not any(f.deaths for f in r.dispatcher.flights.values()), "they are explained"
        await soon(lambda: not r.dispatcher.flights)
        assert deaths(r) == 2
        assert all(r.sink.tokens[f"s{i}"] == answer([i], 80) for i in range(9))
        assert "2 decode workers died while this request" in r.sink.failures["d"]
        assert r.sink.refused == set(r.sink.failures) == {"d"}


async def test_choices_of_one_answer_are_convicted_once() -> None:
    """And they wait for that, longer than for another worker."""
    before = convicted()
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(one, waits=Waits(least=0.2, most=0.2, sure=0.4)) as r:
        for name in ("d1", "d2"):
            r.dispatcher.submit(request(name, [1]))
        await soon(lambda: len(one.added) == 2)
        r.add(two)
        await r.ready(2)
        one.die()
        await soon(lambda: len(two.added) == 2)
        two.die()
        await soon(lambda: r.sink.refused == {"d1", "d2"})
        assert convicted() - before == 1


async def test_a_second_try_of_a_user_who_went_away_is_a_second_try() -> None:
    one, two = FakeDecode("decode-1", fatal_token=FATAL), FakeDecode("decode-2", hold=True)
    async with rig(one, two, waits=QUICK) as r:
        r.dispatcher.submit(request("d", [FATAL]))
        await soon(lambda: bool(two.added))
        r.dispatcher.abort(["d"])
        r.dispatcher.submit(request("other", [1]))
        r.dispatcher.submit(request("retry", [FATAL]))
        await soon(lambda: len(two.added) == 3)
        two.die()
        await soon(lambda: r.sink.refused == {"retry"})
        assert "other" not in r.sink.failures, "of one death"


async def test_a_user_who_goes_away_after_two_deaths_is_refused_at_once_when_back() -> None:
    workers = [FakeDecode(f"decode-{i}", fatal_token=FATAL) for i in range(3)]
    async with rig(*workers, waits=Waits(sure=60.0)) as r:
        r.dispatcher.submit(request("d", [FATAL]))
        await soon(lambda: len(r.sink.gone) == 2)
        r.dispatcher.abort(["d"])
        r.dispatcher.submit(request("retry", [FATAL]))
        assert r.sink.refused == {"retry"}


async def test_an_answer_that_kills_half_way_kills_six() -> None:
    async with fleet_of(7, fatal_length=20) as r:
        for i in range(6):
            r.dispatcher.submit(request(f"s{i}", [i], max_tokens=60))
        r.dispatcher.submit(request("d", [FATAL] * 10, max_tokens=60))
        await soon(lambda: not r.dispatcher.flights)
        assert deaths(r) == 6
        assert set(r.sink.failures) == {"d"}


async def test_a_connection_that_breaks_and_comes_back_is_no_death() -> None:
    worker, other = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(worker, other, waits=Waits(sure=30.0)) as r:  # a busy machine connects late
        r.dispatcher.submit(request("a"))
        for n, fake in enumerate((worker, other), 1):
            await soon(lambda n=n: len(worker.added) + len(other.added) == n)  # type: ignore[misc]
            (link,) = [c for c in r.dispatcher.workers if c.instance_id == fake.instance_id]
            link.lose("its connection broke")
        for fake in (worker, other):
            fake.hold = False
        await soon(lambda: "a" in r.sink.finished)


def choices(name: str, prompt: list[int], count: int, **params: Any) -> list[Any]:
    """As vLLM sends the choices of one answer."""
    made = [request(f"{i}_{name}-abcd", prompt, seed=7 + i, **params) for i in range(count)]
    for each in made:
        each.external_req_id = name
    return made


async def test_the_choices_of_an_answer_go_to_one_worker() -> None:
    async with fleet_of(3) as r:
        for each in (*choices("one", [1], 4), *choices("two", [2], 4), *choices("x", [3], 4)):
            r.dispatcher.submit(each)
        await soon(lambda: not r.dispatcher.flights)
        assert [len(worker.added) for worker in r.workers] == [4, 4, 4]
        for worker in r.workers:
            assert len({q.external_req_id for q in worker.added}) == 1
        told = {record.key for record in r.requests.since(0)}
        assert {f"{i}_one" for i in range(4)} <= told, "without vLLM's random tail"


async def test_the_choices_of_a_deadly_answer_end_two_workers() -> None:
    async with fleet_of(4) as r:
        asked = choices("d", [FATAL], 4)
        for each in asked:
            r.dispatcher.submit(each)
        await soon(lambda: not r.dispatcher.flights)
        assert deaths(r) == 2
        assert r.sink.refused == {each.request_id for each in asked}


async def test_copies_of_a_deadly_request_end_two_workers_each_at_most() -> None:
    """They count alone until one of them is refused. Then all that wait end, and none is sent."""
    async with fleet_of(5) as r:
        for name in ("a", "b"):
            r.dispatcher.submit(request(name, [FATAL]))
        await soon(lambda: not r.dispatcher.flights)
        assert 2 <= deaths(r) <= 4
        assert r.sink.refused == {"a", "b"}


@pytest.mark.parametrize("others", [True, False], ids=["another host lives", "no other host"])
async def test_deaths_of_a_whole_host_count_for_nobody(others: bool) -> None:
    """Both its workers are lost at once. If no other host lives, their deaths count."""
    host = [FakeDecode(f"decode-{i}", hold=True) for i in range(2)]
    last = FakeDecode("decode-9", hold=True, ahead_s=0.001 if others else 0.0)
    async with rig(*host, last, waits=QUICK) as r:
        for i in range(3):
            r.dispatcher.submit(request(f"r{i}", [i]))
        await soon(lambda: all(fake.added for fake in (*host, last)))
        for fake in host:
            fake.die()
        await soon(lambda: len(last.added) == 3)
        last.die()
        await soon(lambda: len(r.sink.gone) == 3)
        counted = sorted(sum(f.deaths.values()) for f in r.dispatcher.flights.values())
        assert counted == ([3] * 3 if others else [3, 6, 6])


async def test_what_may_be_deadly_waits_for_outputs_of_the_others() -> None:
    one, two = (FakeDecode(f"decode-{n}", hold=True, stop_after=2) for n in (1, 2))
    async with rig(one, two, waits=Waits(sure=0.1, apart=60.0)) as r:
        for name in ("a", "b"):
            r.dispatcher.submit(request(name, [ord(name)]))
        await soon(lambda: bool(one.added and two.added))
        await asyncio.to_thread(one.die)
        await soon(lambda: any(f.waits_since for f in r.dispatcher.flights.values()))
        await asyncio.sleep(0.1)
        assert len(two.added) == 1
        two.hold = False
        await soon(lambda: len(two.added) == 2)


async def test_an_answer_that_has_begun_waits_for_nobody() -> None:
    one, two = FakeDecode("decode-1", stop_after=2), FakeDecode("decode-2", hold=True)
    async with rig(one, two, waits=Waits(sure=0.1, apart=60.0)) as r:
        for name in ("a", "b"):
            r.dispatcher.submit(request(name, [ord(name)], max_tokens=9))
        await soon(lambda: "a" in r.sink.tokens and bool(two.added))
        await asyncio.to_thread(one.die)
        await soon(lambda: len(two.added) == 2)
