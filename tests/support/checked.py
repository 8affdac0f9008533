"""What must hold after every fault, asserted in one place: I1 to I6 of docs/failure-modes.md.

    with checked(cluster, oracle, fallbacks={"prefill_lost": 1}) as check:
        answer = check.ask(prompt)      # and the fault
        with check.load(threads=3) as load: ...

The end of the block checks:

    I1  every request ended once, well and in time
    I2  with the oracle's tokens
    I3  blocks, ledger and quarantine are as before
    I4  the stream is empty
    I5  a new request succeeds, remotely if a prefill worker lives
    I6  the counters moved by exactly what the test says
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.support.cluster import Cluster
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.outages import by_outage
from tests.support.prompts import Answer, ask, assert_right, random_prompt
from tests.support.waiting import patience

Bound = int | tuple[int, int]
"""Exactly so many, or (at least, at most)."""
Sent = tuple[list[int], int, Answer]

STEPS = 6
MANY = 10_000
DEADLINE_S = 60.0
"""Longest a request may take; `Cluster.client` gives up then."""
RECOVERS_S = 30.0

LOST = "prefill_lost"
FALLBACK, STALE = "pullfill_fallback_total", "pullfill_stale_refused_total"
_DECISION, _STAGES = "pullfill_decision_total", "pullfill_handoff_stage_seconds_count"
_DEAD = "pullfill_dead_letter_total"

_seeds = itertools.count(1_000_000)


class Checked:
    """The requests of one test, and how far the cluster's counters moved since it began.

    Counters of a process die with it: a fault's own victim is not counted, its peers are.
    """

    def __init__(self, cluster: Cluster, oracle: Oracle) -> None:
        self._cluster = cluster
        self._oracle = oracle
        self._sent: list[Sent] = []
        self._loads: list[Load] = []
        self._before = self._now()

    def ask(self, prompt: list[int], steps: int = STEPS) -> Answer:
        """Send one request. Its answer is checked at the end of the block."""
        answer = ask(self._cluster, prompt, steps)
        self._sent.append((prompt, steps, answer))
        return answer

    def load(self, **options: Any) -> Load:
        """Steady load. Its answers are checked at the end of the block."""
        self._loads.append(Load(self._cluster, **options))
        return self._loads[-1]

    def told(self, answer: Answer) -> dict[str, Any]:
        return self._cluster.explain(answer.request_id)

    # ------------------------------------------------------------------ counters

    def _now(self) -> dict[tuple[tuple[str, str], ...], float]:
        return self._cluster.samples(FALLBACK, STALE, _DECISION, _STAGES, _DEAD)

    def moved(self, name: str, label: str) -> dict[str, int]:
        """By how much a counter moved, by the values of one of its labels; without zeros. A
        process that began anew under the same name counts from zero."""
        found: dict[str, int] = {}
        for key, value in self._now().items():
            labels = dict(key)
            if labels["__name__"] == name:
                before = self._before.get(key, 0.0)
                by = value - before if value >= before else value
                found[labels.get(label, "")] = found.get(labels.get(label, ""), 0) + round(by)
        return {value: by for value, by in found.items() if by}

    def fallbacks(self) -> dict[str, int]:
        return self.moved(FALLBACK, "cause")

    def stale(self) -> dict[str, int]:
        return self.moved(STALE, "what")

    # ------------------------------------------------------------------ the six

    def check_answers(self) -> None:
        """I1 and I2 of what was asked in this block."""
        for load in self._loads:
            load.check(self._oracle, at_least=1)
            assert load.slowest_s < DEADLINE_S
        for steps in {s for _, s, _ in self._sent}:
            some = [(p, a) for p, s, a in self._sent if s == steps]
            assert_right(self._oracle, [p for p, _ in some], [a for _, a in some], steps)

    def check_counters(
        self,
        fallbacks: Mapping[str, Bound],
        stale: Mapping[str, Bound],
        dead_letters: Bound,
        cancelled: Bound,
    ) -> None:
        """I6, and that every remote prefill ended once: loaded, fallen back or cancelled."""
        fell = self.fallbacks()
        bound = fallbacks.get(LOST, 0)
        if fell.get(LOST, 0) > (most := bound if isinstance(bound, int) else bound[1]):
            # Jobs that a worker took back because NATS was silent for 0.6 s are no fault of a test.
            fallbacks = {**fallbacks, LOST: (0, most + self._lost_by_outage())}
        _compare(fell, fallbacks, "fallbacks")
        _compare(self.stale(), stale, "stale refusals")
        _compare(self.moved(_DEAD, ""), {"": dead_letters}, "dead letters")
        remote = self.moved(_DECISION, "path").get("remote", 0)
        loaded = self.moved(_STAGES, "stage").get("commit", 0)
        _compare({"": remote - loaded - sum(fell.values())}, {"": cancelled}, "cancelled")

    def _lost_by_outage(self) -> int:
        answers = [answer for _, _, answer in self._sent]
        answers += [answer for load in self._loads for _, answer in load.done]
        told = [self.told(answer) for answer in answers]
        return sum(t["fallback"] == LOST and by_outage(t) for t in told)

    def check_recovered(self) -> None:
        """I5: a new request succeeds, over the remote path if there is one; until it does, each is
        answered rightly all the same."""
        self._cluster.set_router(policy="always_remote", remote_timeout_s=30)
        prefill = self._cluster.of("prefill")
        for worker in prefill:
            worker.arm("")
        give_up = time.monotonic() + patience(RECOVERS_S)
        while True:
            prompt = random_prompt(700, seed=next(_seeds))
            answer = ask(self._cluster, prompt, STEPS)
            assert_right(self._oracle, [prompt], [answer], STEPS)
            if not prefill or (told := self.told(answer))["path"] == "remote":
                return
            assert time.monotonic() < give_up, f"remote prefill does not come back: {told}"


def _compare(found: Mapping[str, int], wanted: Mapping[str, Bound], what: str) -> None:
    for key in found.keys() | wanted.keys():
        bound = wanted.get(key, 0)
        low, high = (bound, bound) if isinstance(bound, int) else bound
        count = found.get(key, 0)
        assert low <= count <= high, f"{what}: {key} {count}, not {bound}; all: {dict(found)}"


@contextmanager
def checked(
    cluster: Cluster,
    oracle: Oracle,
    *,
    fallbacks: Mapping[str, Bound] | None = None,
    stale: Mapping[str, Bound] | None = None,
    dead_letters: Bound = 0,
    cancelled: Bound = 0,
) -> Iterator[Checked]:
    """See the module.

    fallbacks, stale: number by cause and by what. What is not named must not occur.
    cancelled: number of remote prefills whose clients went away."""
    check = Checked(cluster, oracle)
    yield check
    check.check_answers()
    cluster.assert_clean()
    check.check_counters(fallbacks or {}, stale or {}, dead_letters, cancelled)
    check.check_recovered()
    cluster.assert_clean()
