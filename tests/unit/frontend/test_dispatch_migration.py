"""Answers that lose their decode worker go on at another: real ZMQ, fake workers, no vLLM."""

from __future__ import annotations

import asyncio
import operator
import random
from itertools import pairwise

import msgspec
import pytest
import zmq

from pullfill import wire
from pullfill.engine import front_wire
from pullfill.frontend import dispatch
from pullfill.frontend.flight import Waits
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.wire.prefix import PrefixEvents
from tests.support.fake_vllm import ABORT, Output, answer, request
from tests.support.frontend_rig import FakeDecode, Rig, rig
from tests.support.said import blank
from tests.support.waiting import soon

PROMPT = [5, 6, 7]
SOME = 20
"""Tokens after which a worker pauses. So no answer ends before the test ends its worker."""


by_id = operator.attrgetter("instance_id")


async def begun(r: Rig, name: str, tokens: int = 3) -> None:
    await soon(lambda: len(r.sink.tokens.get(name, [])) >= tokens)


@pytest.mark.parametrize(
    "frames",
    [
        (front_wire.OUT, b"junk"),
        (front_wire.OUT,),
        (front_wire.EXPL, b"junk"),
        (front_wire.BACK, b"\x01"),
        (front_wire.LAST, b"\x90", b"\xc1"),
        (front_wire.LOAD, b"two", b"frames"),
        (front_wire.OUT, msgspec.msgpack.encode([0, [[1, 2]]])),
        (b"WHAT", b""),
        (front_wire.GONE,),
        (front_wire.BLKS, b"\x93"),
        (front_wire.BLKS, wire.encode(PrefixEvents(epoch=1, first=0, ops=b"\x01", hashes=b""))),
    ],
    ids="outputs nothing explain back last frames typed kind gone page events".split(),
)
async def test_an_unreadable_message_moves_the_answers_of_its_worker(
    frames: tuple[bytes, ...],
) -> None:
    """The lost message may have held tokens. Later tokens must not be appended after the gap. That
    worker lives: nothing is suspected of having killed it."""
    one = FakeDecode("decode-1", stop_after=SOME, prefix_block_size=16)
    two = FakeDecode("decode-2", hold=True)
    async with rig(one, two, prefixes=Prefixes(9)) as r:
        r.dispatcher.submit(request("r", PROMPT, max_tokens=200))
        await begun(r, "r")
        one.send_raw(*frames)
        await soon(lambda: bool(two.added))
        assert not r.dispatcher.flights["r"].deaths
        two.hold = False
        await soon(lambda: bool(r.sink.finished))
        assert r.sink.tokens["r"] == answer(PROMPT, 200)
        assert [asked.request_id for asked in two.added] == ["r~1"]
        await soon(lambda: one.byes > 0)
        assert one.byes == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_a_request_that_is_handed_back_goes_to_another_for_a_while(count: int) -> None:
    """Not to the same one at once: that one lives, and only has no room for this one."""
    workers = [FakeDecode(f"decode-{i}", migrate=True) for i in range(count)]
    async with rig(*workers) as r:
        r.dispatcher.submit(request("a"))
        await soon(lambda: bool(r.sink.failures))
        if count == 2:
            assert f"{dispatch.MAX_MIGRATIONS} attempts" in r.sink.failures["a"]
        else:
            assert "decode-0 gave it up" in r.sink.failures["a"]
            assert len(workers[0].added) == 1


