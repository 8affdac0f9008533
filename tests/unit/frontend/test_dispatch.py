"""Requests over real ZMQ connections to fake decode workers: no vLLM, no processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from pullfill.engine import front_wire
from pullfill.engine.blame import Fault
from pullfill.errors import IncompatibleError, PeerUnavailable
from pullfill.frontend import counters, dispatch
from pullfill.frontend.decode_pool import refuse_other_models
from pullfill.frontend.dispatch import Dispatcher
from pullfill.frontend.flight import WAITS, Waits
from pullfill.frontend.request_log import RequestLog
from pullfill.frontend.routing.balancer import Balancer
from pullfill.wire import MAX_TEXT, DecodePolicy, RouterConfig, WorkerState
from tests.support.fake_vllm import Output, Outputs, PlainCodec, answer, request
from tests.support.frontend_rig import PATIENCE_S, Alone, FakeDecode, Sink, rig
from tests.support.waiting import soon


@pytest.mark.parametrize("tokens", [1, 6])
async def test_tokens_come_back_and_the_record_has_the_frontends_own_timings(tokens: int) -> None:
    """With one token the worker's part of the record comes in the same message."""
    async with rig(FakeDecode()) as r:
        r.dispatcher.submit(request("cmpl-x-0-1234abcd", max_tokens=tokens))
        await soon(lambda: "cmpl-x-0-1234abcd" in r.sink.finished)
        assert r.sink.tokens["cmpl-x-0-1234abcd"] == answer([1, 2, 3], tokens)
        assert not r.dispatcher.flights
        assert r.sink.outs[-1].kv_transfer_params is None
        assert r.pool.made() == {"decode-fake": tokens}
        record = await r.told("cmpl-x-0")
        assert (record.request_id, record.state) == ("cmpl-x-0", "answered")
        assert record.timings_ms.queue == 1.5
        assert record.timings_ms.route is not None
        assert record.timings_ms.first_token is not None
        assert record.timings_ms.first_token >= record.timings_ms.route


async def test_an_endless_id_is_refused() -> None:
    """Clients choose ids. Pages, logs and 10,000 explain records hold them."""
    async with rig(FakeDecode()) as r:
        r.dispatcher.submit(request("x" * MAX_TEXT))
        r.dispatcher.submit(request("y" * (MAX_TEXT + 1)))
        await soon(lambda: "x" * MAX_TEXT in r.sink.finished)
        (name, why), *others = r.sink.failures.items()
        assert (name, others) == ("y" * (MAX_TEXT + 1), [])
        assert f"at most {MAX_TEXT}" in why
        refused = await r.told("y" * (MAX_TEXT + 1))
        assert (refused.state, refused.error) == ("failed", why)


@pytest.mark.essential
async def test_a_request_before_any_worker_waits_for_one() -> None:
    async with rig() as r:
        r.dispatcher.submit(request("early"))
        await asyncio.sleep(0.05)
        r.add(FakeDecode())
        await soon(lambda: "early" in r.sink.finished)


async def test_abort_reaches_the_worker_and_late_outputs_are_dropped() -> None:
    worker = FakeDecode(hold=True)
    async with rig(worker) as r:
        r.dispatcher.submit(request("a"))
        await soon(lambda: bool(worker.added))
        r.dispatcher.abort(["a", "never-heard-of"])
        worker.say(Output("a", [1]))
        await soon(lambda: worker.aborted == ["a"])
        r.dispatcher.submit(request("b"))
        worker.hold = False
        await soon(lambda: "b" in r.sink.finished)
        assert "a" not in r.sink.tokens
        assert not r.dispatcher.flights


async def test_a_frontend_that_leaves_tells_all_its_clients() -> None:
    worker = FakeDecode(hold=True)
    async with rig(worker) as r:
        r.dispatcher.submit(request("a"))
        await soon(lambda: bool(worker.added))
        r.dispatcher.fail_all("this frontend stops")
        r.dispatcher.submit(request("late"))
        assert r.sink.failures == dict.fromkeys(("a", "late"), "this frontend stops")
        assert set(r.sink.faults.values()) == {Fault.WORKERS}
        await soon(lambda: worker.aborted == ["a"])
        assert not r.dispatcher.flights


async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    one, two = FakeDecode("decode-1", step_s=0.01), FakeDecode("decode-2")
    async with rig(one, two) as r:
        r.dispatcher.submit(request("old", max_tokens=20))
        await soon(lambda: bool(one.added))
        one.send_raw(front_wire.DRAIN)
        await r.ready(1)
        for i in range(4):
            r.dispatcher.submit(request(f"new{i}"))
        await soon(lambda: len(r.sink.finished) == 5)
        assert len(one.added) == 1
        assert not r.sink.failures
        r.directory.put(msgspec.structs.replace(two.record, state=WorkerState.DRAINING))
        await r.ready(0)
        await r.pool.stop()
        await soon(lambda: one.byes == two.byes == 1)


