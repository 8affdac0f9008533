"""Whose outputs are whose, when one engine serves clients and prefill jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.elastic.hooks import ElasticHooks
from pullfill.engine.requests import PREFILL_CLIENT


class FakeSide:
    """Notes each call. wanted: what `before_step` returns."""

    def __init__(self, wanted: bool = False) -> None:
        self.wanted = wanted
        self.calls: list[Any] = []

    def before_step(self) -> bool:
        self.calls.append("before")
        return self.wanted

    def after_step(self, running: int) -> None:
        self.calls.append(("after", running))

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        self.calls.append(dict(outputs))

    def on_failed_step(self, untouched: set[str]) -> None:
        self.calls.append(untouched)


def hooks(*sides: Any) -> ElasticHooks:
    decode, prefill = sides
    both = ElasticHooks(prefill)
    both.use(decode)
    return both


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
def test_both_sides_see_every_step(wanted: tuple[bool, bool]) -> None:
    decode, prefill = map(FakeSide, wanted)
    both = hooks(decode, prefill)
    assert both.before_step() is any(wanted)
    both.after_step(1)
    assert decode.calls == prefill.calls == ["before", ("after", 1)]


def test_outputs_of_jobs_reach_no_frontend() -> None:
    decode, prefill = FakeSide(), FakeSide()
    jobs = SimpleNamespace(scheduler_stats="stats")
    client = SimpleNamespace(scheduler_stats=None)
    hooks(decode, prefill).on_outputs({PREFILL_CLIENT: jobs, 0: client})
    assert prefill.calls == [{PREFILL_CLIENT: jobs}]
    assert decode.calls == [{0: client}]
    assert client.scheduler_stats == "stats", "a step's statistics come once"


def test_a_step_with_jobs_alone_is_nothing_to_the_decode_side() -> None:
    decode, prefill = FakeSide(), FakeSide()
    hooks(decode, prefill).on_outputs({PREFILL_CLIENT: SimpleNamespace(scheduler_stats=None)})
    assert decode.calls == []
