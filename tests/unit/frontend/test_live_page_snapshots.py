"""Snapshots are made while somebody looks, and at no other time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pullfill.frontend.live.page import LiveView
from pullfill.frontend.request_log import RequestLog, RequestRecord
from pullfill.snapshot import FAILED, RECENT, Cluster, Explained, LiveSnapshot, Report, cluster_of
from pullfill.wire import ExplainRecord, ServerStatus
from tests.support.said import blank
from tests.support.workers import FakeDirectory, record


class View:
    """Counts how often the workers are asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails = False
        self.etcd: Any = self
        self.own_id = ""
        self.directory = FakeDirectory()
        self.told = [(record("d", role="decode"), Report(load={"running": 1}))]

    def status(self) -> ServerStatus:
        return ServerStatus(up=True, since_s=1.0)

    def records(self) -> list[Any]:
        return [worker for worker, _ in self.told]

    async def reports(self, *, jobs: bool) -> Any:
        self.asked += jobs
        if self.fails:
            raise RuntimeError("a report that cannot be read")
        return self.told

    def cluster(self, reports: Any, rates: Any) -> Cluster:
        return cluster_of(reports, self.status(), 0.0, rates)


@pytest.fixture
def view() -> View:
    return View()


def live_of(
    view: View,
    requests: RequestLog | None = None,
    made: Any = dict,
    frontend: str = "f",
    **times: float,
) -> LiveView:
    seen: Any = view
    view.own_id = frontend
    return LiveView(
        seen, requests or RequestLog(), tuple, lambda: (1000.0, 50.0), made,
        model="m" if frontend else "", **({"period_s": 0.01} | times),
    )  # fmt: skip


def finish(requests: RequestLog, name: str, ago_s: float = 1.0) -> RequestRecord:
    record = RequestRecord(name, first_token_ms=5.0, arrived_at=time.time() - ago_s)
    record.answer_ms, record.answer_tokens = 900.0, 3
    requests.begin(record)
    requests.tell(record, blank(ExplainRecord, request_id=name, path="local"))
    return record


async def next_of(stream: AsyncIterator[bytes]) -> LiveSnapshot:
    async with asyncio.timeout(5):
        return msgspec.json.decode(await anext(stream), type=LiveSnapshot)


async def test_nothing_is_asked_when_nobody_looks(view: View) -> None:
    live = live_of(view)
    tasks = len(asyncio.all_tasks())
    await asyncio.sleep(0.05)
    assert (view.asked, len(asyncio.all_tasks())) == (0, tasks)
    stream: Any = live.watch()
    await next_of(stream)
    await next_of(stream)
    await stream.aclose()
    asked = view.asked
    assert asked >= 2
    await asyncio.sleep(0.05)
    assert (view.asked, live.viewers) == (asked, 0)
    assert len(asyncio.all_tasks()) == tasks


async def test_a_snapshot_has_the_last_requests_and_the_figures_of_a_minute(view: View) -> None:
    requests = RequestLog()
    for number in range(RECENT + 3):
        last = finish(requests, f"r{number}", ago_s=90.0 if number == RECENT else 1.0)
    requests.tell(last, blank(ExplainRecord, path="remote"))
    stream: Any = live_of(view, requests).watch()
    first = await next_of(stream)
    assert [row.id for row in first.ended] == [f"r{number}" for number in range(3, RECENT + 3)]
    assert first.ended[-1].path == "remote", "told twice, shown once"
    assert first.now.done_per_s == (RECENT + 2) / 60
    assert [row.instance_id for row in first.workers] == ["d"]
    finish(requests, "last")
    while (later := await next_of(stream)).ended[-1].id != "last":
        pass
    assert len(later.ended) == len({row.id for row in later.ended}) == RECENT
    assert later.now.done_per_s == (RECENT + 3) / 60
    requests.over(RequestRecord("bad"), error="no worker")
    while (later := await next_of(stream)).ended[-1].id != "bad":
        pass
    assert (later.ended[-1].path, later.now.done_per_s) == (FAILED, (RECENT + 3) / 60)
    await stream.aclose()


