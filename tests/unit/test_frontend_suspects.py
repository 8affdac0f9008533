"""One deadly request must not take the fleet with it: real ZMQ, fake workers that die of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pullfill.frontend import suspects
from pullfill.frontend.explain import Trace
from pullfill.frontend.flight import Flight, needs_turn
from pullfill.frontend.suspects import Suspects
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
    """Only where every worker has one. So a death still names one request."""
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


class Shared(suspects._NoBoard):
    """There are other frontends, which say nothing."""

    shared = True


async def test_with_other_frontends_a_prompt_without_an_output_waits_for_their_answers() -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2")
    async with rig(one, two, board=Shared()) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a", [1]))
        await until(lambda: bool(one.added))
        one.die()
        await r.ready(1)
        r.dispatcher.submit(request("b", [2]))
        await until(lambda: "b" in r.sink.finished)
        assert [q.request_id for q in two.added] == ["b"]
        await until(lambda: "a" in r.sink.finished)


# ------------------------------------------------------------------------- which death blames whom

A, B, C, D = "a@1.0", "b@1.0", "c@1.0", "d@1.0"


class Court:
    """Deaths told to `Suspects` one by one. Each request has a prompt of its own."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.court = Suspects(1.0, self._on_refused, lambda: None)
        self.flights: dict[str, Flight] = {}

    def _on_refused(self, suspect: Any) -> None:
        self.refused |= {n for n, f in self.flights.items() if f.suspect is suspect}

    def _flight(self, name: str) -> Flight:
        if name not in self.flights:
            made = request(name, [ord(name)])
            self.flights[name] = Flight(made, name, Trace(name), 0.0, 0.0, "")
            assert not self.court.meet(self.flights[name])
        return self.flights[name]

    async def death(self, process: str, proven: str, unproven: str) -> None:
        """These were there; the registry drops the worker then."""
        for name in unproven:
            self._flight(name).proven = False
        for name in proven:
            self.court.on_output(self._flight(name))
        self.court.on_death(process, [self._flight(name) for name in (*proven, *unproven)])
        self.court.on_gone(process)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def suspected(self) -> str:
        names = sorted(n for n, f in self.flights.items() if needs_turn(f))
        return "".join(n for n in names if n not in self.refused)


@pytest.mark.parametrize(
    ("deaths", "refused", "suspected"),
    [
        # (process, had outputs there, had none there) …
        ([(A, "", "x")], "", "x"),
        ([(A, "xy", "z")], "", "xyz"),
        ([(A, "", "x"), (B, "", "x")], "x", ""),
        ([(A, "y", "x"), (B, "z", "x")], "x", "y"),  # z is a bystander
        ([(A, "", "xy"), (B, "", "xy")], "", "xy"),  # neither was alone
        ([(A, "", "xy"), (B, "", "xz")], "", "xyz"),
        ([(A, "", "xy"), (B, "", "xy"), (C, "y", "x")], "x", ""),
        ([(A, "", "x"), (B, "x", "")], "", "x"),  # it was cleared: a new suspicion
        ([(A, "", "x"), (B, "x", ""), (C, "x", "")], "", "x"),
        ([(A, "", "x"), (B, "x", ""), (C, "x", ""), (D, "x", "")], "x", ""),
        ([(A, "", "xy"), (B, "", "x"), (C, "", "y")], "xy", ""),  # both may be deadly
        ([(A, "z", "xy"), (B, "z", "x"), (C, "", "z")], "x", "yz"),  # A and B are x's: z is free
    ],
)
async def test_which_deaths_blame_whom(
    deaths: list[tuple[str, str, str]], refused: str, suspected: str
) -> None:
    court = Court()
    for death in deaths:
        await court.death(*death)
    assert ("".join(sorted(court.refused)), court.suspected) == (refused, suspected)


async def test_a_charge_falls_when_the_process_comes_back() -> None:
    """Of the last death, or of the one before it."""
    for back in (A, B):
        court = Court()
        await court.death(A, "", "x")
        court.court.on_death(B, [court.flights["x"]])
        court.court.on_return(back)
        court.court.on_gone(B)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not court.refused
        assert court.suspected == "x"
        await court.death(C, "", "x")
        assert court.refused == {"x"}


@pytest.mark.parametrize(
    ("testimony", "deaths"), [((0, 0), 2), ((0, 3), 3), ((1, 0), suspects.MAX_DEATHS)]
)
async def test_what_other_frontends_had_there_counts(
    testimony: tuple[int, int], deaths: int
) -> None:
    """A suspect of another one may be the killer; a request without a past is, less likely."""
    court = Court()

    async def told(instance_id: str) -> tuple[int, int]:
        return testimony

    court.court._board.testimony = told  # type: ignore[method-assign]
    count = 0
    for process in (A, B, C, D, "e@1.0", "f@1.0"):
        await court.death(process, "", "x")
        count += 1
        if court.refused:
            break
    assert count == deaths