async def test_an_answer_moves_once_to_where_fewer_streams_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one that another worker continues exactly, and that has many tokens to come."""
    one, two = (FakeDecode(f"decode-{n}", stop_after=SOME) for n in (1, 2))
    async with rig(one, two) as r:
        balancer, load = r.dispatcher.balancer, blank(front_wire.LoadReport)
        monkeypatch.setattr(balancer, "choose", lambda _, workers, now: min(workers, key=by_id))
        for name, fields in (("a", {}), ("b", {"seed": 1}), ("c", {"max_tokens": 80})):
            r.dispatcher.submit(request(name, PROMPT, **{"max_tokens": 200, **fields}))
            await begun(r, name)
        first = r.dispatcher.flights["a"].worker
        assert first is not None
        monkeypatch.undo()
        monkeypatch.setattr(balancer, "report", lambda *told: sorted(told[2], key=by_id))
        with monkeypatch.context() as patch:
            patch.setattr(dispatch.migration, "why_not", None)  # a bug: it cannot be called
            r.dispatcher.on_load(first, load)
        assert not r.sink.failures
        for _ in range(3):
            r.dispatcher.on_message(first, front_wire.LOAD, [zmq.Frame(wire.encode(load))])
        await soon(lambda: len(r.sink.tokens["a"]) > SOME)
        assert r.sink.tokens["a"] == answer(PROMPT, 200)[: len(r.sink.tokens["a"])]
        assert [asked.request_id for asked in two.added] == ["a~1"]
        assert one.aborted == ["a"]
        r.dispatcher.abort(["a"])
        record = await r.told("a")
        assert record.migrated_from == ("decode-1",)


@pytest.mark.parametrize("room", [402, 403])
async def test_a_worker_too_small_for_the_rest_is_not_asked(room: int) -> None:
    one = FakeDecode("decode-1", stop_after=SOME, max_model_len=512)
    small = FakeDecode("decode-2", max_model_len=room)
    async with rig(one, small, waits=Waits(least=0.5, most=0.5)) as r:
        r.dispatcher.submit(request("a", max_tokens=400))
        await begun(r, "a")
        one.die()
        await soon(lambda: bool(r.sink.failures or r.sink.finished))
        assert len(small.added) == (room == 403)
        assert room == 403 or "room for 403 tokens" in r.sink.failures["a"]


async def test_tokens_that_come_with_the_cut_are_not_lost() -> None:
    """A worker that drains may cut a request in the very step that brought tokens."""
    one, two = (FakeDecode(f"decode-{n}", hold=True) for n in (1, 2))
    async with rig(one, two) as r:
        r.dispatcher.submit(request("a", PROMPT, max_tokens=9))
        await soon(lambda: bool(one.added))
        one.send_raw(front_wire.DRAIN)
        await r.ready(1)
        one.say(Output("a", answer(PROMPT, 2), finish_reason=ABORT))
        await soon(lambda: bool(two.added))
        two.say(Output("a~1", [], events=["queued"]))
        two.hold = False
        await soon(lambda: "a" in r.sink.finished)
        assert r.sink.tokens["a"] == answer(PROMPT, 9)
        assert not any(out.events for out in r.sink.outs), "vLLM has those of the first worker"


async def test_hundreds_at_a_lost_worker_do_not_stop_the_loop() -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2", hold=True)
    async with rig(one, two) as r:
        for i in range(400):
            r.dispatcher.submit(request(f"r{i}", PROMPT, max_tokens=100))
        await soon(lambda: len(one.added) == len(two.added) == 200)
        (link,) = [c for c in r.dispatcher.workers if c.instance_id == "decode-2"]
        left: list[int] = []

        async def watch() -> None:
            while True:
                left.append(400 - len(link.flights))
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        one.leave()
        await soon(lambda: len(two.added) == 400)
        watcher.cancel()
        assert max(left) > 180, "they left all at once"
        drops = [before - after for before, after in pairwise(left)]
        assert max(drops) <= dispatch.SLICE, "others had their turn between"


async def test_times_of_workers_on_other_hosts_are_told_by_one_clock() -> None:
    """vLLM would take the gap between two clocks for the time between two tokens."""
    one = FakeDecode("decode-1", step_s=0.005, stop_after=SOME, ahead_s=5000.0)
    two = FakeDecode("decode-2", step_s=0.005, ahead_s=-300.0)
    async with rig(one, two) as r:
        r.dispatcher.submit(request("a", PROMPT, max_tokens=40))
        await begun(r, "a")
        one.leave()
        await soon(lambda: "a" in r.sink.finished)
        assert len(two.added) == 1
        gaps = [later - before for before, later in pairwise(r.sink.times)]
        assert -100.0 < min(gaps)
        assert max(gaps) < 100.0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.essential
async def test_no_token_is_lost_or_repeated_whatever_goes_when(seed: int) -> None:
    """Workers die, leave and join at random under twenty answers; never more than twice each."""
    rng = random.Random(seed)
    workers = [FakeDecode(f"decode-{i}", step_s=0.004) for i in range(3)]
    wanted = {f"r{i}": ([i, rng.randrange(99)], rng.randint(40, 160)) for i in range(20)}
    async with rig(*workers) as r:
        for name, (prompt, count) in wanted.items():
            r.dispatcher.submit(request(name, prompt, max_tokens=count))
        for i in range(3, 7):
            await asyncio.sleep(rng.uniform(0.01, 0.08))
            joined = r.add(FakeDecode(f"decode-{i}", step_s=0.004))
            victim = workers.pop(rng.randrange(len(workers)))
            workers.append(joined)
            # At two deaths without a token a request is refused.
            await soon(lambda: all(f.tokens for f in r.dispatcher.flights.values()))
            (victim.die if i < 5 else victim.leave)()
            if i < 5:  # its requests are suspects once its death is known
                await soon(lambda name=victim.instance_id: name in r.sink.gone)  # type: ignore[misc]
        await soon(lambda: len(r.sink.finished) == len(wanted))
        assert not r.sink.failures
        for name, (prompt, count) in wanted.items():
            assert r.sink.tokens[name] == answer(prompt, count)
        assert any("~" in q.request_id for w in r.workers for q in w.added)
