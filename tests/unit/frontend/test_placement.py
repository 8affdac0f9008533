"""Choosing with what workers hold, and with what they will hold."""

from __future__ import annotations

import random

import numpy as np

from pullfill.frontend.decode_choice import Choice, Held
from pullfill.frontend.placement import PREDICTED_S, Placement
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
    placement = Placement(random.Random(1))
    send(placement, choose(placement))
    assert choose(placement, 2.0 * PREDICTED_S + 1).matched_tokens == 0


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


def test_a_worker_that_has_not_taken_a_prompt_is_believed() -> None:
    """Over what it has reported, and over what was predicted: in this choice and in the next."""
    placement = Placement(random.Random(1))
    send(placement, choose(placement, a=100))
    choice = choose(placement, 1.0, a=100)
    assert placement.picture(choice).matched_tokens == 1600
    share = placement.send(choice, 1650, 1.0, block=BLOCK, hashes=HASHES)
    assert share.view.own_tokens == 50
    placement.redirected(share, 10, HASHES)
    among = placement.candidates(["a", "b", "c"])
    again = placement.choose(
        DecodePolicy.KV, 1650, among, 1.0, block=BLOCK, hashes=HASHES,
        stored=Held({"a": 100, "b": 50}), told=("a", 10),
    )  # fmt: skip
    assert (again.view.instance_id, again.matched_tokens) == ("b", 800)
    # Its events come later: until then its index is wrong, but nothing is predicted any more.
    assert choose(placement, 2.0, b=50).view.instance_id == "b"
    assert [view.own_tokens for view in among.views] == [0, 0, 0]


def test_a_worker_may_hold_more_of_a_prompt_than_there_are_hashes() -> None:
    """The hashes of a prompt with images end before the first one."""
    placement = Placement(random.Random(1))
    found = placement.choose(
        DecodePolicy.KV, 650, placement.candidates(["a", "b"]), 0.0, block=BLOCK,
        hashes=HASHES[:5], told=("a", 40),
    )  # fmt: skip
    assert (found.view.instance_id, found.matched_tokens) == ("a", 5 * BLOCK)


def test_the_picture_has_what_is_queued_before_the_prompt_is_sent() -> None:
    placement = Placement(random.Random(1))
    placement.fleet.join("a")
    placement.fleet.report("a", 700.0, 0.0, 1000.0)
    choice = choose(placement, a=100)
    assert choice.view.instance_id == "a"
    assert placement.picture(choice).queued_tokens == 700
    placement.send(choice, 1650, 0.0, block=BLOCK, hashes=HASHES)
    assert placement.picture(choose(placement, a=100)).queued_tokens == 750
