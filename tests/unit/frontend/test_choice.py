"""The policies that choose a decode worker."""

from __future__ import annotations

import random

import pytest

from pullfill.frontend.routing.choice import (
    ALPHA,
    FADE,
    KNOWN,
    Candidates,
    Chooser,
    Fleet,
    HeldBlocks,
    Placer,
    Prompt,
    WorkerChoice,
    WorkerView,
)
from pullfill.wire import DecodePolicy

BLOCK = 16
HASHES = range(1000, 1200)
Ask = tuple[Prompt, HeldBlocks]


def views(*names: str) -> Candidates:
    return {name: WorkerView(name) for name in sorted(names)}


def chooser() -> Chooser:
    return Chooser(random.Random(1))


def ask(tokens: int = 1600, *, stored: int = -1, warm: bool = True, **matched: int) -> Ask:
    """A prompt of which the workers hold so many blocks."""
    most = max(matched.values(), default=0) if stored < 0 else stored
    prompt = Prompt(tokens, BLOCK, HASHES[: tokens // BLOCK])
    return prompt, HeldBlocks(matched, 0, most, warm)


def by_policy(policy: DecodePolicy, by: Chooser, what: Ask, among: Candidates) -> WorkerChoice:
    return by.choose(policy, *what, among)


def kv(by: Chooser, what: Ask, among: Candidates) -> WorkerChoice:
    return by_policy(DecodePolicy.KV, by, what, among)


def test_round_robin_gives_each_worker_a_turn_and_keeps_its_place_when_one_leaves() -> None:
    by, among = chooser(), views("c", "a", "b")

    def turn(among: Candidates) -> str:
        return by_policy(DecodePolicy.ROUND_ROBIN, by, ask(), among).view.instance_id

    assert [turn(among) for _ in range(4)] == ["a", "b", "c", "a"]
    assert turn(views("a", "c")) == "c"
    assert turn(views("a", "c")) == "a"


@pytest.mark.parametrize(
    "field", ["others_tokens", "own_tokens", "others_blocks", "own_blocks", "work"]
)
def test_least_loaded_avoids_each_kind_of_load(field: str) -> None:
    among = views("a", "b")
    setattr(among["a"], field, 500.0)
    choice = by_policy(DecodePolicy.LEAST_LOADED, chooser(), ask(a=90), among)
    assert (choice.view.instance_id, choice.reason) == ("b", "load")


def test_a_prompt_goes_where_its_prefix_is() -> None:
    choice = kv(chooser(), ask(b=90), views("a", "b", "c"))
    assert (choice.view.instance_id, choice.matched_tokens, choice.reason) == ("b", 1440, "prefix")
    assert choice.score == ALPHA * 160


def test_a_queue_that_costs_more_than_the_prefix_saves_turns_a_prompt_away() -> None:
    among = views("a", "b")
    saved = ALPHA * 1440
    among["b"].others_tokens = saved - 10
    assert kv(chooser(), ask(b=90), among).view.instance_id == "b"
    among["b"].others_tokens = saved + 10
    choice = kv(chooser(), ask(b=90), among)
    assert (choice.view.instance_id, choice.reason, choice.matched_tokens) == ("a", "balance", 0)


def test_a_short_prefix_is_not_followed() -> None:
    among = views("a", "b")
    among["b"].own_tokens = 1.0
    choice = kv(chooser(), ask(b=9), among)
    assert (choice.view.instance_id, choice.reason) == ("a", "no_prefix")
    assert kv(chooser(), ask(b=10), among).view.instance_id == "b"


def test_a_worker_without_room_for_the_prompt_costs_more() -> None:
    among = views("a", "b")
    among["a"].free_blocks, among["b"].free_blocks = 20.0, 100.0
    assert kv(chooser(), ask(), among).view.instance_id == "b"


def test_prompts_that_differ_after_a_shared_prefix_get_to_all_workers() -> None:
    """No queue, no load: only what was sent lately tells the workers apart."""
    by, among, held = chooser(), views("a", "b", "c", "d"), {"a": 90}
    for _ in range(200):
        choice = kv(by, ask(**held), among)
        choice.view.work += 1600 - choice.matched_tokens
        held[choice.view.instance_id] = 90
    works = [view.work for view in among.values()]
    assert max(works) <= 1.1 * sum(works) / 4


def test_a_prefix_that_many_others_hold_too_is_not_crowded() -> None:
    names = [f"w{n}" for n in range(200)]
    among, held = views(*names), dict.fromkeys(names[:KNOWN], 90)
    for more, full in ((0, False), (900, True)):
        by = chooser()
        for _ in range(1000):
            what = ask()[0], HeldBlocks(held, more, 90)
            choice = kv(by, what, among)
        assert (choice.score == ALPHA * 160) is full


def test_a_conversation_stays_although_its_worker_has_done_all_the_work() -> None:
    by, among = chooser(), views("a", "b")
    for turn in range(1, 15):
        choice = kv(by, ask(160 * turn, a=10 * (turn - 1)), among)
        assert choice.view.instance_id == "a"
        choice.view.work += 160


def test_siblings_of_a_burst_stay_together() -> None:
    """Their prefix is computed, not stored: it is not taken for one that many prompts share."""
    by, among = chooser(), views("a", "b")
    for _ in range(16):
        choice = kv(by, ask(stored=0, a=90), among)
        assert choice.view.instance_id == "a"
        choice.view.own_tokens += 160


def test_a_cold_index_names_the_same_two_workers_at_every_frontend() -> None:
    among = views(*(f"w{n}" for n in range(20)))
    cold = ask(warm=False)
    first = {kv(Chooser(random.Random(n)), cold, among).view.instance_id for n in range(20)}
    assert len(first) == 1
    among[first.pop()].own_tokens = 9000.0
    choice = kv(chooser(), cold, among)
    assert choice.reason == "hashed"
    longer = ask(1900, warm=False)  # the next turn
    assert kv(chooser(), longer, among).view is choice.view


def test_one_worker_needs_no_choice_and_unknown_blocks_no_match() -> None:
    assert kv(chooser(), ask(), views("a")).reason == "only"
    assert kv(chooser(), (Prompt(100), HeldBlocks({})), views("a", "b")).reason == "no_prefix"


def test_more_frontends_count_a_shared_prefix_for_each_other() -> None:
    def sent_before_another_is_tried(peers: int) -> int:
        by, among = chooser(), views("a", "b")
        by.peers = peers
        for number in range(1000):
            choice = kv(by, ask(a=90), among)
            if choice.view.instance_id == "b":
                return number
            choice.view.work += 160
        return 1000

    assert sent_before_another_is_tried(8) < sent_before_another_is_tried(1) < 100


# --------------------------------------------------------------------------- the load


def test_a_report_counts_others_and_our_own_is_not_counted_twice() -> None:
    fleet = Fleet()
    view = fleet.join("a")
    share = fleet.send(view, 300.0, 20.0)
    fleet.report("a", queued_tokens=1000.0, active_blocks=50.0, free_blocks=950.0)
    assert (view.own_tokens + view.others_tokens, view.own_blocks + view.others_blocks) == (
        1000,
        50,
    )
    fleet.send(view, 100.0, 7.0)
    assert (view.own_tokens + view.others_tokens, view.free_blocks) == (1100.0, 943.0)
    share.first()
    assert (view.own_tokens, view.others_tokens, view.own_blocks) == (100.0, 700.0, 27.0)


def test_a_worker_that_joins_gets_the_mean_of_recent_work() -> None:
    fleet = Fleet()
    a, b = fleet.join("a"), fleet.join("b")
    fleet.send(a, 300.0, 1.0)
    fleet.send(b, 100.0, 1.0)
    assert fleet.join("c").work == 200.0
    assert fleet.join("a").work == 300.0


def test_work_fades_with_work() -> None:
    fleet = Fleet()
    a, b = fleet.join("a"), fleet.join("b")
    fleet.send(a, 10_000.0, 1.0)
    for _ in range(2 * FADE - 1):
        fleet.send(b, 0.0, 1.0)
    assert 4900 < a.work < 5100


# --------------------------------------------------------------------------- both together


PROMPT = Prompt(1650, BLOCK, range(1, 101))


def placed(placement: Placer, now: float = 0.0, **stored: int) -> WorkerChoice:
    among = placement.candidates(["a", "b", "c"])
    return placement.choose(DecodePolicy.KV, PROMPT, among, now, HeldBlocks(stored))


def send(placement: Placer, choice: WorkerChoice, now: float = 0.0) -> None:
    placement.send(choice, PROMPT, now).end()


def test_siblings_follow_a_prompt_that_is_not_computed_yet() -> None:
    placement = Placer(random.Random(1))
    first = placed(placement)
    assert first.matched_tokens == 0
    send(placement, first)
    second = placed(placement, 1.0)
    assert second.view is first.view
    assert second.matched_tokens == 1600


def test_what_was_only_predicted_is_forgotten() -> None:
    placement = Placer(random.Random(1), predicted_s=30.0)
    send(placement, placed(placement))
    assert placed(placement, 61.0).matched_tokens == 0


def test_a_worker_that_was_sent_as_much_as_another_has_stored_counts_like_it() -> None:
    placement = Placer(random.Random(1))
    half = Prompt(960, BLOCK, PROMPT.hashes[:60])
    among = placement.candidates(["a", "b", "c"])
    sent = placement.choose(DecodePolicy.ROUND_ROBIN, half, among, 0.0)
    placement.send(sent, half, 0.0).end()
    assert sent.view.instance_id == "a"
    placement.fleet.report("b", 9000.0, 0.0, 1000.0)
    found = placed(placement, b=60)
    assert (found.view.instance_id, found.matched_tokens, found.reason) == ("a", 960, "prefix")


def test_what_only_others_hold_does_not_count() -> None:
    found = placed(Placer(random.Random(1)), gone=100, b=60)
    assert (found.view.instance_id, found.matched_tokens, found.reason) == ("b", 960, "prefix")


def test_a_worker_that_has_left_is_not_predicted_to_hold_anything() -> None:
    placement = Placer(random.Random(1))
    first = placed(placement)
    send(placement, first)
    left = [name for name in "abc" if name != first.view.instance_id]
    share = placement.send(first, PROMPT, 0.0)
    placement.drop(first.view.instance_id)
    share.end()
    among = placement.candidates(left)
    found = placement.choose(DecodePolicy.KV, PROMPT, among, 1.0)
    assert (found.reason, found.matched_tokens) == ("no_prefix", 0)


def test_a_prompt_without_hashes_goes_by_load() -> None:
    placement = Placer(random.Random(1))
    among = placement.candidates(["a", "b"])
    first = placement.choose(DecodePolicy.KV, Prompt(100), among, 0.0)
    placement.send(first, Prompt(100), 0.0)
    assert placement.choose(DecodePolicy.KV, Prompt(100), among, 0.0).view is not first.view