async def test_tokens_are_those_that_came_between_two_looks(view: View) -> None:
    tokens = {"d": 1_000}

    def made() -> dict[str, int]:
        return dict(tokens)

    stream: Any = live_of(view, made=made).watch()
    first = await next_of(stream)
    assert (first.workers[0].tokens_per_s, first.now.tokens_per_s) == (0.0, 0.0)
    tokens["d"] += 30
    while not (part := await next_of(stream)).now.tokens_per_s:
        pass
    rate = part.workers[0].tokens_per_s
    assert rate == part.now.tokens_per_s
    assert rate is not None
    assert 0 < rate < 30 / 0.009
    tokens["d"] = 5
    assert not any([(await next_of(stream)).now.tokens_per_s for _ in range(2)]), "it came back"
    await stream.aclose()


async def test_without_a_frontend_what_workers_have_kept_is_shown_once(view: View) -> None:
    now, live = time.time(), live_of(view, frontend="")

    def kept(worker: str, ago_s: float, **told: Any) -> Explained:
        known = {"arrived_at": now - ago_s, "answer_ms": 500.0, "answer_tokens": 60} | told
        return Explained(
            request_id=f"{worker} {ago_s:g}", path="local", reason="short", prompt_tokens=5,
            decode_instance=worker, **known,
        )  # fmt: skip

    def told(*of: list[Explained]) -> None:
        view.told = [
            (record(ended[0].decode_instance, role="decode", model="llama"),
             Report(load={"running": 2, "waiting": 1}, ended=tuple(ended)))
            for ended in of
        ]  # fmt: skip

    idle, busy = [kept("idle", 90), kept("idle", 20)], [kept("busy", 30), kept("busy", 10)]
    told(idle, busy)
    first = await live.look()
    ids = ["idle 90", "busy 30", "idle 20", "busy 10"]
    assert [row.id for row in first.ended] == ids
    assert (first.frontend, first.model, first.now.in_flight) == ("", "llama", 6)
    assert (first.now.done_per_s, first.now.tokens_per_s) == (3 / 60, 3.0)
    assert {row.tokens_per_s for row in first.workers} == {None}, "nobody counts"
    # A worker tells its last ones each time, and has forgotten one.
    gone = kept("busy", 5, state="cancelled")
    told(idle, [busy[1], gone, kept("busy", 3, error="broken")])
    second = await live.look()
    assert [row.id for row in second.ended] == [*ids, "busy 5", "busy 3"]
    assert [row.path for row in second.ended[4:]] == ["local", FAILED]
    assert second.ended[4].at is None
    assert second.now.done_per_s == 3 / 60
    told(idle, [kept("busy", 0.2 - n / 1000) for n in range(RECENT)])
    assert await live.look()
    told(idle)
    assert "idle 20" not in {row.id for row in (await live.look()).ended}


async def test_viewers_share_the_work_and_a_slow_one_gets_the_newest(view: View) -> None:
    live = live_of(view)
    slow: Any = live.watch()
    quick: Any = live.watch()
    await next_of(slow)
    found = [await next_of(quick) for _ in range(6)]
    assert live.viewers == 2
    assert view.asked <= 8, "not once for each viewer"
    assert (await next_of(slow)).at >= found[-1].at
    await slow.aclose()
    await quick.aclose()
    late = live_of(view, period_s=60.0, quiet_s=60.0)
    stream: Any = late.watch()
    first = await next_of(stream)
    await late._look()
    assert (await next_of(stream)).at > first.at, "at once, not with the next one"
    await stream.aclose()


async def test_a_viewer_hears_something_between_snapshots_but_not_while_they_fail(
    view: View,
) -> None:
    """So a viewer who gives up after a silence does so."""
    live = live_of(view, period_s=60.0, quiet_s=0.02)
    stream: Any = live.watch()
    await next_of(stream)
    assert [await asyncio.wait_for(anext(stream), 5) for _ in range(3)] == [b""] * 3
    await stream.aclose()
    live = live_of(view, quiet_s=0.002)
    view.fails, view.asked, stream = True, 0, live.watch()
    waiting = asyncio.ensure_future(next_of(stream))
    while view.asked < 3:  # noqa: ASYNC110 - the view has no event to wait for
        await asyncio.sleep(0.005)
    view.fails = False
    await waiting
    live.close()
    assert [body async for body in stream] == [body async for body in live.watch()] == []
    assert live.viewers == 0
