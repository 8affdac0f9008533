"""The proof of the cluster key, without any connection: what test_control_auth.py cannot try."""

from __future__ import annotations

import pytest

from pullfill.errors import AuthFailed
from pullfill.net.handshake import CONTROL, KV_PORT, Acceptance, Introduction
from pullfill.net.security import ClusterKey
from pullfill.wire import AuthChallenge

KEY = ClusterKey(b"k" * 32)


def challenged(here: Introduction, there: Acceptance) -> AuthChallenge:
    challenge = there.challenge(here.hello)
    assert challenge is not None
    return challenge


def test_a_key_proves_nothing_for_another_purpose() -> None:
    here, there = Introduction(KEY, CONTROL), Acceptance(KEY, KV_PORT)
    with pytest.raises(AuthFailed, match="the decode worker has another cluster key"):
        here.answer(challenged(here, there))


def test_a_proof_taken_from_another_connection_is_refused() -> None:
    here, there, again = Introduction(KEY, CONTROL), *(Acceptance(KEY, CONTROL) for _ in range(2))
    proof, _, _ = here.answer(challenged(here, there))
    challenged(here, again)
    with pytest.raises(AuthFailed, match="the prefill worker has another cluster key"):
        again.check(proof)
