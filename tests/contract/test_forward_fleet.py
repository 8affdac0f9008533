"""Mixed fleets: which share stock servers get, and which of them by each policy."""

from __future__ import annotations

import asyncio

import pytest

from pullfill.wire import DecodePolicy
from tests.support.frontend_rig import PATIENCE_S, ForwardRig, forwarding, until


async def stock_of(rig: ForwardRig, requests: int) -> int:
    """How many of so many requests the stock servers get. The others get an answer, too."""
    before = len(rig.decode[0].requests), rig.app.requests
    for _ in range(requests):
        assert (await rig.ask()).status == 200
    stock, pull = len(rig.decode[0].requests) - before[0], rig.app.requests - before[1]
    assert stock + pull == requests
    return stock


@pytest.mark.essential
async def test_a_fleet_is_moved_over_in_steps_and_back() -> None:
    async with forwarding() as rig:
        rig.workers = True
        steps = (0.0, 0.25, 0.5, 0.75, 1.0)
        for share in (*steps, *reversed(steps)):
            rig.share = share
            # A share that was due before the step may come after it.
            assert await stock_of(rig, 20) == pytest.approx(20 * share, abs=1)
        rig.share = 0.1
        assert await stock_of(rig, 40) == pytest.approx(4, abs=1)


async def test_a_side_that_can_take_no_request_leaves_all_to_the_other() -> None:
    async with forwarding() as rig:
        rig.workers, rig.share = True, 0.5
        rig.decode[0].alive = False
        await rig.states(failing=1)
        assert await stock_of(rig, 4) == 0
        rig.decode[0].alive = True
        await rig.states(ready=2)
        rig.workers = False
        assert await stock_of(rig, 4) == 4
        rig.share = 0.0
        assert await stock_of(rig, 4) == 4
        rig.workers = True
        assert await stock_of(rig, 4) == 0


async def test_requests_wait_a_moment_for_a_server_that_comes_back() -> None:
    async with forwarding() as rig:
        rig.decode[0].alive = False
        await rig.states(failing=1)
        assert await rig.layer.wait_ready(0.0), "the answer says why it is refused"
        assert (await rig.ask()).status == 503
        waits = [asyncio.create_task(rig.layer.wait_ready(PATIENCE_S)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert not any(wait.done() for wait in waits)
        rig.decode[0].alive = True
        await asyncio.gather(*waits)
        assert (await rig.ask()).status == 200


async def test_decode_workers_get_what_stock_servers_cannot_serve() -> None:
    async with forwarding("batch", "p2p") as rig:
        rig.workers = True
        assert (await rig.ask(n=2)).status == 200
        assert (rig.app.requests, len(rig.decode[0].requests)) == (1, 0)
        assert (await rig.ask()).status == 200
        assert (rig.app.requests, len(rig.decode[0].requests)) == (1, 1)


async def asked(rig: ForwardRig, prompts: list[str]) -> dict[str, list[list[int]]]:
    """Which prompts each server of a role gets, as numbers, sent one after the other."""
    for prompt in prompts:
        assert (await rig.ask(prompt=prompt)).status == 200
    return {
        role: [[prompts.index(body["prompt"]) for _, _, body in fake.requests] for fake in fakes]
        for role, fakes in (("prefill", rig.prefill), ("decode", rig.decode))
    }


@pytest.mark.parametrize("how", [("staged", "nixl"), ("batch", "p2p")])
@pytest.mark.parametrize("policy", list(DecodePolicy))
async def test_servers_are_chosen_by_the_policy(policy: DecodePolicy, how: tuple[str, str]) -> None:
    async with forwarding(*how, prefill=2, decode=2) as rig:
        rig.policy = policy
        if policy is not DecodePolicy.KV:
            for fake in (rig.prefill[0], rig.decode[0]):
                fake.metrics = "vllm:num_requests_waiting{} 50.0\n"
            loads = rig.servers.known.values()
            await until(lambda: sum(bool(s.load and s.load.waiting) for s in loads) == 2)
        # Three conversations take turns, so a turn in two is at the other server if it is by turns.
        talks = [f"{number} " * 400 for number in range(3)]
        prompts = [talk + "more " * turn for turn in range(8) for talk in talks]
        for busy, other in (await asked(rig, prompts)).values():
            if policy is DecodePolicy.ROUND_ROBIN:
                assert {n % 2 for n in busy} != {n % 2 for n in other}
                assert len(busy) == len(other) == 12
            elif policy is DecodePolicy.LEAST_LOADED:
                assert not busy
            elif policy is DecodePolicy.RANDOM:
                assert busy
                assert other
                assert len({n % 2 for n in busy}) == 2, "by turns"
            else:
                assert not {n % 3 for n in busy} & {n % 3 for n in other}, "away from its prefix"
                assert busy
                assert other
