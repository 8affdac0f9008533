"""One deadly request must not kill the whole fleet: real ZMQ, fake workers that die of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pullfill.frontend import suspects
from pullfill.registry.probations import Told
from tests.support.fake_board import Alone, Others
from tests.support.fake_decode import FakeDecode
from tests.support.fake_vllm import answer, request
from tests.support.frontend_rig import Rig, rig, until

FATAL = 666


class Fleet:
    """Workers that die of FATAL, and are started again under another name."""

    def __init__(self, r: Rig, *workers: FakeDecode, again: bool = True) -> None:
        self.r = r
        self.living = list(workers)
        self.all = list(workers)
        self._again = again
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            for worker in [w for w in self.living if w.killed_by]:
                self.living.remove(worker)
                await asyncio.sleep(0.02)
                self.r.directory.remove(worker.instance_id)
                if self._again:
                    new = like(worker, f"decode-{len(self.all)}")
                    self.living.append(new)
                    self.all.append(new)
                    self.r.add(new.start())

    def deaths_of(self, prompt: list[int]) -> int:
        return sum(w.killed_by[: len(prompt)] == prompt for w in self.all)

    @property
    def deaths(self) -> int:
        return sum(bool(w.killed_by) for w in self.all)

    async def end(self) -> None:
        self._task.cancel()
        for worker in self.all:
            await asyncio.to_thread(worker.die)


def like(worker: FakeDecode, name: str) -> FakeDecode:
    return FakeDecode(
        name, step_s=worker.step_s, fatal_token=FATAL, fatal_length=worker.fatal_length
    )


@asynccontextmanager
async def fleet_of(
    count: int, *, again: bool = False, step_s: float = 0.004, fatal_length: int = 0
) -> AsyncIterator[tuple[Rig, Fleet]]:
    """A frontend and so many workers that die of FATAL."""
    workers = [
        FakeDecode(f"decode-{i}", step_s=step_s, fatal_token=FATAL, fatal_length=fatal_length)
        for i in range(count)
    ]
    async with rig(*workers, restart_wait_s=10.0 if again else 0.0) as r:
        await r.ready(count)
        fleet = Fleet(r, *workers, again=again)
        try:
            yield r, fleet
        finally:
            await fleet.end()


async def test_forty_streams_and_ten_deadly_requests() -> None:
    """At most two deaths for each, and every other answer is whole."""
    rng = random.Random(7)
    streams = {f"s{i}": ([i, rng.randrange(99)], rng.randint(60, 120)) for i in range(40)}
    deadly = {f"d{i}": [i, FATAL] for i in range(10)}
    async with fleet_of(3, again=True) as (r, fleet):
        for name, (prompt, count) in streams.items():
            r.dispatcher.submit(request(name, prompt, max_tokens=count))
        for name, prompt in deadly.items():
            await asyncio.sleep(rng.uniform(0.0, 0.03))
            r.dispatcher.submit(request(name, prompt))
        await until(lambda: r.dispatcher.in_flight == 0)
        assert set(r.sink.failures) == set(deadly)
        for name, (prompt, count) in streams.items():
            assert r.sink.tokens[name] == answer(prompt, count)
        for name, prompt in deadly.items():
            assert fleet.deaths_of(prompt) <= 2, name
            assert "decode workers died" in r.sink.failures[name]


async def test_one_deadly_request_leaves_a_fleet_of_three_alive() -> None:
    async with fleet_of(3) as (r, fleet):
        for i in range(9):
            r.dispatcher.submit(request(f"s{i}", [i], max_tokens=80))
        await until(lambda: len(r.sink.tokens) == 9)
        r.dispatcher.submit(request("d", [FATAL]))
        await until(lambda: r.dispatcher.in_flight == 0)
        assert fleet.deaths == 2
        assert all(r.sink.tokens[f"s{i}"] == answer([i], 80) for i in range(9))
        said = r.sink.failures.pop("d")
        assert not r.sink.failures
        assert r.sink.refused == {"d"}
        (row,) = r.dispatcher.suspects.listed()
        assert (row["state"], row["deaths"], row["prompt_tokens"]) == ("refused", 2, 1)
        assert "2 decode workers died while this request was in flight" in said
        assert f"pullfill suspects clear {row['fingerprint']}" in said


async def test_a_refused_request_reaches_no_worker_until_it_is_allowed_again() -> None:
    async with fleet_of(3) as (r, fleet):
        r.dispatcher.submit(request("d", [FATAL]))
        await until(lambda: "d" in r.sink.failures)
        (last,) = fleet.living
        r.dispatcher.submit(request("again", [FATAL]))
        assert "are refused for another" in r.sink.failures["again"]
        assert not last.added
        r.dispatcher.submit(request("other", [FATAL - 1]))
        await until(lambda: "other" in r.sink.finished)
        last.fatal_token = 0  # repaired
        r.dispatcher.suspects.forget(str(r.dispatcher.suspects.listed()[0]["fingerprint"]))
        r.dispatcher.submit(request("third", [FATAL]))
        await until(lambda: "third" in r.sink.finished)


async def test_a_second_try_of_a_user_who_went_away_is_a_second_try() -> None:
    async with fleet_of(3) as (r, fleet):
        r.dispatcher.submit(request("d", [FATAL]))
        await until(lambda: bool(r.dispatcher.suspects.listed()))
        r.dispatcher.abort(["d"])
        r.dispatcher.submit(request("retry", [FATAL]))
        await until(lambda: "retry" in r.sink.failures)
        assert fleet.deaths == 2
        assert r.sink.refused == {"retry"}


async def test_an_answer_that_kills_half_way_kills_two() -> None:
    async with fleet_of(3, fatal_length=20) as (r, fleet):
        for i in range(6):
            r.dispatcher.submit(request(f"s{i}", [i], max_tokens=60))
        r.dispatcher.submit(request("d", [FATAL], max_tokens=60))
        await until(lambda: r.dispatcher.in_flight == 0)
        assert fleet.deaths == 2
        assert set(r.sink.failures) == {"d"}
        assert r.sink.tokens["d"] == answer([FATAL], 19)


async def test_a_connection_that_breaks_and_comes_back_is_no_death() -> None:
    """Twice, with a request that was alone each time."""
    worker = FakeDecode("decode-1", hold=True)
    other = FakeDecode("decode-2", hold=True)
    async with rig(worker, other) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a"))
        for n, fake in enumerate((worker, other), 1):
            await until(lambda n=n: len(worker.added) + len(other.added) == n)  # type: ignore[misc]
            (link,) = [c for c in r.pool.candidates() if c.instance_id == fake.instance_id]
            link.lose("its connection broke")
        for fake in (worker, other):
            fake.hold = False
        await until(lambda: "a" in r.sink.finished)
        assert not r.dispatcher.suspects.listed()


async def test_a_request_without_suspicion_waits_a_moment_for_a_probation() -> None:
    """It waits only if every worker has a probation. So a death still points to one request."""
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(one, two) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a", [1]))
        await until(lambda: bool(one.added))
        one.die()
        await until(lambda: bool(two.added))
        r.dispatcher.submit(request("b", [2]))
        await asyncio.sleep(0.05)
        assert len(two.added) == 1
        two.hold = False
        await until(lambda: len(r.sink.finished) == 2)


async def test_with_other_frontends_a_prompt_without_an_output_waits_for_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pullfill.frontend.probation.OTHERS_S", 60.0)  # ended below
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2")
    others = Others()
    async with rig(one, two, board=Alone(others)) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a", [1]))
        await until(lambda: bool(one.added))
        one.die()
        await r.ready(1)
        r.dispatcher.submit(request("b", [2]))
        await until(lambda: "b" in r.sink.finished)
        assert [q.request_id for q in two.added] == ["b"]
        monkeypatch.setattr("pullfill.frontend.probation.OTHERS_S", 0.0)
        await until(lambda: "a" in r.sink.finished)
        assert len(others.asked) == 1, "they were told of the probation"
        assert not others.trials, "it has ended"


def choices(name: str, prompt: list[int], count: int, **params: Any) -> list[Any]:
    """As vLLM sends the choices of one answer."""
    made = [request(f"{i}_{name}-abcd", prompt, seed=7 + i, **params) for i in range(count)]
    for each in made:
        each.external_req_id = name
    return made


async def test_a_request_whose_charge_is_dropped_waits_for_a_worker_as_long_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frontend drops the charge that the request ends workers. The request then waits for a new
    worker until `frontend --restart-wait` has passed."""
    monkeypatch.setattr("pullfill.frontend.probation.OTHERS_S", 0.05)
    monkeypatch.setattr("pullfill.frontend.dispatch.CONFIRM_S", 0.1)
    others = Others()
    others.says = Told(tried=1)
    workers = [FakeDecode(f"decode-{i}", hold=True) for i in range(2)]
    async with rig(*workers, restart_wait_s=30.0, board=Alone(others)) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a", [1, 2], max_tokens=5))
        for _ in range(2):
            await until(lambda: any(worker.added for worker in workers))
            (worker,) = [worker for worker in workers if worker.added]
            workers.remove(worker)
            await asyncio.to_thread(worker.die)
            await until(lambda worker=worker: worker.instance_id in r.sink.gone)  # type: ignore[misc]
            r.directory.remove(worker.instance_id)
        (row,) = r.dispatcher.suspects.listed()
        await asyncio.sleep(0.5)
        assert (row["state"], r.sink.failures) == ("suspected", {})
        third = FakeDecode("decode-2")
        r.add(third.start())
        await until(lambda: "a" in r.sink.finished)
        assert r.sink.tokens["a"] == answer([1, 2], 5)
        await asyncio.to_thread(third.die)


