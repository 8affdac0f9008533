"""Choosing with what workers hold, and with what they will hold."""

from __future__ import annotations

import random

import numpy as np

from pullfill.frontend.routing.choice import Choice, Held, Placement
from pullfill.wire import DecodePolicy

BLOCK = 16
HASHES = np.arange(1, 101, dtype=np.uint64)


def choose(placement: Placement, now: float = 0.0, **stored: int) -> Choice:
    among = placement.candidates(["a", "b", "c"])
    return placement.choose(
        DecodePolicy.KV, 1650, among, now, block=BLOCK, hashes=HASHES, stored=Held(stored)
    )


def send(placement: Placement, choice: Choice, now: float = 0.0) -> None:
    placement.send(choice, 1650, now, block=BLOCK, hashes=HASHES).end()


def test_siblings_follow_a_prompt_that_is_not_computed_yet() -> None:
    placement = Placement(random.Random(1))
    first = choose(placement)
    assert first.matched_tokens == 0
    send(placement, first)
    second = choose(placement, 1.0)
    assert second.view is first.view
    assert second.matched_tokens == 1600


def test_what_was_only_predicted_is_forgotten() -> None:
    placement = Placement(random.Random(1), predicted_s=30.0)
    send(placement, choose(placement))
    assert choose(placement, 61.0).matched_tokens == 0


def test_predicted_blocks_add_to_stored_ones() -> None:
    placement = Placement(random.Random(1))
    send(placement, choose(placement, b=60))
    found = choose(placement, 1.0, a=40, b=60)
    assert (found.view.instance_id, found.matched_tokens) == ("b", 1600)
    found = choose(placement, 1.0, a=100, b=60)
    assert (found.view.instance_id, found.matched_tokens) == ("a", 1600)


def test_a_worker_that_has_left_is_not_predicted_to_hold_anything() -> None:
    placement = Placement(random.Random(1))
    first = choose(placement)
    send(placement, first)
    left = [name for name in "abc" if name != first.view.instance_id]
    placement.drop(first.view.instance_id)
    among = placement.candidates(left)
    found = placement.choose(DecodePolicy.KV, 1650, among, 1.0, block=BLOCK, hashes=HASHES)
    assert (found.reason, found.matched_tokens) == ("no_prefix", 0)


def test_a_prompt_without_hashes_goes_by_load() -> None:
    placement = Placement(random.Random(1))
    among = placement.candidates(["a", "b"])
    first = placement.choose(DecodePolicy.KV, 100, among, 0.0)
    placement.send(first, 100, 0.0)
    assert placement.choose(DecodePolicy.KV, 100, among, 0.0).view is not first.view
