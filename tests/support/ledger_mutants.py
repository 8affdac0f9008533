"""Ledgers broken in one place each, for proof that the model's checks can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pullfill.decode_worker.ledger import (
    CancelMessage,
    Entry,
    Hold,
    JobState,
    Ledger,
    Release,
    Said,
)
from pullfill.errors import Outcome
from pullfill.wire import Claim, Commit, Ready
from tests.support.loopback import LoopbackFences

Patch = pytest.MonkeyPatch


def skips_the_fence_proof(patch: Patch) -> None:
    real = Ledger._ask_proof

    def ask(self: Ledger, entry: Entry) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LoopbackFences, "try_revoke", lambda *_: True)
            return real(self, entry)

    patch.setattr(Ledger, "_ask_proof", ask)


def commits_without_a_proof(patch: Patch) -> None:
    real = Ledger.commit

    def commit(self: Ledger, said: Commit, writer: str) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LoopbackFences, "try_revoke", lambda *_: True)
            return real(self, said, writer)

    patch.setattr(Ledger, "commit", commit)


def settles_twice(patch: Patch) -> None:
    real = Ledger._settle

    def settle(self: Ledger, entry: Entry, outcome: Outcome) -> None:
        for _ in range(2):
            entry.settled = False
            real(self, entry, outcome)

    patch.setattr(Ledger, "_settle", settle)


def after_give_up(then: Callable[[Ledger, Entry], None]) -> Callable[[Patch], None]:
    real = Ledger._give_up

    def give_up(self: Ledger, entry: Entry, outcome: Outcome) -> None:
        real(self, entry, outcome)
        then(self, entry)

    return lambda patch: patch.setattr(Ledger, "_give_up", give_up)


def release_now(self: Ledger, entry: Entry) -> None:
    if entry.held:
        entry.held = False
        self._events.append(Release(entry.job_id))


def forget_hold(self: Ledger, entry: Entry) -> None:
    if entry.held:
        entry.held = False
        self._events.remove(Hold(entry.job_id, entry.blocks))


def hold_targets_only(self: Ledger, entry: Entry) -> None:
    """What a writer may still read is not held."""
    if entry.held:
        held = self._events.index(Hold(entry.job_id, entry.blocks))
        self._events[held] = Hold(entry.job_id, entry.blocks[entry.first_target :])


def forget_message(self: Ledger, entry: Entry) -> None:
    for action in [a for a in self._actions if isinstance(a, CancelMessage)]:
        self._actions.remove(action)


def forget_release(patch: Patch) -> None:
    real = Ledger._ask_proof

    def ask(self: Ledger, entry: Entry) -> bool:
        entry.held = False
        return real(self, entry)

    patch.setattr(Ledger, "_ask_proof", ask)


def accepts_a_stale_attempt(patch: Patch) -> None:
    def held(self: Ledger, said: Said, writer: str, *states: JobState) -> Any:
        entry = self._jobs.get(said.job_id)
        return entry if entry is not None and entry.state in states else None

    patch.setattr(Ledger, "_held", held)


def accepts_an_old_incarnation(patch: Patch) -> None:
    real = Ledger.grant

    def grant(self: Ledger, claim: Claim, writer: str) -> Any:
        return real(self, msgspec.structs.replace(claim, incarnation=self.incarnation), writer)

    patch.setattr(Ledger, "grant", grant)


def before_grant(change: Callable[[Entry], None]) -> Callable[[Patch], None]:
    real = Ledger.grant

    def grant(self: Ledger, claim: Claim, writer: str) -> Any:
        if (entry := self._jobs.get(claim.job_id)) is not None:
            change(entry)
        return real(self, claim, writer)

    return lambda patch: patch.setattr(Ledger, "grant", grant)


def to_a_second_writer(entry: Entry) -> None:
    if entry.state is JobState.GRANTED:
        entry.state = JobState.QUEUED


def steals(patch: Patch) -> None:
    """A claim takes the job from a holder that is alive."""
    real = Ledger.grant

    def grant(self: Ledger, claim: Claim, writer: str) -> Any:
        entry = self._jobs.get(claim.job_id)
        if entry is not None and entry.state is JobState.GRANTED and entry.writer != writer:
            self._revoke(entry, "claimed_by_another", requeue=True)
        return real(self, claim, writer)

    patch.setattr(Ledger, "grant", grant)


def out_of_quarantine(entry: Entry) -> None:
    if entry.state is JobState.QUARANTINED and not entry.settled:
        entry.state, entry.fence = JobState.QUEUED, None


def while_it_is_read(entry: Entry) -> None:
    if entry.state is JobState.READING:
        entry.state, entry.reading = JobState.QUEUED, False


def takes_a_reader_for_quiet(patch: Patch) -> None:
    """What is read ends like what nobody writes to."""
    real = Ledger._give_up

    def give_up(self: Ledger, entry: Entry, outcome: Outcome) -> None:
        reading, entry.reading = entry.reading, False
        real(self, entry, outcome)
        entry.reading = reading

    patch.setattr(Ledger, "_give_up", give_up)
    patch.setattr(Ledger, "read_over", _forgiving(Ledger.read_over))


def _forgiving(real: Callable[..., Any]) -> Callable[..., Any]:
    def read_over(self: Ledger, entry: Entry, **rest: Any) -> Any:
        return real(self, entry, **rest) if entry.job_id in self._jobs else "stale"

    return read_over


def uses_what_was_not_read(patch: Patch) -> None:
    real = Ledger.read_over
    patch.setattr(
        Ledger,
        "read_over",
        lambda self, entry, *, good: real(self, entry, good=True),
    )


def reads_beside_the_writer(patch: Patch) -> None:
    """The grant's fence stays open while we read."""
    real = Ledger.ready

    def ready(self: Ledger, said: Ready, writer: str) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LoopbackFences, "try_revoke", lambda *_: True)
            return real(self, said, writer)

    patch.setattr(Ledger, "ready", ready)


