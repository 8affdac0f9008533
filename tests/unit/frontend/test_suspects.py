"""Which request is charged after which deaths of decode workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pullfill.frontend import suspects
from pullfill.frontend.explain import Trace
from pullfill.frontend.flight import Flight, name_of, needs_turn
from pullfill.frontend.suspects import Suspects
from pullfill.registry.probations import Told
from tests.support.fake_board import Alone, Others
from tests.support.fake_vllm import request

A, B, C, D = "a@1.0", "b@1.0", "c@1.0", "d@1.0"


class Court:
    """Deaths told to `Suspects` one by one. Each request has a prompt of its own."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.others = Others()
        self.flights: dict[str, Flight] = {}
        self.court = Suspects(
            1.0,
            self._on_refused,
            lambda: None,
            lambda _: None,
            Alone(self.others),
            self.flights.values,
        )

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


async def test_a_bystander_of_two_deaths_is_not_refused_for_another_frontends_request() -> None:
    court = Court()
    await court.death(A, "x", "y")
    await court.death(B, "x", "z")
    court.others.says = Told(others=1)
    await court.death(C, "", "x")
    assert not court.refused


async def test_a_process_that_comes_back_as_its_verdict_begins_had_not_died() -> None:
    court = Court()
    await court.death(A, "", "x")
    court.court.on_death(B, [court.flights["x"]])
    court.court.on_gone(B)
    (verdict,) = court.court._verdicts.values()
    court.court.on_return(B)
    await verdict
    assert not court.refused
    assert court.suspected == "x"


@pytest.mark.parametrize(
    ("says", "deaths"),
    [
        (Told(), 2),
        (Told(others=3), 3),
        (Told(tried=1), suspects.MAX_DEATHS),
        (Told(complete=False), suspects.MAX_DEATHS),
    ],
)
async def test_what_other_frontends_had_there_counts(says: Told, deaths: int) -> None:
    """A suspect of another frontend may be the cause. A request that was no suspect may be, but
    less likely. If a frontend has not answered, nothing is known about its requests."""
    court = Court()
    court.others.says = says
    count = 0
    for process in (A, B, C, D, "e@1.0", "f@1.0"):
        await court.death(process, "", "x")
        count += 1
        if court.refused:
            break
    assert count == deaths


async def told(court: Court, process: str, name: str, *more: str, fresh: bool = True) -> None:
    """Another frontend says what it had at a worker that died."""
    names = {name_of(court._flight(each)) for each in (name, *more)}
    court.court.on_death_elsewhere(process, names, fresh)
    court.court.on_gone(process)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_suspect_of_another_frontend_is_tried_here_only_on_probation() -> None:
    court = Court()
    await told(court, A, "x")
    assert court.suspected == "x"
    await court.death(B, "", "x")
    assert court.refused == {"x"}


async def test_two_deaths_with_no_other_request_blame_copies_at_two_frontends() -> None:
    """Neither frontend has tried it after the death that the other one saw. An old death is not
    enough, because the request may have been cleared since."""
    for fresh, more, refused in ((True, (), {"x"}), (True, ("y",), set()), (False, (), set())):
        court = Court()
        await court.death(A, "", "x")
        await told(court, B, "x", *more, fresh=fresh)
        assert court.refused == refused


async def test_what_another_frontend_clears_is_cleared_here() -> None:
    court = Court()
    await told(court, A, "x", "y")
    court.court.on_absolved_elsewhere(A, {name_of(court._flight("x"))})
    assert court.suspected == "y"


async def test_what_another_frontend_refuses_ends_here() -> None:
    court = Court()
    await told(court, A, "x")
    court.court.on_refused_elsewhere(name_of(court._flight("x")), 600.0, 2)
    assert court.refused == {"x"}
    suspect = court.flights["x"].suspect
    assert suspect is not None
    assert suspect.sentence.startswith("2 decode workers died")


async def test_suspects_that_nobody_asks_about_again_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their clients have gone. While any is known, each new request is fingerprinted."""
    court = Court()
    await court.death(A, "", "xy")
    assert len(court.court._known) == 2
    now = court.court._loop.time()
    monkeypatch.setattr(court.court, "_loop", _Later(now + suspects.REFUSE_S - 1.0))
    court._flight("z")
    assert len(court.court._known) == 2
    monkeypatch.setattr(court.court, "_loop", _Later(now + suspects.REFUSE_S + 1.0))
    court._flight("v")
    assert not court.court._known


async def test_a_charged_suspect_whose_client_left_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    court = Court()
    await court.death(A, "", "x")
    flight = court._flight("x")
    suspect = flight.suspect
    assert suspect is not None
    suspect.trying, suspect.charged = flight, True
    court.court.on_end(flight, False)
    suspect.charged = False  # the process came back
    now = court.court._loop.time()
    monkeypatch.setattr(court.court, "_loop", _Later(now + suspects.REFUSE_S + 1.0))
    court._flight("z")
    assert not court.court._known


class _Later:
    def __init__(self, now: float) -> None:
        self._now = now

    def time(self) -> float:
        return self._now
