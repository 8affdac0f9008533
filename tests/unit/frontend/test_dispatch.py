"""Requests over real ZMQ connections to fake decode workers: no vLLM, no processes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pullfill.engine import front_wire
from pullfill.engine.blame import Fault
from pullfill.errors import IncompatibleError, PeerUnavailable
from pullfill.frontend.decode_pool import refuse_other_models
from pullfill.frontend.dispatch import NO_WORKER
from pullfill.frontend.flight import Waits
from pullfill.wire import MAX_TEXT, DecodePolicy, WorkerState
from tests.support.fake_vllm import Output, Outputs, answer, request
from tests.support.frontend_rig import PATIENCE_S, FakeDecode, rig, until


@pytest.mark.parametrize("tokens", [1, 6])
async def test_tokens_come_back_and_the_record_has_the_frontends_own_timings(tokens: int) -> None:
    """With one token the worker's part of the record comes in the same message."""
    async with rig(FakeDecode()) as r:
        r.dispatcher.submit(request("cmpl-x-0-1234abcd", max_tokens=tokens))
        await until(lambda: "cmpl-x-0-1234abcd" in r.sink.finished)
        assert r.sink.tokens["cmpl-x-0-1234abcd"] == answer([1, 2, 3], tokens)
        assert r.dispatcher.in_flight == 0
        assert r.sink.outs[-1].kv_transfer_params is None
        record = r.requests.get("cmpl-x-0")
        assert record is not None
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
        await until(lambda: "x" * MAX_TEXT in r.sink.finished)
        (name, why), *others = r.sink.failures.items()
        assert (name, others) == ("y" * (MAX_TEXT + 1), [])
        assert f"at most {MAX_TEXT}" in why
        refused = r.requests.get("y" * (MAX_TEXT + 1))
        assert refused is not None
        assert (refused.state, refused.error) == ("failed", why)


@pytest.mark.essential
async def test_a_request_before_any_worker_waits_for_one() -> None:
    async with rig() as r:
        r.dispatcher.submit(request("early"))
        await asyncio.sleep(0.05)
        r.add(FakeDecode())
        await until(lambda: "early" in r.sink.finished)


async def test_without_a_worker_the_request_fails_and_says_what_to_start() -> None:
    async with rig(waits=Waits(first=0.1)) as r:
        r.dispatcher.submit(request("alone"))
        await until(lambda: bool(r.sink.failures))
        assert r.sink.failures == {"alone": NO_WORKER}
        assert r.dispatcher.in_flight == 0


async def test_abort_reaches_the_worker_and_late_outputs_are_dropped() -> None:
    worker = FakeDecode(hold=True)
    async with rig(worker) as r:
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
        r.dispatcher.submit(request("a"))
        await until(lambda: bool(worker.added))
        r.dispatcher.fail_all("this frontend stops")
        r.dispatcher.submit(request("late"))
        assert r.sink.failures == dict.fromkeys(("a", "late"), "this frontend stops")
        assert set(r.sink.faults.values()) == {Fault.WORKERS}
        await until(lambda: worker.aborted == ["a"])
        assert r.dispatcher.in_flight == 0


async def test_one_worker_cannot_speak_for_another() -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(one, two) as r:
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
        r.dispatcher.submit(request("old", max_tokens=20))
        await until(lambda: bool(one.added))
        one.drain()
        await r.ready(1)
        for i in range(4):
            r.dispatcher.submit(request(f"new{i}"))
        await until(lambda: len(r.sink.finished) == 5)
        assert len(one.added) == 1
        assert not r.sink.failures
        r.directory.put(msgspec.structs.replace(two.record, state=WorkerState.DRAINING))
        await r.ready(0)
        await r.pool.stop()
        await until(lambda: one.byes == two.byes == 1)


async def test_a_key_that_goes_while_the_connection_lives_costs_no_request() -> None:
    worker = FakeDecode(step_s=0.01)
    async with rig(worker) as r:
        r.dispatcher.submit(request("running", max_tokens=20))
        await until(lambda: "running" in r.sink.tokens)
        r.directory.remove(worker.instance_id)
        r.dispatcher.submit(request("new", max_tokens=2))
        await until(lambda: len(r.sink.finished) == 2)
        assert not r.sink.failures
        # A listed worker comes first as soon as there is one.
        r.add(FakeDecode("decode-2"))
        await until(lambda: [c.instance_id for c in r.pool.candidates()] == ["decode-2"])


async def test_a_refused_or_foreign_worker_is_named_and_not_used() -> None:
    refusing = FakeDecode("decode-1", refuse="vllm_version differs: 0.31.0")
    foreign = FakeDecode("decode-2", model="other")
    async with rig(refusing, foreign, wait=False) as r:
        await until(lambda: len(r.pool.refusals()) == 2)
        assert any("vllm_version differs" in line for line in r.pool.refusals())
        assert any("serves model 'other', not 'm'" in line for line in r.pool.refusals())
        assert not await r.pool.wait_ready(0.01)
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
        await until(lambda: len(one.utilities) == 4)
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
        await until(lambda: len(one.added) + len(two.added) == 5)
        views = r.dispatcher.balancer._placement.fleet.views
        assert sum(view.own_tokens for view in views.values()) > 1000
        one.die()
        await until(lambda: set(views) == {"decode-2"})
        r.dispatcher.abort([f"held-{number}" for number in range(4)])
        assert [(view.own_tokens, view.own_blocks) for view in views.values()] == [(0, 0)]
