"""The policies that choose a decode worker."""

from __future__ import annotations

import random

import pytest

from pullfill.engine.front_wire import LoadReport
from pullfill.frontend.routing.choice import ALPHA, FADE, KNOWN, Placer, Prompt, WorkerView
from pullfill.wire import DecodeChoice, DecodePolicy
from tests.support.said import blank

BLOCK = 16
HASHES = range(1000, 1200)


class Rig:
    """A placer, and the names of the workers that can take a prompt."""

    def __init__(self, *names: str, seed: int = 1) -> None:
        self.placer = Placer(random.Random(seed))
        self.names = names

    def view(self, name: str) -> WorkerView:
        return self.placer.join(name)

    def choose(
        self,
        tokens: int = 1600,
        policy: DecodePolicy = DecodePolicy.KV,
        now: float = 0.0,
        more: int = 0,
        **held: int,
    ) -> tuple[WorkerView, DecodeChoice]:
        """Where a prompt goes of which the workers hold so many blocks."""
        return self.placer.choose(policy, prompt(tokens), self.names, now, held, more)

    def name(self, tokens: int = 1600, **held: int) -> str:
        return self.choose(tokens, **held)[0].instance_id

    def send(self, tokens: int = 1600, now: float = 0.0, **held: int) -> tuple[str, int]:
        """Send such a prompt, which ends at once. Returns where, and how much it found there."""
        view, told = self.choose(tokens, now=now, **held)
        self.placer.send(view, told.matched_tokens, prompt(tokens), now).end()
        return view.instance_id, told.matched_tokens


