"""Requests over real ZMQ connections to fake decode workers: no vLLM, no processes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pullfill.engine import front_wire
from pullfill.engine.blame import Fault
from pullfill.errors import IncompatibleError, PeerUnavailable
from pullfill.frontend.dispatch import NO_WORKER
from pullfill.frontend.flight import Waits
from pullfill.wire import MAX_TEXT, DecodePolicy, WorkerState
from tests.support.fake_decode import FakeDecode
from tests.support.fake_vllm import ABORT, Output, Outputs, answer, request
from tests.support.frontend_rig import PATIENCE_S, rig, until


async def test_tokens_come_back_in_order_and_the_request_is_forgotten() -> None:
    async with rig(FakeDecode()) as r:
        await r.ready(1)
        r.dispatcher.submit(request("a-1", [5, 6], max_tokens=6))
        await until(lambda: "a-1" in r.sink.finished)
        assert r.sink.tokens["a-1"] == answer([5, 6], 6)
        assert r.dispatcher.in_flight == 0
        assert r.sink.outs[-1].kv_transfer_params is None


async def test_explain_record_has_the_frontends_own_timings() -> None:
    async with rig(FakeDecode()) as r:
        await r.ready(1)
        r.dispatcher.submit(request("cmpl-x-0-1234abcd"))
        await until(lambda: "cmpl-x-0-1234abcd" in r.sink.finished)
        record = r.requests.get("cmpl-x-0")
        assert record is not None
        assert (record.request_id, record.state) == ("cmpl-x-0", "answered")
        assert record.timings_ms.queue == 1.5
        assert record.timings_ms.route is not None
        assert record.timings_ms.first_token is not None
        assert record.timings_ms.first_token >= record.timings_ms.route


async def test_an_answer_of_one_token_has_the_time_of_its_first_token() -> None:
    """Its request trace comes in the same message."""
    async with rig(FakeDecode()) as r:
        await r.ready(1)
        r.dispatcher.submit(request("cmpl-x-0-1234abcd", max_tokens=1))
        await until(lambda: "cmpl-x-0-1234abcd" in r.sink.finished)
        record = r.requests.get("cmpl-x-0")
        assert record is not None
        assert record.timings_ms.first_token is not None


async def test_an_endless_id_is_refused() -> None:
    """Clients choose ids. Pages, logs and 10,000 explain records hold them."""
    async with rig(FakeDecode()) as r:
        await r.ready(1)
        r.dispatcher.submit(request("x" * MAX_TEXT))
        r.dispatcher.submit(request("y" * (MAX_TEXT + 1)))
        await until(lambda: "x" * MAX_TEXT in r.sink.finished)
        (name, why), *others = r.sink.failures.items()
        assert (name, others) == ("y" * (MAX_TEXT + 1), [])
        assert f"at most {MAX_TEXT}" in why
        refused = r.requests.get("y" * (MAX_TEXT + 1))
        assert refused is not None
        assert (refused.state, refused.error) == ("failed", why)


@pytest.mark.essential
async def test_a_request_before_any_worker_waits_for_one() -> None:
    worker = FakeDecode().start()
    async with rig() as r:
        r.dispatcher.submit(request("early"))
        await asyncio.sleep(0.05)
        r.add(worker)
        await until(lambda: "early" in r.sink.finished)
    worker.die()


async def test_without_a_worker_the_request_fails_and_says_what_to_start() -> None:
    async with rig(waits=Waits(first=0.1)) as r:
        r.dispatcher.submit(request("alone"))
        await until(lambda: bool(r.sink.failures))
        assert r.sink.failures == {"alone": NO_WORKER}
        assert r.dispatcher.in_flight == 0


async def test_death_before_the_first_token_sends_the_request_elsewhere_under_a_new_id() -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2")
    async with rig(one, two) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a"))
        await until(lambda: bool(one.added))
        one.die()
        await until(lambda: "a" in r.sink.finished)
        assert not r.sink.failures
        assert r.sink.tokens["a"] == answer([1, 2, 3], 4)
        assert [q.request_id for q in two.added] == ["a~1"]
        assert r.sink.gone == ["decode-1"]


async def test_abort_reaches_the_worker_and_late_outputs_are_dropped() -> None:
    worker = FakeDecode(hold=True)
    async with rig(worker) as r:
        await r.ready(1)
        r.dispatcher.submit(request("a"))
        await until(lambda: bool(worker.added))
        r.dispatcher.abort(["a", "never-heard-of"])
        late = Outputs(outputs=[Output("a", [1])], timestamp=1.0)
        worker.send_raw(front_wire.OUT, msgspec.msgpack.encode(late))
        await until(lambda: worker.aborted == ["a"])
        r.dispatcher.submit(request("b"))
        worker.hold = False
        await until(lambda: "b" in r.sink.finished)
        assert "a" not in r.sink.tokens
        assert r.dispatcher.in_flight == 0


async def test_a_frontend_that_leaves_tells_all_its_clients() -> None:
    worker = FakeDecode(hold=True)
    async with rig(worker) as r:
        await r.ready(1)
        r.dispatcher.submit(request("a"))
        await until(lambda: bool(worker.added))
        r.dispatcher.fail_all("this frontend stops")
        r.dispatcher.submit(request("late"))
        assert r.sink.failures == dict.fromkeys(("a", "late"), "this frontend stops")
        assert set(r.sink.faults.values()) == {Fault.WORKERS}
        await until(lambda: worker.aborted == ["a"])
        assert r.dispatcher.in_flight == 0


async def test_abort_of_a_waiting_request_forgets_it() -> None:
    async with rig() as r:
        r.dispatcher.submit(request("a"))
        r.dispatcher.abort(["a"])
        assert r.dispatcher.in_flight == 0
        await asyncio.sleep(0)
        assert not r.sink.failures


async def test_one_worker_cannot_speak_for_another() -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(one, two) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a"))
        await until(lambda: bool(one.added))
        forged = Outputs(outputs=[Output("a", [9], finish_reason=0)], timestamp=1.0)
        two.send_raw(front_wire.OUT, msgspec.msgpack.encode(forged))
        one.hold = False
        await until(lambda: "a" in r.sink.finished)
        assert r.sink.tokens["a"] == answer([1, 2, 3], 4)


async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    one, two = FakeDecode("decode-1", step_s=0.01), FakeDecode("decode-2")
    async with rig(one, two) as r:
        await r.ready(2)
        r.dispatcher.submit(request("old", max_tokens=20))
        await until(lambda: bool(one.added))
        one.drain()
        await r.ready(1)
        for i in range(4):
            r.dispatcher.submit(request(f"new{i}"))
        await until(lambda: len(r.sink.finished) == 5)
        assert len(one.added) == 1
        assert not r.sink.failures


async def test_a_worker_that_hands_requests_back_loses_nothing() -> None:
    one, two = FakeDecode("decode-1", migrate=True), FakeDecode("decode-2")
    async with rig(one, two) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a"))
        r.dispatcher.submit(request("b"))
        one.drain()
        await until(lambda: {"a", "b"} <= set(r.sink.finished))
        assert not r.sink.failures


async def test_a_request_cut_by_a_drain_before_its_first_token_goes_elsewhere() -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2")
    async with rig(one, two) as r:
        await r.ready(2)
        r.dispatcher.submit(request("a"))
        await until(lambda: bool(one.added))
        one.drain()
        one.finish_all(ABORT)
        await until(lambda: "a" in r.sink.finished)
        assert r.sink.finished["a"] != ABORT


async def test_a_key_that_goes_while_the_connection_lives_costs_no_request() -> None:
    worker = FakeDecode(step_s=0.01)
    async with rig(worker) as r:
        await r.ready(1)
        r.dispatcher.submit(request("running", max_tokens=20))
        await until(lambda: "running" in r.sink.tokens)
        r.directory.remove(worker.instance_id)
        r.dispatcher.submit(request("new", max_tokens=2))
        await until(lambda: len(r.sink.finished) == 2)
        assert not r.sink.failures
        # A listed worker comes first as soon as there is one.
        other = FakeDecode("decode-2").start()
        r.add(other)
        await until(lambda: [c.instance_id for c in r.pool.candidates()] == ["decode-2"])
    other.die()


async def test_a_worker_draining_in_the_registry_gets_nothing_new() -> None:
    worker = FakeDecode()
    async with rig(worker) as r:
        await r.ready(1)
        r.directory.put(msgspec.structs.replace(worker.record, state=WorkerState.DRAINING))
        await r.ready(0)


async def test_a_refused_or_foreign_worker_is_named_and_not_used() -> None:
    refusing = FakeDecode("decode-1", refuse="vllm_version differs: 0.31.0")
    foreign = FakeDecode("decode-2", model="other")
    async with rig(refusing, foreign) as r:
        await until(lambda: len(r.pool.refusals()) == 2)
        assert any("vllm_version differs" in line for line in r.pool.refusals())
        assert any("serves model 'other', not 'm'" in line for line in r.pool.refusals())
        assert not await r.pool.wait_ready(0.01)
        r.directory.remove("decode-1")
        assert len(r.pool.refusals()) == 1
        told = r"namespace 'n': its model is 'm', but that of decode worker decode-2 .* is 'other'"
        with pytest.raises(IncompatibleError, match=told):
            r.pool.refuse_if_incompatible("n")
        r.directory.remove("decode-2")
        r.pool.refuse_if_incompatible("n")


async def test_a_worker_that_comes_back_is_connected_again() -> None:
    worker = FakeDecode("decode-1")
    async with rig(worker) as r:
        await r.ready(1)
        worker.die()
        await r.ready(0)
        again = FakeDecode("decode-1").start()
        r.add(again)
        await r.ready(1)
        r.dispatcher.submit(request("a"))
        await until(lambda: "a" in r.sink.finished)
    again.die()


async def test_utility_calls_reach_every_worker() -> None:
    one, two = FakeDecode("decode-1"), FakeDecode("decode-2")
    async with rig(one, two) as r:
        await r.ready(2)
        assert await r.dispatcher.call("reset_prefix_cache", (False,), 5.0) == [True, True]
        assert one.utilities == two.utilities == [("reset_prefix_cache", [False])]
        with pytest.raises(PeerUnavailable, match="no such thing"):
            await r.dispatcher.call("fail", (), 5.0)


async def test_a_utility_call_ends_when_its_worker_is_lost() -> None:
    worker = FakeDecode("decode-1", hold=True)
    async with rig(worker) as r:
        await r.ready(1)
        call = asyncio.create_task(r.dispatcher.call("reset_prefix_cache", (), PATIENCE_S * 2))
        await until(lambda: bool(worker.utilities))
        worker.die()
        with pytest.raises(PeerUnavailable, match="decode-1"):
            await asyncio.wait_for(call, PATIENCE_S)
        with pytest.raises(PeerUnavailable, match="no decode worker"):
            await r.dispatcher.call("x", (), 1.0)


async def test_a_utility_call_has_a_deadline() -> None:
    async with rig(FakeDecode(hold=True)) as r:
        await r.ready(1)
        with pytest.raises(PeerUnavailable, match="no answer within"):
            await r.dispatcher.call("reset_prefix_cache", (), 0.05)


async def test_stopping_says_goodbye() -> None:
    worker = FakeDecode()
    async with rig(worker) as r:
        await r.ready(1)
        await r.pool.stop()
        await until(lambda: worker.byes == 1)


async def test_a_worker_that_had_dropped_us_is_left_and_its_requests_sent_elsewhere() -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2")
    async with rig(one, two) as r:
        await r.ready(2)
        for i in range(2):
            r.dispatcher.submit(request(f"r{i}"))
        await until(lambda: len(one.added) == 1)
        one.send_raw(front_wire.GONE)
        await until(lambda: len(r.sink.finished) == 2)


async def test_nothing_is_left_of_the_load_of_requests_that_ended() -> None:
    """Finished, aborted, failed with their worker, and sent again to another one."""
    one, two = (FakeDecode(f"decode-{n}", prefix_block_size=16) for n in (1, 2))
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        r.dispatcher.submit(request("cmpl-done-0-1234abcd", list(range(10, 410))))
        await r.told("cmpl-done-0")
        one.hold = two.hold = True
        for number in range(4):
            r.dispatcher.submit(request(f"held-{number}", list(range(number, 300))))
        await until(lambda: len(one.added) + len(two.added) == 5)
        views = r.dispatcher.balancer._placement.fleet.views
        assert sum(view.own_tokens for view in views.values()) > 1000
        one.die()
        await until(lambda: set(views) == {"decode-2"})
        r.dispatcher.abort([f"held-{number}" for number in range(4)])
        assert [(view.own_tokens, view.own_blocks) for view in views.values()] == [(0, 0)]
