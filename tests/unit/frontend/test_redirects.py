"""Requests that decode workers redirect, over real ZMQ connections to fake decode workers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client import REGISTRY

from pullfill.engine.front_wire import LoadReport, Redirect, RedirectReason
from pullfill.frontend.explain import key_of
from pullfill.wire import DecodePolicy, ExplainRecord
from tests.support.fake_decode import FakeDecode
from tests.support.fake_vllm import Request, answer, request
from tests.support.frontend_rig import Rig, rig, until

PROMPT = list(range(10, 1010))
IDLE = LoadReport(running=0, waiting=0, uncached_tokens_queued=0, active_blocks=0, free_blocks=1000)
BUSY = msgspec.structs.replace(IDLE, uncached_tokens_queued=50_000)


def redirect(reason: RedirectReason, load: LoadReport = IDLE, held: int = 0) -> Redirect:
    return Redirect(request_id="", reason=reason, held_tokens=held, load=load)


FULL = redirect(RedirectReason.QUEUE_FULL, BUSY)
GONE = redirect(RedirectReason.PREFIX_GONE)


def pair(**made: object) -> tuple[FakeDecode, FakeDecode]:
    """Both say that they are idle."""
    one, two = (
        FakeDecode(name, prefix_block_size=16, load=IDLE) for name in ("decode-1", "decode-2")
    )
    for name, value in made.items():
        setattr(one, name, value)
        setattr(two, name, value)
    return one, two


def counted(reason: RedirectReason, result: str) -> float:
    labels = {"reason": reason.value, "result": result}
    return REGISTRY.get_sample_value("pullfill_redirect_total", labels) or 0.0


async def told(r: Rig, name: str, asked: Request | None = None) -> ExplainRecord:
    """Send a request and return its record."""
    asked = asked or request(f"{name}-0-1234abcd", PROMPT)
    r.dispatcher.submit(asked)
    return await r.told(key_of(asked.request_id, asked.external_req_id))


def placed(*workers: FakeDecode) -> tuple[FakeDecode, FakeDecode]:
    """The worker that had something, and the other."""
    one, two = workers
    return (one, two) if one.added or one.pictures else (two, one)


@pytest.mark.parametrize("policy", [DecodePolicy.KV, DecodePolicy.LEAST_LOADED])
async def test_a_full_worker_sends_the_request_to_the_other_one(policy: DecodePolicy) -> None:
    one, two = pair(redirect=FULL)
    before = counted(RedirectReason.QUEUE_FULL, "moved")
    async with rig(one, two, policy=policy) as r:
        await r.ready(2)
        record = await told(r, "cmpl-x")
        first, other = placed(one, two) if one.pictures else (two, one)
        assert len(first.pictures) == 1
        assert [q.request_id for q in other.added] == ["cmpl-x-0-1234abcd~1"]
        assert other.pictures == [], "the second worker had to take it"
        assert r.sink.tokens["cmpl-x-0-1234abcd"] == answer(PROMPT, 4)
        assert (record.redirected_from, record.redirect_reason) == (first.instance_id, "queue_full")
        assert record.migrated_from == ()
        assert counted(RedirectReason.QUEUE_FULL, "moved") == before + 1
        views = r.dispatcher.balancer._placement.fleet.views
        await until(lambda: r.dispatcher.in_flight == 0)
        assert [view.own_tokens for view in views.values()] == [0, 0]
        assert views[first.instance_id].others_tokens == 50_000


async def test_the_second_worker_is_the_first_one_if_that_is_still_the_best() -> None:
    one, two = pair(redirect=redirect(RedirectReason.QUEUE_FULL, IDLE, held=992))
    before = counted(RedirectReason.QUEUE_FULL, "stayed")
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        record = await told(r, "cmpl-x")
        first, other = placed(one, two)
        assert [q.request_id for q in first.added] == ["cmpl-x-0-1234abcd~1"]
        assert other.added == []
        assert record.redirected_from is None
        assert record.decode_choice is not None
        assert record.decode_choice.matched_tokens == 992
        assert counted(RedirectReason.QUEUE_FULL, "stayed") == before + 1


async def test_a_redirect_rebuilds_no_table_of_the_balancer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[list[str]] = []
    one, two = pair(redirect=FULL)
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        placement = r.dispatcher.balancer._placement
        found = placement.candidates
        monkeypatch.setattr(placement, "candidates", lambda ids: made.append(ids) or found(ids))
        for number in range(3):
            await told(r, f"cmpl-{number}")
        assert len(one.pictures) + len(two.pictures) == 3
        assert len(made) == 1, made


async def test_a_prefix_that_is_gone_is_not_expected_any_more() -> None:
    """The frontend had only predicted it: it had sent the prompt there."""
    one, two = pair()
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        await told(r, "cmpl-1")
        first, other = placed(one, two)
        await told(r, "cmpl-2")
        assert first.pictures[-1].matched_tokens == 992
        first.redirect = GONE
        record = await told(r, "cmpl-3")
        assert first.pictures[-1].matched_tokens == 992
        assert (len(first.added), len(other.added)) == (2, 1)
        assert (record.redirected_from, record.redirect_reason) == (
            first.instance_id,
            "prefix_gone",
        )
        first.redirect = None
        await told(r, "cmpl-4")
        assert len(other.added) == 2, "the other one has it now"


@pytest.mark.parametrize("reason", [RedirectReason.DRAINING, RedirectReason.INTAKE_FULL])
async def test_a_worker_that_cannot_take_it_is_not_asked_again(reason: RedirectReason) -> None:
    one, two = pair(redirect=redirect(reason, IDLE, held=992))
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        record = await told(r, "cmpl-x")
        assert record.redirect_reason == reason
        assert sorted((len(one.added), len(two.added))) == [0, 1]
        assert len(one.pictures) + len(two.pictures) == 1


@pytest.mark.parametrize("case", ["one worker", "turns", "off", "several choices"])
async def test_what_must_go_where_it_goes_is_never_redirected(case: str) -> None:
    one, two = pair(redirect=FULL)
    workers = (one,) if case == "one worker" else (one, two)
    policy = DecodePolicy.ROUND_ROBIN if case == "turns" else DecodePolicy.KV
    async with rig(*workers, policy=policy, redirect=case != "off") as r:
        await r.ready(len(workers))
        asked = request("cmpl-x-0-1234abcd", PROMPT)
        if case == "several choices":
            asked.request_id, asked.external_req_id = "0_cmpl-x-0-1234abcd", "cmpl-x-0"
        await told(r, "cmpl-x", asked)
        assert one.pictures == two.pictures == []
    if case == "one worker":
        two.start().die()


async def test_the_second_worker_dies_and_nobody_redirects_any_more() -> None:
    one, two = pair(redirect=FULL, step_s=0.02)
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        name = "cmpl-x-0-1234abcd"
        r.dispatcher.submit(request(name, PROMPT, max_tokens=40))
        await until(lambda: len(r.sink.tokens.get(name, ())) > 5)
        second, first = placed(one, two) if one.added else (two, one)
        assert len(first.pictures) == 1
        second.die()
        await until(lambda: name in r.sink.finished or bool(r.sink.failures))
        assert not r.sink.failures
        assert r.sink.tokens[name] == answer(PROMPT, 40)
        assert len(first.pictures) == 1
        assert [q.request_id for q in first.added] == [f"{name}~2"]
        record = await r.told("cmpl-x-0")
        assert (record.redirected_from, record.migrated_from) == (
            first.instance_id,
            (second.instance_id,),
        )


async def test_an_abort_that_crosses_a_redirect_wins() -> None:
    one, two = pair(redirect=FULL)
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a", PROMPT))
        r.dispatcher.abort(["a"])
        await until(lambda: bool(one.pictures or two.pictures))
        await asyncio.sleep(0.05)
        assert (r.dispatcher.in_flight, one.added, two.added) == (0, [], [])
        assert not r.sink.failures


async def test_a_redirect_of_a_request_that_must_be_taken_breaks_the_connection() -> None:
    """And the request goes on elsewhere, as it does from any worker that talks nonsense."""
    one, two = pair(hold=True)
    async with rig(one, two, policy=DecodePolicy.ROUND_ROBIN) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a", PROMPT))
        await until(lambda: bool(one.added or two.added))
        first, other = placed(one, two)
        other.hold = False
        lie = msgspec.structs.replace(FULL, request_id="a")
        first.send_raw(b"RDIR", msgspec.msgpack.encode(lie))
        await until(lambda: "a" in r.sink.finished)
        assert [q.request_id for q in other.added] == ["a~1"]
        assert r.sink.gone == [first.instance_id]
