"""What a decode worker finds out about kinds of prefill workers. Its engine is a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from pullfill.decode_worker import self_check
from pullfill.decode_worker.peers import Peer
from pullfill.decode_worker.self_check import Checks, Incomplete, Trial, Trials
from pullfill.engine import requests
from pullfill.engine.groups import ONE_GROUP
from pullfill.errors import TransferFailed
from pullfill.registry.self_checks import SelfChecks
from pullfill.wire import Hello
from tests.support.transfer_rigs import COMPAT, DENSE, extent, memory_over, random_bytes
from tests.support.waiting import soon

COMPAT_4 = msgspec.structs.replace(COMPAT, block_size=4, num_layers=1, dtype="float32")


class Engine:
    """In place of `Trials`: a remote prefill is off by `wrong`, or raises what `fails` says."""

    groups = ONE_GROUP
    wrong = 0.0
    logprobs: Mapping[int, float] = {}

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.fails: Callable[[str], Exception | None] = lambda _writer: None

    async def run(
        self, tokens: Sequence[int], *, salt: str, writer: str = "", blocks: int = 0
    ) -> Trial:
        self.asked.append((len(tokens), writer))
        if writer and (failure := self.fails(writer)) is not None:
            raise failure
        kv = np.ones((4, 8), np.float32)
        kv[2, 3] += self.wrong if writer else 0.0
        pages: Any = [kv.view(np.uint8)]
        return Trial(writer, blocks, pages=pages, logprobs=dict(self.logprobs))


class Rig:
    def __init__(self, kv_dtype: str = "float32") -> None:
        self.engine = Engine()
        self.kept = SelfChecks(cast(Any, None), "n")
        self.kept._background = cast(Any, SimpleNamespace(run=lambda work, _: work.close()))
        self.checks = Checks(
            "decode-1", COMPAT_4, "ours", 4, 100, kv_dtype, cast(Any, self.engine), self.kept
        )

    def meet(self, name: str = "prefill-1#1", computes: str = "theirs", longest: int = 0) -> Peer:
        hello = Hello(
            prefill_instance=name.partition("#")[0], compat="c", computes=computes,
            max_prompt_tokens=longest,
        )  # fmt: skip
        peer = Peer(name, hello, cast(Any, None), 0.0)
        self.checks.met(peer)
        return peer

    def results(self) -> list[object]:
        return [check["result"] for check in cast(Any, self.checks.told()["self_checks"])]


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(getattr(request, "param", "float32"))
    yield made
    await made.checks.close()


async def test_each_kind_is_compared_once(rig: Rig) -> None:
    rig.meet()
    assert rig.checks.reason == "self_check_pending"
    await soon(lambda: rig.results() == ["passed"])
    # Prefilled here; then half of it, and all of it, by the prefill worker.
    assert rig.engine.asked == [(16, ""), (9, "prefill-1#1"), (16, "prefill-1#1")]
    rig.meet("prefill-2#2")
    rig.meet("prefill-3#3", "otherwise")
    assert rig.checks.reason == "", "another kind has passed"
    await soon(lambda: rig.results() == ["passed"] * 3)
    assert len(rig.engine.asked) == 6
    assert len(rig.kept.current) == 2


async def test_a_prefill_worker_that_takes_short_prompts_is_compared_with_one(rig: Rig) -> None:
    rig.meet(longest=11)
    await soon(lambda: rig.results() == ["passed"])
    assert rig.engine.asked == [(8, ""), (5, "prefill-1#1"), (8, "prefill-1#1")]


async def test_a_failure_says_by_how_much_and_is_compared_again_once_it_is_cleared(
    rig: Rig,
) -> None:
    rig.engine.wrong = 1.0
    peer = rig.meet()
    await soon(lambda: rig.checks.reason == "self_check_failed")
    (check,) = cast(Any, rig.checks.told()["self_checks"])
    assert "KV differs by 0.354 (rounding explains 0.001)" in check["advice"]
    assert "prefill-1" in check["advice"]
    assert "pullfill recheck" in check["advice"]
    rig.engine.wrong = 0.0
    rig.kept.current.clear()
    rig.kept._tell()
    await soon(lambda: rig.results() == ["passed"])
    assert rig.checks.reason == ""
    rig.checks.lost(peer)
    assert rig.results() == []


async def test_what_could_not_be_compared_is_no_failure_and_another_of_the_kind_is_tried(
    rig: Rig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = {"prefill-1#1": ValueError("a bug"), "prefill-2#2": Incomplete("no answer")}
    rig.engine.fails = bad.get
    rig.meet("prefill-1#1")
    await soon(lambda: "ValueError: a bug" in caplog.text)
    rig.meet("prefill-2#2")  # in the pause, which it does not wait for
    await soon(lambda: "prefill-2#2" in {writer for _, writer in rig.engine.asked})
    rig.meet("prefill-3#3")
    await soon(lambda: rig.results() == ["passed"] * 3)


@pytest.mark.parametrize("rig", ["fp8_ds_mla"], indirect=True)
async def test_nobody_passes_of_whom_nothing_was_compared(rig: Rig) -> None:
    """KV of that type is no numbers, and at first there are no log probabilities either."""
    rig.meet()
    await soon(lambda: len(rig.engine.asked) == 3)
    rig.engine.logprobs = {1: -0.5}
    assert rig.checks.reason == "self_check_pending"
    rig.meet("prefill-2#2")
    await soon(lambda: rig.results() == ["passed"] * 2)
    (result,) = rig.kept.current.values()
    assert (result.kv_difference, result.logprob_difference) == (None, 0.0)


async def test_kv_that_cannot_be_read_harms_no_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_over(random_bytes(extent(DENSE), seed=1), DENSE)

    def add(request: Any) -> Future[Any]:
        # vLLM is done with the request, whose blocks are these.
        with monkeypatch.context() as patch:
            patch.setattr(self_check, "read_pages", fails)
            trials.finished(request.request_id, [[4, 5]])
        assert "no memory is left on the GPU" in caplog.text
        trials.finished(request.request_id, [[4, 5]])
        outcome = Future[Any]()
        outcome.set_result(SimpleNamespace(new_logprobs=None))
        return outcome

    def fails(*_: object, **__: object) -> None:
        raise TransferFailed("no memory is left on the GPU")

    monkeypatch.setattr(
        requests, "own_request", lambda name, *_, **__: SimpleNamespace(request_id=name)
    )
    submit: Any = SimpleNamespace(add=add, abort=lambda _, forgotten: forgotten())
    trials = Trials(submit, [memory], ONE_GROUP, logprobs=None)
    assert len((await trials.run([1, 2, 3], salt="s", blocks=2)).pages) == 1
