"""A decode worker whose claims time out one after another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise

import pytest

from pullfill.decode_worker.ledger import Entry, Ledger, Settle
from pullfill.errors import Outcome
from pullfill.wire import Commit, Grant, Progress
from tests.support import said
from tests.support.fakes import FakeClock
from tests.support.loopback import LoopbackFences

CLAIM_S = 10.0
PAUSE_S = (1.0, 5.0)
STALLS = 3
TRIAL_SHARE = 0.2


class Decode:
    """Sends prompts one after another. Each is queued unless the breaker is open."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.ledger = Ledger(LoopbackFences(64), incarnation="i", clock=self.clock)
        self._jobs: Iterator[int] = count()

    def prompt(self, *, later: bool = False, timeout_s: float = 3 * CLAIM_S, to: str = "") -> str:
        """Send a prompt that goes to the queue. Returns its job's id.

        later: `set_digest` is not called yet, so the job is not published.
        to: the only prefill worker that gets it, past the queue."""
        assert not self.ledger.claims.stalled
        job = f"j{next(self._jobs)}"
        self.ledger.open(
            Entry(
                job, f"r-{job}", (1, 2), 0, timeout_s=timeout_s, claim_timeout_s=CLAIM_S,
                stall_s=3 * CLAIM_S, to=to,
            )
        )  # fmt: skip
        if not later:
            self.ledger.set_digest(job, b"d")
        return job

    def claims(self, job: str) -> bool:
        return isinstance(said.grant(self.ledger, job, "i", "prefill-1"), Grant)

    def commits(self, job: str) -> None:
        commit = said.blank(Commit, job_id=job, attempt=1, incarnation="i", blocks=2)
        assert self.ledger.commit(commit, "prefill-1") is None

    def waited(self, job: str) -> float:
        """Return the seconds until a request ends whose job no worker claims."""
        begin = self.clock.now
        while (soonest := self.ledger.tick()) is not None and self.ledger.find(job):
            self.clock.advance(max(soonest, 0.001))
        return self.clock.now - begin

    def outcomes(self) -> list[Outcome]:
        events = self.ledger.take_events()
        return [event.outcome for event in events if isinstance(event, Settle)]

    def stall(self) -> None:
        """Let claims time out until the breaker opens."""
        for _ in range(STALLS):
            assert self.waited(self.prompt()) == pytest.approx(CLAIM_S)
        assert self.ledger.claims.stalled


@pytest.fixture
def decode() -> Decode:
    return Decode()


@pytest.fixture
def half_open(decode: Decode) -> Decode:
    """The pause after the first stalls is over: the next prompt is the trial."""
    decode.stall()
    decode.clock.advance(PAUSE_S[0])
    return decode


def test_after_the_first_few_no_prompt_waits_the_claim_timeout(decode: Decode) -> None:
    decode.stall()
    waits = []
    for _ in range(600):
        decode.clock.advance(0.5)
        waits.append(0.0 if decode.ledger.claims.stalled else decode.waited(decode.prompt()))
    assert max(waits) == pytest.approx(TRIAL_SHARE * CLAIM_S)
    trials = [i for i, wait in enumerate(waits) if wait]
    gaps = [after - before for before, after in pairwise(trials)]
    assert gaps == sorted(gaps), "the pause grows"
    assert gaps[-1] == gaps[-2] == pytest.approx(PAUSE_S[1] / 0.5, abs=2), "up to its limit"


@pytest.mark.parametrize("claimed", [False, True])
def test_a_job_of_the_self_check_says_nothing_about_the_queue(
    half_open: Decode, claimed: bool
) -> None:
    """It goes to its prefill worker directly. Its grant ended the pause while no job arrived."""
    job = half_open.prompt(to="p")
    if claimed:
        assert half_open.claims(job)
        half_open.commits(job)
    else:
        assert half_open.waited(job) == pytest.approx(CLAIM_S)
    trial = half_open.prompt()
    assert half_open.ledger.claims.stalled, "still open, and its trial is this prompt"
    assert half_open.waited(trial) == pytest.approx(TRIAL_SHARE * CLAIM_S)


@pytest.mark.parametrize("published", [False, True])
def test_a_trial_that_is_not_published_in_time_leaves_its_place_to_the_next_prompt(
    half_open: Decode, published: bool
) -> None:
    """Under load, a step may take longer than a trial may wait for its claim. Each such trial made
    the next pause twice as long, although no prefill worker had seen its job."""
    slow = half_open.prompt(later=True)
    if published:
        half_open.clock.advance(2 * TRIAL_SHARE * CLAIM_S)
        half_open.ledger.tick()
        assert half_open.ledger.find(slow), "it waits for its step"
        half_open.ledger.set_digest(slow, b"d")
        assert half_open.claims(slow)
    else:
        assert half_open.waited(slow) == pytest.approx(3 * CLAIM_S)
    half_open.prompt()


def test_it_is_told_until_a_job_is_claimed(half_open: Decode) -> None:
    """A decision and what is told of it are made one after another. The pause may end between."""
    assert not half_open.ledger.claims.closed
    assert half_open.claims(half_open.prompt())
    assert half_open.ledger.claims.closed


def test_what_is_queued_when_it_opens_is_served_here_at_once(decode: Decode) -> None:
    for _ in range(STALLS):
        decode.prompt()
        decode.clock.advance(CLAIM_S / 10)
    for _ in range(5):
        decode.prompt()
    while (soonest := decode.ledger.tick()) is not None and not decode.ledger.claims.stalled:
        decode.clock.advance(max(soonest, 0.001))
    assert decode.ledger.claims.stalled
    assert decode.ledger.open_jobs == 0
    assert decode.outcomes() == [Outcome.CLAIM_TIMEOUT] * STALLS + [Outcome.CLAIMS_STALLED] * 5


def test_a_job_that_waited_while_another_was_claimed_ends_alone(decode: Decode) -> None:
    first = decode.prompt()
    decode.clock.advance(1.0)
    assert decode.claims(decode.prompt())
    last = decode.prompt()
    decode.waited(first)
    assert decode.ledger.find(last)


def test_prompts_do_not_wait_because_a_job_that_was_claimed_before_is_computed(
    decode: Decode,
) -> None:
    """The only prefill worker computes one long prompt all the time."""
    long = decode.prompt()
    assert decode.claims(long)
    decode.clock.advance(0.1)
    for _ in range(STALLS):
        job = decode.prompt()
        moved = Progress(job_id=long, attempt=1, incarnation="i", blocks=0)
        decode.ledger.progress(moved, "prefill-1")  # it gets more time
        decode.waited(job)
    assert decode.ledger.find(long) is not None, "it is not given up"
    assert decode.ledger.claims.stalled
    decode.commits(long)
    decode.clock.advance(PAUSE_S[0])
    assert decode.claims(decode.prompt()), "the prefill worker has nothing to do"
    decode.prompt()