def any_block_count(patch: Patch) -> None:
    real = Ledger.commit

    def commit(self: Ledger, said: Commit, writer: str) -> Any:
        if (entry := self._jobs.get(said.job_id)) is not None:
            said = msgspec.structs.replace(said, blocks=entry.targets)
        return real(self, said, writer)

    patch.setattr(Ledger, "commit", commit)


def never_looks_again(patch: Patch) -> None:
    """The timer believes that nothing is open."""
    real = Ledger.tick

    def tick(self: Ledger) -> None:
        real(self)

    patch.setattr(Ledger, "tick", tick)


def asks_for_the_proof_once(patch: Patch) -> None:
    """The timer waits for a deadline, not for the proof."""
    real = Ledger.tick

    def tick(self: Ledger) -> float | None:
        real(self)
        now = self._clock.monotonic()
        quarantined = JobState.QUARANTINED
        return min(
            (
                (entry.deadline if entry.state is quarantined else entry.due) - now
                for entry in self._jobs.values()
            ),
            default=None,
        )

    patch.setattr(Ledger, "tick", tick)


def waits_for_a_stopped_writer(patch: Patch) -> None:
    """A request waits for the proof until its deadline."""
    real = Ledger._expire

    def expire(self: Ledger, entry: Entry) -> None:
        if entry.state is not JobState.QUARANTINED or self._clock.monotonic() >= entry.deadline:
            real(self, entry)

    patch.setattr(Ledger, "_expire", expire)


def waits_for_a_reader(patch: Patch) -> None:
    """What is read does not expire."""
    real = Ledger._expire

    def expire(self: Ledger, entry: Entry) -> None:
        if entry.state is not JobState.READING:
            real(self, entry)

    patch.setattr(Ledger, "_expire", expire)


def never_expires(patch: Patch) -> None:
    patch.setattr(Ledger, "_expire", lambda *_: None)


def waits_without_a_worker(patch: Patch) -> None:
    real = Ledger.writer_lost
    patch.setattr(
        Ledger,
        "writer_lost",
        lambda self, writer, *, others_alive: real(self, writer, others_alive=True),
    )


def leaks_fence_slots(patch: Patch) -> None:
    """A fence slot leaks at each proof."""
    real = LoopbackFences.try_revoke

    def revoke(self: LoopbackFences, token: Any) -> bool:
        quiet = real(self, token)
        if quiet and self._free and self._free[-1] == token.slot:
            self._free.pop()
        return quiet

    patch.setattr(LoopbackFences, "try_revoke", revoke)


def miscounts(patch: Patch) -> None:
    """What a writer reports as written changes no sum."""
    real = Ledger.progress

    def progress(self: Ledger, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Ledger, "_count", lambda *_: None)
            real(self, *args)

    patch.setattr(Ledger, "progress", progress)


BROKEN: dict[str, Callable[[Patch], None]] = {
    "skips the fence proof": skips_the_fence_proof,
    "commits without a proof": commits_without_a_proof,
    "settles twice": settles_twice,
    "releases before the proof": after_give_up(release_now),
    "forgets to hold": after_give_up(forget_hold),
    "holds what is written alone": after_give_up(hold_targets_only),
    "forgets to release": forget_release,
    "forgets the message": after_give_up(forget_message),
    "accepts a stale attempt": accepts_a_stale_attempt,
    "accepts an old incarnation": accepts_an_old_incarnation,
    "grants to a second writer": before_grant(to_a_second_writer),
    "steals from a holder": steals,
    "grants out of quarantine": before_grant(out_of_quarantine),
    "grants what is being read": before_grant(while_it_is_read),
    "takes a reader for quiet": takes_a_reader_for_quiet,
    "uses what was not read": uses_what_was_not_read,
    "reads beside the writer": reads_beside_the_writer,
    "takes any block count": any_block_count,
    "never expires": never_expires,
    "never looks again": never_looks_again,
    "asks for the proof once": asks_for_the_proof_once,
    "waits for a stopped writer": waits_for_a_stopped_writer,
    "waits for a reader": waits_for_a_reader,
    "waits without a worker": waits_without_a_worker,
    "leaks fence slots": leaks_fence_slots,
    "miscounts": miscounts,
}
