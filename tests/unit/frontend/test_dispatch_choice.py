"""The choice of the decode worker, over real ZMQ connections to fake decode workers."""

from __future__ import annotations

from pullfill.engine.front_wire import LoadReport
from pullfill.wire import DecodeChoice, DecodePolicy, ExplainRecord
from tests.support.fake_decode import FakeDecode
from tests.support.fake_vllm import answer, request
from tests.support.frontend_rig import Rig, rig, until

PROMPT = list(range(10, 410))


def pair() -> tuple[FakeDecode, FakeDecode]:
    return FakeDecode("decode-1", prefix_block_size=16), FakeDecode(
        "decode-2", prefix_block_size=16
    )


async def told(r: Rig, name: str, prompt: list[int]) -> ExplainRecord:
    """Send a request and return its record."""
    r.dispatcher.submit(request(f"{name}-0-1234abcd", prompt))
    return await r.told(f"{name}-0")


async def test_the_next_turn_goes_where_the_last_one_went_until_that_worker_is_gone() -> None:
    one, two = pair()
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        prompt, places = PROMPT, []
        for turn in range(4):
            record = await told(r, f"cmpl-{turn}", prompt)
            places.append(record.decode_choice)
            prompt = [*prompt, *answer(prompt, 4), *range(500 + 90 * turn, 590 + 90 * turn)]
        assert sorted((len(one.added), len(two.added))) == [0, 4]
        assert [choice.matched_tokens for choice in places[1:] if choice] == [400, 480, 576]

        first, other = (one, two) if one.added else (two, one)
        first.die()
        await r.ready(1)
        record = await told(r, "cmpl-x", prompt)
        assert len(other.added) == 1
        assert record.decode_choice == DecodeChoice(
            policy=DecodePolicy.KV, matched_tokens=0, score=None, reason="only"
        )


async def test_a_worker_that_reports_much_to_do_gets_no_new_prompt() -> None:
    one, two = pair()
    one.load = LoadReport(
        running=9, waiting=9, uncached_tokens_queued=9999, active_blocks=9, free_blocks=9
    )
    async with rig(one, two, policy=DecodePolicy.LEAST_LOADED) as r:
        await r.ready(2)
        for number in range(3):
            await told(r, f"cmpl-{number}", PROMPT)
        assert (len(one.added), len(two.added)) == (0, 3)


async def test_nothing_is_left_of_the_load_of_requests_that_ended() -> None:
    """Finished, aborted, failed with their worker, and sent again to another one."""
    one, two = pair()
    async with rig(one, two, policy=DecodePolicy.KV) as r:
        await r.ready(2)
        await told(r, "cmpl-done", PROMPT)
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