async def test_the_choices_of_an_answer_go_to_one_worker() -> None:
    async with fleet_of(3) as (r, fleet):
        for each in (*choices("one", [1], 4), *choices("two", [2], 4), *choices("x", [3], 4)):
            r.dispatcher.submit(each)
        await until(lambda: r.dispatcher.in_flight == 0)
        assert [len(worker.added) for worker in fleet.all] == [4, 4, 4]
        for worker in fleet.all:
            assert len({q.external_req_id for q in worker.added}) == 1


async def test_the_choices_of_a_deadly_answer_end_two_workers() -> None:
    async with fleet_of(4) as (r, fleet):
        asked = choices("d", [FATAL], 4)
        for each in asked:
            r.dispatcher.submit(each)
        await until(lambda: r.dispatcher.in_flight == 0)
        assert fleet.deaths == 2
        assert r.sink.refused == {each.request_id for each in asked}


@pytest.mark.parametrize("later_s", [0.0, 0.01])
async def test_two_copies_of_a_deadly_request_end_two_workers(later_s: float) -> None:
    """They are sent to two workers before it is known that they are deadly. Or the second is sent a
    moment after the first has killed a worker."""
    async with fleet_of(5) as (r, fleet):
        r.dispatcher.submit(request("a", [FATAL]))
        await asyncio.sleep(later_s)
        r.dispatcher.submit(request("b", [FATAL]))
        await until(lambda: r.dispatcher.in_flight == 0)
        assert fleet.deaths == 2
        assert r.sink.refused == {"a", "b"}


