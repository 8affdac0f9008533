"""Ledgers broken in one place each, for proof that the model's checks can fail.

A mutant is a method of `Ledger`, and a text in it that is replaced by another one.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pullfill.decode_worker import ledger
from pullfill.decode_worker.ledger import Ledger
from tests.support.loopback import LoopbackFences

Patch = pytest.MonkeyPatch


def mutated(method: str, old: str, new: str, patch: Patch) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(Ledger, method)))
    assert old in source, f"{method} has changed: change its mutant, too"
    names: dict[str, Any] = dict(vars(ledger))
    exec(source.replace(old, new, 1), names)
    patch.setattr(Ledger, method, names[method])


def leaks_fence_slots(patch: Patch) -> None:
    """A fence slot leaks at each proof."""
    real = LoopbackFences.try_revoke

    def revoke(self: LoopbackFences, token: Any) -> bool:
        quiet = real(self, token)
        if quiet and self._free and self._free[-1] == token.slot:
            self._free.pop()
        return quiet

    patch.setattr(LoopbackFences, "try_revoke", revoke)


_UNDER_WAY = "if entry.state in UNDER_WAY:"
_QUARANTINED = "if entry.state is JobState.QUARANTINED:"
_HOLD = "entry.held = True\n            self._events.append(Hold(entry.job_id, entry.blocks))"

# Name of the mutant: the method, what is replaced in it, and by what.
_MUTANTS = {
    "skips the fence proof": ("_ask_proof", "not proved(self._fences, entry.fence)", "False"),
    "commits without a proof": ("commit", "self._take_over(entry, said.blocks)", "None"),
    "settles twice": ("_settle", "self._events.append", "for _ in range(2): self._events.append"),
    "releases before the proof": (
        "_give_up", _HOLD,
        "self._events += [Hold(entry.job_id, entry.blocks), Release(entry.job_id)]",
    ),
    "forgets to hold": ("_give_up", _HOLD, "pass"),
    "holds what is written alone": (
        "_give_up", "Hold(entry.job_id, entry.blocks)",
        "Hold(entry.job_id, entry.blocks[entry.first_target :])",
    ),
    "forgets to release": ("_ask_proof", "if entry.held:", "if False:"),
    "forgets the message": ("_forget_message", "if entry.receipt is not None:", "if False:"),
    "accepts a stale attempt": ("_held", "if current and", "if"),
    "accepts an old incarnation": (
        "_why_not", "if claim.incarnation != self.incarnation:", "if False:",
    ),
    "grants to a second writer": (
        "_why_not", _UNDER_WAY,
        "if entry.state is JobState.GRANTED:\n        entry.state = JobState.QUEUED\n"
        "    el" + _UNDER_WAY,
    ),
    "steals from a holder": (
        "_why_not", _UNDER_WAY,
        "if entry.state is JobState.GRANTED:\n        self._revoke(entry, '', requeue=True)\n"
        "    " + _UNDER_WAY,
    ),
    "grants out of quarantine": (
        "_why_not", _QUARANTINED,
        _QUARANTINED + "\n        entry.state, entry.fence = JobState.QUEUED, None\n"
        "    " + _QUARANTINED,
    ),
    "grants what is being read": (
        "_why_not", _UNDER_WAY,
        "if entry.state is JobState.READING:\n"
        "        entry.state, entry.reading = JobState.QUEUED, False\n    " + _UNDER_WAY,
    ),
    "takes a reader for quiet": ("_give_up", " or entry.reading:", ":"),
    "uses what was not read": ("read_over", "if good:", "if True:"),
    "reads beside the writer": (
        "ready", "self._take_over(entry, len(said.block_ids) // 4)", "None",
    ),
    "takes any block count": ("_take_over", "if blocks != entry.targets:", "if False:"),
    "never expires": ("tick", "self._expire(entry)", "pass"),
    "never looks again": ("tick", "return None if", "return None if True or"),
    "asks for the proof once": ("tick", "dues.append(now + _ask_again_s", "(now + _ask_again_s"),
    "waits for a stopped writer": ("_expire", "self._give_up(entry, Outcome.QUARANTINED if early",
        "early or self._give_up(entry, Outcome.QUARANTINED if early"),
    "waits for a reader": (
        "_expire", "if entry.state is JobState.QUEUED:",
        "if entry.state is JobState.READING:\n        return\n"
        "    if entry.state is JobState.QUEUED:",
    ),
    "waits without a worker": ("writer_lost", "elif not others_alive:", "elif False:"),
}  # fmt: skip
BROKEN: dict[str, Callable[[Patch], None]] = {
    name: partial(mutated, *how) for name, how in _MUTANTS.items()
}
BROKEN["leaks fence slots"] = leaks_fence_slots