async def test_a_key_that_goes_while_the_connection_lives_costs_no_request() -> None:
    worker = FakeDecode(step_s=0.01)
    async with rig(worker) as r:
        r.dispatcher.submit(request("running", max_tokens=20))
        await soon(lambda: "running" in r.sink.tokens)
        r.directory.remove(worker.instance_id)
        r.dispatcher.submit(request("new", max_tokens=2))
        await soon(lambda: len(r.sink.finished) == 2)
        assert not r.sink.failures
        # A listed worker comes first as soon as there is one.
        r.add(FakeDecode("decode-2"))
        await soon(lambda: [c.instance_id for c in r.dispatcher.workers] == ["decode-2"])


async def test_a_refused_or_foreign_worker_is_named_and_not_used() -> None:
    refusing = FakeDecode("decode-1", refuse="vllm_version differs: 0.31.0")
    foreign = FakeDecode("decode-2", model="other")
    async with rig(refusing, foreign, wait=False) as r:
        await soon(lambda: len(r.pool.refusals()) == 2)
        assert any("vllm_version differs" in line for line in r.pool.refusals())
        assert any("serves model 'other', not 'm'" in line for line in r.pool.refusals())
        assert r.pool.trouble() == dispatch.NO_WORKER
        r.directory.remove("decode-1")
        assert len(r.pool.refusals()) == 1
        told = r"namespace 'n': its model is 'm', but that of decode worker decode-2 .* is 'other'"
        with pytest.raises(IncompatibleError, match=told):
            refuse_other_models(r.directory, ("m",), "m", "n")  # type: ignore[arg-type]
        r.directory.remove("decode-2")
        refuse_other_models(r.directory, ("m",), "m", "n")  # type: ignore[arg-type]


async def test_utility_calls_reach_every_worker_and_all_end() -> None:
    one, two = FakeDecode("decode-1"), FakeDecode("decode-2")
    async with rig(one, two) as r:
        call = r.dispatcher.call
        assert await call("reset_prefix_cache", (False,), 5.0) == [True, True]
        assert one.utilities == two.utilities == [("reset_prefix_cache", [False])]
        with pytest.raises(PeerUnavailable, match="no such thing"):
            await call("fail", (), 5.0)
        one.hold = True
        with pytest.raises(PeerUnavailable, match="no answer within"):
            await call("reset_prefix_cache", (), 0.05)
        asking = asyncio.create_task(call("reset_prefix_cache", (), PATIENCE_S * 2))
        await soon(lambda: len(one.utilities) == 4)
        one.die()
        with pytest.raises(PeerUnavailable, match="decode-1"):
            await asyncio.wait_for(asking, PATIENCE_S)
        r.directory.remove("decode-2")
        two.die()
        await r.ready(0)
        with pytest.raises(PeerUnavailable, match="no decode worker"):
            await call("x", (), 1.0)


async def test_nothing_is_left_of_the_load_of_requests_that_ended() -> None:
    """Finished, aborted, failed with their worker, and sent again to another one."""
    one, two = (FakeDecode(f"decode-{n}", prefix_block_size=16) for n in (1, 2))
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        r.dispatcher.submit(request("cmpl-done-0-1234abcd", list(range(10, 410))))
        await r.told("cmpl-done-0")
        one.hold = two.hold = True
        for number in range(4):
            r.dispatcher.submit(request(f"held-{number}", list(range(number, 300))))
        await soon(lambda: len(one.added) + len(two.added) == 5)
        views = r.dispatcher.balancer.placer.views
        assert sum(view.own_tokens for view in views.values()) > 1000
        one.die()
        await soon(lambda: set(views) == {"decode-2"})
        r.dispatcher.abort([f"held-{number}" for number in range(4)])
        assert [(view.own_tokens, view.own_blocks) for view in views.values()] == [(0, 0)]


# ---------------------------------------------------------------------------
# Every request ends, once and in time, whatever goes wrong with another: the dispatcher alone.


class Worker(SimpleNamespace):
    """What the dispatcher sees of a connection. refuse: wire ids whose sending fails."""

    def __init__(self, instance_id: str, *refuse: str) -> None:
        super().__init__(
            instance_id=instance_id, flights={}, calls={}, welcome=None, usable=True, far=False,
            heard_at=asyncio.get_running_loop().time(), made=0, refuse=set(refuse),
        )  # fmt: skip

    def __hash__(self) -> int:
        return id(self)

    def send(self, kind: bytes, *frames: Any) -> None:
        if self.refuse & set(self.flights):
            self.refuse.clear()
            raise OSError("no descriptors left")


