"""`Replies`: timeouts, cancellation, and answers that nobody waits for any more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pullfill.net import replies as module
from pullfill.net.replies import Replies

LATE = KeyError("late")


def made() -> tuple[Replies, list[Any]]:
    unwanted = list[Any]()
    return Replies(unwanted.append), unwanted


async def test_each_question_gets_its_own_answer() -> None:
    replies, unwanted = made()
    both = [asyncio.create_task(replies.ask(rid, lambda: None, 10, LATE)) for rid in (1, 2)]
    await asyncio.sleep(0)
    assert replies
    for rid in (2, 1, 1, 3):
        replies.answer(rid, f"to {rid}")
    assert await asyncio.gather(*both) == ["to 1", "to 2"]
    assert unwanted == ["to 1", "to 3"], "a second answer, and one to no question"
    assert not replies


async def test_an_answer_that_comes_with_a_cancellation_is_not_lost() -> None:
    replies, unwanted = made()
    asked = asyncio.create_task(replies.ask(1, lambda: None, 10, LATE))
    await asyncio.sleep(0)
    replies.answer(1, "a grant")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert unwanted == ["a grant"]


async def test_a_lost_connection_ends_all_waits() -> None:
    replies, _ = made()
    both = [asyncio.create_task(replies.ask(rid, lambda: None, 10, LATE)) for rid in (1, 2)]
    await asyncio.sleep(0)
    replies.fail(ConnectionError("lost"))
    both[1].cancel()
    ends = await asyncio.gather(*both, return_exceptions=True)
    assert list(map(type, ends)) == [ConnectionError, asyncio.CancelledError]


@pytest.mark.parametrize("answered", [True, False])
def test_an_answer_that_came_while_the_loop_stood_still_is_in_time(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOOD_S", 0.3)  # more than a busy machine takes

    async def run() -> Any:
        loop, (replies, _) = asyncio.get_running_loop(), made()

        def read(turns: int) -> None:
            """As a socket whose data passes through some tasks."""
            if turns:
                loop.call_soon(read, turns - 1)
            elif answered:
                replies.answer(1, 7)

        loop.call_soon(lambda: (time.sleep(0.5), loop.call_soon(read, 5)))
        return await replies.ask(1, lambda: None, 0.05, LATE)

    if answered:
        assert asyncio.run(run()) == 7
    else:
        with pytest.raises(KeyError):
            asyncio.run(run())