def prompt(tokens: int) -> Prompt:
    return Prompt(tokens, BLOCK, HASHES[: tokens // BLOCK])


def test_round_robin_gives_each_worker_a_turn_and_keeps_its_place_when_one_leaves() -> None:
    rig = Rig("c", "a", "b")

    def turn() -> str:
        return rig.choose(policy=DecodePolicy.ROUND_ROBIN)[0].instance_id

    assert [turn() for _ in range(4)] == ["a", "b", "c", "a"]
    rig.names = ("a", "c")
    assert [turn(), turn()] == ["c", "a"]


@pytest.mark.parametrize(
    "field", ["others_tokens", "own_tokens", "others_blocks", "own_blocks", "work"]
)
def test_least_loaded_avoids_each_kind_of_load(field: str) -> None:
    rig = Rig("a", "b")
    rig.view("b")
    setattr(rig.view("a"), field, 500.0)
    view, told = rig.choose(policy=DecodePolicy.LEAST_LOADED, a=90)
    assert (view.instance_id, told.reason) == ("b", "load")


def test_a_queue_that_costs_more_than_the_prefix_saves_turns_a_prompt_away() -> None:
    rig, saved = Rig("a", "b"), ALPHA * 1440
    rig.view("b").others_tokens = saved - 10
    assert rig.name(b=90) == "b"
    rig.view("b").others_tokens = saved + 10
    view, told = rig.choose(b=90)
    assert (view.instance_id, told.reason, told.matched_tokens) == ("a", "balance", 0)


def test_a_short_prefix_is_not_followed() -> None:
    rig = Rig("a", "b")
    rig.view("b").own_tokens = 1.0
    view, told = rig.choose(b=9)
    assert (view.instance_id, told.reason) == ("a", "no_prefix")
    assert rig.name(b=10) == "b"


def test_a_worker_without_room_for_the_prompt_costs_more() -> None:
    rig = Rig("a", "b")
    rig.view("a").free_blocks, rig.view("b").free_blocks = 20.0, 100.0
    assert rig.name() == "b"


def test_prompts_that_differ_after_a_shared_prefix_get_to_all_workers() -> None:
    """No queue, no load: only what was sent lately tells the workers apart."""
    rig, held = Rig("a", "b", "c", "d"), {"a": 90}
    for _ in range(200):
        view, told = rig.choose(**held)
        view.work += 1600 - told.matched_tokens
        held[view.instance_id] = 90
    works = [view.work for view in rig.placer.views.values()]
    assert max(works) <= 1.1 * sum(works) / 4


def test_a_prefix_that_many_others_hold_too_is_not_crowded() -> None:
    names = [f"w{n}" for n in range(200)]
    for more, full in ((0, False), (900, True)):
        rig = Rig(*names)
        found = [rig.choose(more=more, **dict.fromkeys(names[:KNOWN], 90)) for _ in range(1000)]
        assert (found[-1][1].score == ALPHA * 160) is full


def test_siblings_of_a_burst_stay_together() -> None:
    """Their prefix is computed, not stored: it is not taken for one that many prompts share."""
    rig = Rig("a", "b")
    rig.send(1440)
    for _ in range(16):
        view, told = rig.choose()
        assert (view.instance_id, told.matched_tokens) == ("a", 1440)
        view.own_tokens += 160
    assert rig.choose(now=61.0)[1].matched_tokens == 0, "predictions are forgotten"


class Packed(Rig):
    """Three workers. With so many streams each the first two get more of them: see test_few.py."""

    def __init__(self, streams: int = 7) -> None:
        super().__init__("a", "b", "c")
        for name in self.names:
            self.view(name).told = blank(
                LoadReport, requests=streams, streams=streams, step_s=(0.006, 0.0002, 0.0)
            )

    def told(self, **held: int) -> tuple[str, str]:
        """Send a prompt that goes on. Returns where, and why."""
        asked = prompt(1600) if held else Prompt(1600)
        view, told = self.placer.choose(DecodePolicy.PACK, asked, self.names, 0.0, held)
        self.placer.send(view, told.matched_tokens, asked, 0.0)
        return view.instance_id, told.reason


def test_pack_leaves_workers_without_streams() -> None:
    """Of the others it takes the least loaded. What they have done before does not count."""
    rig = Packed()
    rig.view("a").work = 1e6
    assert [rig.told() for _ in range(3)] == [("a", "packed"), ("b", "packed"), ("a", "packed")]
    assert [Packed(streams=0).told()[0] for _ in range(2)] == ["a", "a"]
    rig = Packed(streams=100)
    assert [rig.told()[0] for _ in range(3)] == ["a", "b", "c"]


def test_pack_spreads_over_servers_that_tell_no_load() -> None:
    """Stock servers tell none."""
    rig = Packed()
    for name in rig.names:
        rig.view(name).told = None
    assert [rig.told()[0] for _ in range(3)] == ["a", "b", "c"]


def test_streams_move_one_by_one_if_they_stay_unevenly_spread() -> None:
    """Among the first two workers, and from the third to them. Not at once: a wave may pass."""
    rig = Packed()

    def uneven(now: float, *streams: int) -> tuple[str, str] | None:
        for name, count in zip(rig.names, streams, strict=True):
            view = rig.view(name)
            view.told = Packed(count).view(name).told
        return rig.placer.uneven(rig.names, now)

    assert not uneven(0.0, 14, 7, 0)
    assert not uneven(0.9, 14, 7, 0)
    assert uneven(1.0, 14, 7, 0) == ("a", "b")
    assert not uneven(1.1, 13, 8, 0)
    assert uneven(1.3, 13, 8, 0) == ("a", "b")
    assert not uneven(1.5, 10, 11, 0)
    assert not uneven(1.6, 14, 7, 0)
    assert uneven(2.6, 10, 9, 6) == ("c", "b")
    assert uneven(2.9, 11, 9, 5) == ("a", "b")
    assert uneven(3.2, 11, 9, 5) == ("c", "b")
    assert uneven(3.5, 11, 9, 5) == ("a", "b"), "those of the third one may have to stay"
    for name, streams in zip(rig.names, (14, 7, 5), strict=True):
        rig.view(name).told = blank(LoadReport, seats=7, requests=9, streams=streams)
    assert not rig.placer.uneven(rig.names, 6.0), "the second one has no seat"
    rig.view("a").told = None
    assert not rig.placer.uneven(rig.names, 9.0), "stock servers tell nothing"


@pytest.mark.parametrize(
    ("held", "where"),
    [
        ({"b": 90}, ("b", "prefix")),
        ({"a": 50, "b": 90}, ("b", "prefix")),
        ({"b": 9}, ("a", "packed")),  # too short
        ({"c": 90}, ("a", "packed")),  # it gets no streams
        ({"b": 50, "c": 90}, ("b", "prefix")),
    ],
)
def test_pack_goes_where_the_prefix_is_among_workers_with_streams(
    held: dict[str, int], where: tuple[str, str]
) -> None:
    assert Packed().told(**held) == where


def test_one_worker_needs_no_choice_and_without_hashes_the_load_decides() -> None:
    assert Rig("a").choose()[1].reason == "only"
    rig, plain = Rig("a", "b"), Prompt(100)
    for name in ("a", "b"):
        view, told = rig.placer.choose(DecodePolicy.KV, plain, rig.names, 0.0)
        assert (view.instance_id, told.reason) == (name, "no_prefix")
        rig.placer.send(view, 0, plain, 0.0)


def test_a_worker_that_has_left_is_not_predicted_to_hold_anything() -> None:
    rig = Rig("a", "b", "c")
    view, _ = rig.choose()
    share = rig.placer.send(view, 0, prompt(1600), 0.0)
    rig.placer.drop("a")
    share.end()
    rig.placer.join("a")
    assert rig.choose(now=1.0)[1].matched_tokens == 0


# --------------------------------------------------------------------------- the load


def test_a_report_counts_others_and_our_own_is_not_counted_twice() -> None:
    rig = Rig()
    view = rig.view("a")
    share = rig.placer.send(view, 0, Prompt(300, 15), 0.0)
    rig.placer.report("a", queued_tokens=1000.0, active_blocks=50.0, free_blocks=950.0)
    assert view.own_tokens + view.others_tokens == 1000
    assert view.own_blocks + view.others_blocks == 50
    rig.placer.send(view, 0, Prompt(100, 15), 0.0)
    assert (view.own_tokens + view.others_tokens, view.free_blocks) == (1100.0, 943.0)
    share.first()
    assert (view.own_tokens, view.others_tokens, view.own_blocks) == (100.0, 700.0, 27.0)


def test_work_fades_with_work_and_a_worker_that_joins_gets_the_mean() -> None:
    rig = Rig()
    a, b = rig.view("a"), rig.view("b")
    rig.placer.send(a, 0, Prompt(10_000), 0.0)
    assert rig.view("c").work == 5000.0
    assert rig.view("a").work == 10_000.0
    rig.placer.drop("c")
    for _ in range(2 * FADE - 1):
        rig.placer.send(b, 0, Prompt(0), 0.0)
    assert 4900 < a.work < 5100
