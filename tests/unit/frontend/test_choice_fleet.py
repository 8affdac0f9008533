"""What a frontend knows of the load of the workers."""

from __future__ import annotations

from pullfill.frontend.routing.choice import FADE, Fleet


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


def test_a_report_from_before_a_request_came_hides_nothing_of_it() -> None:
    fleet = Fleet()
    view = fleet.join("a")
    fleet.send(view, 300.0, 20.0)
    fleet.report("a", queued_tokens=0.0, active_blocks=0.0, free_blocks=100.0)
    assert (view.own_tokens, view.others_tokens, view.others_blocks) == (300.0, 0.0, 0.0)


def test_a_share_ends_once() -> None:
    fleet = Fleet()
    view = fleet.join("a")
    share = fleet.send(view, 300.0, 20.0)
    for _ in range(2):
        share.first()
        share.end(made=40)
    assert (view.own_tokens, view.own_blocks, view.work) == (0.0, 0.0, 340.0)


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


def test_a_worker_that_has_left_is_forgotten_and_its_shares_may_still_end() -> None:
    fleet = Fleet()
    share = fleet.send(fleet.join("a"), 300.0, 20.0)
    fleet.join("b")
    fleet.drop("a")
    share.end()
    fleet.report("a", 1.0, 1.0, 1.0)
    assert list(fleet.views) == ["b"]
