"""Where a suspect may be tried, and where other requests may go meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pullfill.frontend import probation
from pullfill.frontend.explain import Trace
from pullfill.frontend.flight import Flight, Suspect, name_of
from pullfill.frontend.probation import Turns
from tests.support.fake_board import NoProbations, Others, Trial
from tests.support.fake_vllm import request

NOW = 1000.0


@dataclass(eq=False)
class Worker:
    instance_id: str
    flights: dict[str, Flight] = field(default_factory=dict)

    def has(self, *flights: Flight) -> Worker:
        self.flights |= {f.request_id: f for f in flights}
        return self


class Taken(Others):
    """Other frontends have probations at these workers."""

    any = True

    def __init__(self, *instance_ids: str) -> None:
        super().__init__()
        self.ids = instance_ids

    def taken(self, instance_id: str) -> bool:
        return instance_id in self.ids


def flight(name: str, *, sent_at: float = NOW, proven: bool = False) -> Flight:
    made = request(name, [ord(name)])
    made_flight = Flight(made, name, Trace(name), 0.0, 0.0, "", sent_at=sent_at, proven=proven)
    name_of(made_flight)
    return made_flight


def suspect(name: str, *, likely: bool) -> Flight:
    made = flight(name)
    made.suspect = Suspect(made.fingerprint, 1, deaths=["gone@1.0"], likely=likely)
    return made


def turn(turns: Turns, who: Flight, now: float, *workers: Any) -> Any:
    return turns.turn(who, workers, now)


def test_no_probation_starts_where_a_request_waits_in_the_queue() -> None:
    """It may be deadly, too. Streams of a full worker take seconds to end."""
    one, two = Worker("a").has(flight("x")), Worker("b").has(flight("y"))
    turns, d = Turns(0.0, Others()), suspect("d", likely=True)
    for seconds in (probation.OTHERS_S, 5.0):
        assert turn(turns, d, NOW + seconds, one, two) is None
        assert not turns._probations.mine(d.fingerprint)
    for each in (one, two):
        next(iter(each.flights.values())).proven = True
    turn(turns, d, NOW + 5.1, one, two)
    assert turns._probations.mine(d.fingerprint)


def test_a_request_that_never_shows_an_output_does_not_keep_probations_away_for_ever() -> None:
    one, two = Worker("a").has(flight("x")), Worker("b").has(flight("y"))
    turns, d = Turns(0.0, Others()), suspect("d", likely=True)
    turn(turns, d, NOW, one, two)
    turn(turns, d, NOW + probation.CROWDED_S + 0.1, one, two)
    assert turns._probations.mine(d.fingerprint)
    assert not turns.prevents(one.flights["x"], NOW + probation.CROWDED_S + 0.1)


def test_a_suspect_does_not_join_those_who_wait_at_a_full_worker() -> None:
    """They have waited there for longer than a turn. A death beside them would prove nothing."""
    full, other = Worker("full").has(flight("x"), flight("y", proven=True)), Worker("other")
    other.has(flight("z"))
    turns, d = Turns(0.0, Others()), suspect("d", likely=True)
    turns.last_death = NOW
    for seconds in (0.0, probation.turn_s(flight("x")) + probation.OTHERS_S + 0.2, 59.0):
        assert turn(turns, d, NOW + seconds, full, other) is None
        assert turns._probations.mine(d.fingerprint) is None
        assert turns.prevents(full.flights["x"], NOW + seconds), "also where others ask"
        assert not turns.prevents(full.flights["y"], NOW + seconds)
    other.flights.clear()
    turn(turns, d, NOW + 59.1, full, other)
    trial = turns._probations.mine(d.fingerprint)
    assert trial is not None
    assert trial.instance_id == "other"


def test_a_probation_that_others_did_not_agree_to_begins_again_elsewhere() -> None:
    """In the first minute after a death; then it starts all the same."""
    others = Others()
    turns, d = Turns(0.0, others), suspect("d", likely=True)
    turns.last_death = NOW
    workers = (Worker("a"), Worker("b"))
    turn(turns, d, NOW + 1.1, *workers)
    turn(turns, d, NOW + 2.2, *workers)
    others.trials[d.fingerprint].late = True
    assert turn(turns, d, NOW + 14.0, *workers) is None
    assert others.asked == [d.fingerprint]
    turn(turns, d, NOW + 14.1, *workers)
    assert others.asked == [d.fingerprint] * 2
    others.trials[d.fingerprint].late = True
    assert turn(turns, d, NOW + 61.2, *workers) in workers


def test_a_request_without_suspicion_does_not_join_a_probation_soon() -> None:
    """At the only worker, it waits for the end: else a death there would not name the suspect."""
    for others, worker in (
        (Taken("a"), Worker("a")),
        (Others(), Worker("a").has(suspect("d", likely=True))),
    ):
        turns, new, workers = Turns(0.0, others), flight("n"), [worker]
        turns.open = {flight("w")}
        assert not turns.around(new, workers, NOW)  # type: ignore[arg-type]
        assert not turns.around(new, workers, NOW + 5.0)  # type: ignore[arg-type]
        late = NOW + probation.LAST_WAIT_S
        assert turns.around(new, workers, late) == workers  # type: ignore[arg-type]


def test_an_answer_under_way_does_not_join_a_probation_soon() -> None:
    """It goes to the worker with fewest requests that has none."""
    one, two = Worker("a"), Worker("b").has(flight("x", proven=True))
    turns, stream = Turns(0.0, Taken("a")), suspect("s", likely=False)
    two.has(suspect("d", likely=True))
    late = NOW + probation.STREAM_WAIT_S
    assert turn(turns, stream, NOW, one, two) is None
    assert turn(turns, stream, late, one, two) is None, "both have one"
    three = Worker("c").has(flight("y", proven=True), flight("z", proven=True))
    assert turn(turns, stream, late, one, two, three) is three
    assert turn(turns, stream, NOW + probation.LAST_WAIT_S, one, two) is one


def test_a_probation_is_asked_for_before_the_suspect_is_sent() -> None:
    others, worker = Others(), Worker("a")
    turns, d = Turns(0.0, others), suspect("d", likely=True)
    assert turn(turns, d, NOW, worker) is None
    assert turn(turns, d, NOW + probation.OTHERS_S, worker) is None
    others.trials[d.fingerprint] = Trial("a", ready=False)
    assert turn(turns, d, NOW + 1.1, worker) is None, "another frontend may have something there"
    others.trials[d.fingerprint] = Trial("a")
    assert turn(turns, d, NOW + 1.2, worker) is worker


def test_many_suspects_that_wait_count_the_frontends_once() -> None:
    counted = []

    class Counted(Others):
        @property
        def shared(self) -> bool:  # type: ignore[override]
            counted.append(1)
            return True

    turns, worker = Turns(0.0, Counted()), Worker("a")
    for now, times in ((NOW, 1), (NOW + 1.0, 2)):
        for name in "xyz":
            turn(turns, suspect(name, likely=True), now, worker)
        assert len(counted) == times


def test_under_steady_traffic_others_let_a_suspect_go_first_at_the_only_worker() -> None:
    """It waited as long as there was always one request without an output."""
    workers = [Worker("a")]
    turns, d, now = Turns(0.0, NoProbations()), suspect("d", likely=True), NOW
    turns.last_death = NOW
    found = None
    while found is None and now < NOW + probation.CROWDED_S + 3.0:
        for each in workers[0].flights.values():
            each.proven = now >= each.sent_at + 1.0
        new = flight("n", sent_at=now)
        if turns.around(new, workers, now):  # type: ignore[arg-type]
            workers[0].flights[f"n{now}"] = new
        found, now = turn(turns, d, now, *workers), now + 0.25
    assert found is workers[0]
    assert all(each.proven for each in found.flights.values()), "a death names the suspect"


def test_a_suspect_waits_for_a_bounded_time() -> None:
    """Others have waited for long enough, too, and there is always a new one."""
    worker, now = Worker("a").has(flight("x")), NOW
    turns, d = Turns(0.0, NoProbations()), suspect("d", likely=True)
    while turn(turns, d, now, worker) is None:
        now += 1.0
        assert now < NOW + 100
        worker.flights = {"x": flight("x", sent_at=now)}
    assert now > NOW + probation.CROWDED_S + probation.LAST_WAIT_S