async def test_of_copies_of_a_suspect_one_is_tried_and_its_output_clears_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that is at another worker already is taken back before."""
    monkeypatch.setattr(suspects, "RECALL_S", 0.1)
    fakes = [FakeDecode(f"decode-{i}", hold=True) for i in range(4)]
    async with rig(*fakes) as r:
        await r.ready(4)
        for name in ("a", "b"):
            r.dispatcher.submit(request(name, [1]))
        await until(lambda: sum(len(f.added) for f in fakes) == 2)
        first, second = [f for f in fakes if f.added]
        first.die()
        await r.ready(3)
        r.dispatcher.submit(request("c", [1]))
        await until(lambda: len(second.aborted) == 1)
        await until(lambda: sum(len(f.added) for f in fakes) == 3)
        await asyncio.sleep(0.1)
        assert sum(len(f.added) for f in fakes) == 3, "two wait for what becomes of the third"
        for fake in fakes:
            fake.hold = False
        await until(lambda: len(r.sink.finished) == 3)
        assert not r.dispatcher.suspects.listed()
        assert len(second.added) >= 1


async def test_only_the_requests_of_a_worker_tell_whether_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a probation of another frontend this is asked 50 times a second.

    So the thousands of requests that other workers may have must not be looked at."""
    busy, idle = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(busy, idle) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a"))
        await until(lambda: bool(busy.added))
        monkeypatch.setattr(r.dispatcher.suspects, "_flights", None)
        quiet = r.dispatcher.suspects.quiet
        assert (quiet("decode-1"), quiet("decode-2"), quiet("unknown")) == (False, True, True)
        monkeypatch.undo()
        await asyncio.to_thread(busy.die)
        await until(lambda: bool(r.sink.gone))
        assert quiet("decode-1")