class Desk(Sink):
    """A dispatcher with requests at worker A. As in vLLM, those whose names share the first letter
    are choices of one answer, and end with the first that fails."""

    def __init__(self, *requests: Any, waits: Waits = WAITS, never: str = "") -> None:
        super().__init__()
        self.workers = [Worker("A")]
        self.log = RequestLog()
        made: Any = self
        balancer = Balancer(lambda: RouterConfig(decode_policy=DecodePolicy.ROUND_ROBIN))
        board: Any = Alone()
        self.dispatcher = Dispatcher(
            made, PlainCodec(), balancer, self.log, board, never=never, waits=waits
        )
        self.dispatcher.workers = self.workers  # type: ignore[assignment]
        for item in requests:
            self.dispatcher.submit(item)

    def failed(self, request_id: str, message: str, fault: Fault = Fault.WORKERS) -> None:
        super().failed(request_id, message, fault)
        others = [n for n in self.dispatcher.flights if n[0] == request_id[0]]
        self.dispatcher.abort(others)

    def lose(self, *left: Worker) -> None:
        """The first worker leaves us, alive; these are there then."""
        gone, self.workers = self.workers[0], list(left)
        self.dispatcher.workers = self.workers  # type: ignore[assignment]
        self.dispatcher.on_lost(gone, "x", died=False)  # type: ignore[arg-type]

    def say(self, name: str, *tokens: int, **fields: Any) -> None:
        outs = [Output("gone", [9]), Output(name, list(tokens), **fields)]  # one is aborted
        outputs = Outputs(outputs=outs, timestamp=1.0)
        frames = [zmq.Frame(msgspec.msgpack.encode(outputs))]
        self.dispatcher.on_outputs(self.workers[0], frames)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["send", "tell", "note", "judge"])
async def test_a_request_that_something_fails_for_harms_no_other_and_no_later_one(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be sent, nor can anybody be told, nor its end be noted. Or nobody can judge whether
    its answer may go on."""
    desk, raised = Desk(request("a"), request("b"), request("c")), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, told: raised.append(told))

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    if broken == "judge":
        desk.say("a", 1)
        monkeypatch.setattr(dispatch.migration, "why_not", fails)
    elif broken == "tell":
        monkeypatch.setattr(desk, "failed", fails)
    elif broken == "note":
        monkeypatch.setattr(desk.log, "over", fails)
    second, third = Worker("B", "a~1"), Worker("C")
    desk.lose(second)
    await soon(lambda: {"b~1", "c~1"} <= set(second.flights))
    assert len(raised) == (broken == "note")
    assert "a" not in desk.dispatcher.flights
    assert broken == "note" or "a~1" not in second.flights
    if broken in ("send", "judge"):
        assert desk.faults == {"a": Fault.OURS}
        assert ("no descriptors left" if broken == "send" else "a bug") in desk.failures["a"]
    desk.lose(third)
    await soon(lambda: {"b~2", "c~2"} <= set(third.flights))


async def test_a_request_that_has_found_a_worker_has_no_deadline_any_more() -> None:
    desk = Desk(request("a"), waits=Waits(least=0.5, most=0.5))
    second = Worker("B")
    desk.lose(second)
    await soon(lambda: set(second.flights) == {"a~1"})
    await asyncio.sleep(0.6)
    assert not desk.failures


async def test_choices_that_fail_together_are_counted_once() -> None:
    """And none of them is sent anywhere once the first has failed."""
    failed = counters.FAILED._value
    before = failed.get()
    waits = Waits(first=0.01, least=600.0)
    seeded = Desk(request("a1", seed=1), request("a2", seed=1), waits=waits)
    seeded.say("a1", 1)
    second = Worker("B")
    seeded.lose(second)
    await asyncio.sleep(0.05)
    assert (list(seeded.failures), second.flights) == (["a1"], {})
    assert not seeded.dispatcher.flights
    later = Desk(waits=waits)
    later.dispatcher.workers = []
    for name in ("a1", "a2"):
        later.dispatcher.submit(request(name))
    await soon(lambda: list(later.failures) == ["a1"])
    assert not later.dispatcher.flights
    leaving = Desk()
    leaving.dispatcher.workers = []
    for name in ("a1", "a2"):
        leaving.dispatcher.submit(request(name))
    leaving.dispatcher.fail_all("this frontend stops")
    assert list(leaving.failures) == ["a1"]
    assert failed.get() - before == 3


@pytest.mark.parametrize("fault", [Fault.REQUEST, Fault.OURS])
async def test_a_worker_that_says_why_a_request_fails_is_believed(fault: Fault) -> None:
    """The user gets the reason, as an error of the request or of ours, and no token after it."""
    desk = Desk(request("a1"), request("a2"), request("b"))
    desk.say("a1", 1)
    desk.say(
        "a1", 2, finish_reason=front_wire.ERROR, stop_reason="no text matches it",
        kv_transfer_params=front_wire.fault_mark(fault),
    )  # fmt: skip
    assert desk.failures == {"a1": "no text matches it"}
    assert desk.faults == {"a1": fault}
    assert [out.new_token_ids for out in desk.outs] == [[1]]
    assert list(desk.dispatcher.flights) == ["b"], "the other choice of that answer ended too"


async def test_a_request_that_no_wire_can_carry_is_refused() -> None:
    desk = Desk(request("a"))
    share = desk.dispatcher.flights["a"].share
    assert share is not None
    before = share.view.own_tokens, share.view.own_blocks
    odd = request("b")
    odd.sampling_params.seed = 10**30
    desk.dispatcher.submit(odd)
    assert desk.refused == {"b"}
    assert set(desk.dispatcher.flights) == {"a"}
    assert (share.view.own_tokens, share.view.own_blocks) == before, "it is no load"
