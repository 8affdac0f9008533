"""The proof of the cluster key, without any connection."""

from __future__ import annotations

import pytest

from pullfill.errors import AuthFailed
from pullfill.net.handshake import CONTROL, KV_PORT, Acceptance, Introduction, Seal
from pullfill.net.security import ClusterKey
from pullfill.wire import AuthChallenge, AuthProof

OURS, OTHER = ClusterKey(b"k" * 32), ClusterKey(b"o" * 32)


def challenged(here: Introduction, there: Acceptance) -> AuthChallenge:
    challenge = there.challenge(here.hello)
    assert challenge is not None
    return challenge


@pytest.mark.parametrize(("key", "purpose"), [(OTHER, CONTROL), (OURS, KV_PORT)])
def test_another_key_or_purpose_proves_nothing(key: ClusterKey, purpose: str) -> None:
    here, there = Introduction(OURS, CONTROL), Acceptance(key, purpose)
    with pytest.raises(AuthFailed, match="the decode worker has another cluster key"):
        here.answer(challenged(here, there))


def test_a_proof_sent_back_or_taken_from_another_connection_is_refused() -> None:
    here, there = Introduction(OURS, CONTROL), Acceptance(OURS, CONTROL)
    challenge = challenged(here, there)
    with pytest.raises(AuthFailed, match="the prefill worker has another cluster key"):
        there.check(AuthProof(proof=challenge.proof))
    proof, _, _ = here.answer(challenge)
    again = Acceptance(OURS, CONTROL)
    challenged(here, again)
    with pytest.raises(AuthFailed):
        again.check(proof)


def test_only_one_end_has_a_key() -> None:
    with pytest.raises(AuthFailed, match="shows no cluster key"):
        Acceptance(OURS, CONTROL).challenge(object())
    with pytest.raises(AuthFailed, match="has no cluster key"):
        Acceptance(None, CONTROL).challenge(Introduction(OURS, CONTROL).hello)
    assert Acceptance(None, CONTROL).challenge(object()) is None


def test_a_frame_is_taken_once_and_in_order() -> None:
    out, into = Seal(b"k" * 32), Seal(b"k" * 32)
    first, second = out.add(b"a"), out.add(b"b")
    assert into.remove(first) == b"a"
    with pytest.raises(AuthFailed):
        into.remove(first)
    with pytest.raises(AuthFailed):
        Seal(b"k" * 32).remove(second)
