"""`Prompt`, `Waits` and `Bell`: when a waiter resumes, timeouts, and cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from pullfill.runtime.waits import STOOD_S, Bell, Prompt, Waits

WHERE: ContextVar[str] = ContextVar("WHERE", default="nowhere")


async def in_a_callback(call: Callable[[], object]) -> None:
    """As a protocol's `data_received` is called: by the loop, in no task."""
    done = asyncio.Event()

    def run() -> None:
        call()
        done.set()

    asyncio.get_running_loop().call_soon(run)
    await done.wait()


def waiting(prompt: Any) -> tuple[asyncio.Task[None], list[Any]]:
    seen: list[Any] = []

    async def wait() -> None:
        try:
            seen.append(await prompt)
        except BaseException as exc:
            seen.append(exc)
            raise

    return asyncio.create_task(wait()), seen


async def test_the_waiter_goes_on_within_the_callback_that_answers() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    task, seen = waiting(prompt)
    await asyncio.sleep(0)

    def answer() -> None:
        prompt.set_result(7)
        assert seen == [7], "not in the next turn"

    await in_a_callback(answer)
    await task


async def test_the_waiter_goes_on_later_if_a_task_answers() -> None:
    """A task cannot be entered from another."""
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    task, seen = waiting(prompt)
    await asyncio.sleep(0)
    prompt.set_result(7)
    assert seen == []
    await task
    assert seen == [7]


async def test_one_answer_within_another() -> None:
    """The first waiter answers the second: that one goes on in the next turn."""
    loop = asyncio.get_running_loop()
    first, second, seen = Prompt[int](loop), Prompt[int](loop), list[str]()

    async def one() -> None:
        await first
        second.set_result(2)
        seen.append("one")

    async def two() -> None:
        await second
        seen.append("two")

    tasks = [asyncio.create_task(one()), asyncio.create_task(two())]
    await asyncio.sleep(0)
    await in_a_callback(lambda: first.set_result(1))
    await asyncio.gather(*tasks)
    assert seen == ["one", "two"]


async def test_a_failure_and_what_was_there_before_anybody_waits() -> None:
    loop = asyncio.get_running_loop()
    failed, there = Prompt[int](loop), Prompt[int](loop)
    task, seen = waiting(failed)
    await asyncio.sleep(0)
    await in_a_callback(lambda: failed.set_exception(KeyError("x")))
    assert [type(s) for s in seen] == [KeyError]
    with pytest.raises(KeyError):
        await task
    there.set_result(3)
    assert await there == 3
    assert there.answered()
    assert not failed.answered()
    with pytest.raises(asyncio.InvalidStateError):
        there.set_result(4)
    with pytest.raises(asyncio.InvalidStateError):
        Prompt[int](loop).result()


async def test_who_is_cancelled_waits_no_more_and_the_answer_says_so() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    task, seen = waiting(prompt)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(s) for s in seen] == [asyncio.CancelledError]
    assert prompt.done()
    assert not prompt.answered()


async def test_an_answer_that_comes_with_a_cancellation_is_not_lost() -> None:
    """Its waiter is cancelled all the same, and can see it."""
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    task, seen = waiting(prompt)
    await asyncio.sleep(0)
    prompt.set_result(7)  # here, in a task: the waiter goes on in the next turn
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(s) for s in seen] == [asyncio.CancelledError]
    assert prompt.answered()


async def test_a_timeout_around_it() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await prompt


async def test_the_waiter_keeps_its_own_context() -> None:
    prompt: Prompt[int] = Prompt(asyncio.get_running_loop())
    seen: list[str] = []

    async def wait() -> None:
        WHERE.set("inside")
        await prompt
        seen.append(WHERE.get())

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await in_a_callback(lambda: prompt.set_result(1))
    assert seen == ["inside"]
    assert WHERE.get() == "nowhere"
    await task


# --------------------------------------------------------------------------- Waits


