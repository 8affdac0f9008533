"""The two numbers of vLLM's scheduler that size the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.chunks import LOOK, PrefillChunks

STEP = 1024


def core(threshold: int = 0, running: int = 0, drafts: int = 0, able: bool = True) -> Any:
    config = SimpleNamespace(long_prefill_token_threshold=threshold, enable_chunked_prefill=able)
    return SimpleNamespace(
        scheduler=SimpleNamespace(
            scheduler_config=config,
            max_num_scheduled_tokens=STEP,
            num_spec_tokens=drafts,
            running=[None] * running,
        )
    )


def limits(made: Any) -> tuple[int, int]:
    scheduler = made.scheduler
    return (
        scheduler.scheduler_config.long_prefill_token_threshold,
        scheduler.max_num_scheduled_tokens,
    )


@pytest.mark.parametrize(("running", "prompts", "drafts"), [(5, 0, 0), (8, 1, 0), (8, 3, 2)])
def test_prompts_share_what_the_streams_leave(running: int, prompts: int, drafts: int) -> None:
    made = core(running=running, drafts=drafts)
    PrefillChunks(made).limit(100, prompts)
    each, total = limits(made)
    # All running requests, and the prompts among them, leave something for a prompt that begins.
    assert prompts * each <= 100
    assert total - running * (1 + drafts) == 100
    assert prompts * each < 100 or not prompts


@pytest.mark.parametrize(("threshold", "left"), [(0, STEP - 1), (100, 100), (STEP, STEP - 1)])
def test_the_last_token_of_a_step_can_be_left_to_others(threshold: int, left: int) -> None:
    made = core(threshold)
    chunks = PrefillChunks(made)
    chunks.leave_one()
    assert limits(made) == (left, STEP)
    chunks.limit(50, 1)
    chunks.release()
    assert limits(made) == (left, STEP)


def test_no_limit_still_leaves_some_tokens_for_prompts_that_wait() -> None:
    made = core()
    PrefillChunks(made).limit(0, 0)
    assert limits(made) == (STEP - LOOK, STEP)


def test_what_the_user_has_set_is_a_limit_and_comes_back() -> None:
    made = core(threshold=64)
    chunks = PrefillChunks(made)
    chunks.limit(500, 1)
    assert limits(made)[0] == 64
    chunks.release()
    assert limits(made) == (64, STEP)


def test_without_chunked_prefill_nothing_is_changed() -> None:
    made = core(able=False)
    PrefillChunks(made).limit(100, 1)
    assert limits(made) == (0, STEP)