class Timers:
    """The clock of the running loop, which moves only when the test says so, and its timers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.made: list[asyncio.TimerHandle] = []
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(self._loop, "time", lambda: self.now)
        monkeypatch.setattr(self._loop, "call_at", self._call_at)

    def _call_at(self, when: float, call: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        self.made.append(asyncio.TimerHandle(when, call, args, self._loop))
        return self.made[-1]

    def go_to(self, now: float) -> None:
        """Let the time pass. A timer that has run is not due again."""
        self.now = now
        for timer in self.made:
            if not timer.cancelled() and timer.when() <= now:
                timer._run()
                timer.cancel()


async def test_each_wait_ends_at_its_own_time_with_one_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers = Timers(monkeypatch)
    waits: Waits[str, int] = Waits(lambda key: KeyError(key))
    for number in range(50):
        key = f"quick {number}"
        future = waits.open(key, 5.0)
        assert waits.answer(key, number)
        assert await future == number
        waits.close(key)
    assert len(timers.made) == 1, "nobody was late: the first timer is still the only one"
    long, short = waits.open("long", 0.3), waits.open("short", 0.1)
    timers.go_to(0.09)
    assert not short.done()
    timers.go_to(0.1)
    assert short.done()
    timers.go_to(0.29)
    assert not long.done()
    timers.go_to(0.3)
    for one, name in ((short, "short"), (long, "long")):
        with pytest.raises(KeyError, match=name):
            await one
    assert len([timer for timer in timers.made if not timer.cancelled()]) == 0
    assert not waits.answer("long", 1), "it is late"
    assert not waits.answer("unknown", 1)
    assert len(waits) == 2
    assert len(list(waits)) == 2
    waits.close("long")
    waits.close("short")
    assert not waits


async def test_a_wait_that_a_late_one_opens_is_timed_too() -> None:
    waits: Waits[int, int] = Waits(lambda _: TimeoutError())

    async def again() -> None:
        for key in range(3):
            with pytest.raises(TimeoutError):
                await waits.open(key, 0.02)
            waits.close(key)

    other = waits.open(9, 0.05)
    async with asyncio.timeout(10):
        await again()
        with pytest.raises(TimeoutError):
            await other


# --------------------------------------------------------------------------- Bell


async def test_a_bell_rings_or_the_time_passes() -> None:
    bell, loop = Bell(), asyncio.get_running_loop()
    assert not await bell.wait(0.01)
    loop.call_later(0.01, bell.ring)
    assert await bell.wait(10)
    assert await bell.wait(10), "it has rung, and nobody cleared it"
    assert bell.rung
    bell.clear()
    began = loop.time()
    assert not await bell.wait(0.05), "the timer of the wait for 10 s does not hold this one up"
    assert loop.time() - began < 5
    loop.call_later(0.01, bell.ring)
    assert await bell.wait(None)
    bell.clear()
    task = asyncio.create_task(bell.wait(None))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    loop.call_later(0.01, bell.ring)
    assert await bell.wait(10), "who was cancelled is in nobody's way"
    bell.clear()
    assert not await bell.wait(-1)


def test_an_answer_that_came_while_the_loop_stood_still_is_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pullfill.runtime.waits.STOOD_S", 0.5)  # more than a busy machine takes

    async def run() -> int:
        loop = asyncio.get_running_loop()
        waits: Waits[str, int] = Waits(lambda key: KeyError(key))
        future = waits.open("a", 0.05)

        def answer(turns: int) -> None:
            """As a socket whose data passes through some tasks."""
            if turns:
                loop.call_soon(answer, turns - 1)
            else:
                waits.answer("a", 7)

        loop.call_soon(lambda: (time.sleep(1.0), loop.call_soon(answer, 3)))
        return await future

    assert asyncio.run(run()) == 7


def test_a_loop_that_is_always_late_ends_its_waits_all_the_same() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        waits: Waits[str, int] = Waits(lambda key: KeyError(key))
        future = waits.open("a", 0.05)

        def stand() -> None:
            if not future.done():
                time.sleep(2 * STOOD_S)
                loop.call_soon(stand)

        loop.call_soon(stand)
        with pytest.raises(KeyError):
            await asyncio.wait_for(future, 20)

    asyncio.run(run())
