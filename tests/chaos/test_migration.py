"""A decode worker dies, stops or has to leave in the middle of answers: they go on at another.

Rows 9 and 21 of the fault matrix (docs/failure-modes.md), in every form a client can ask for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from tests.support.answers import Heard, ask_for, chat_tokens
from tests.support.checked import checked
from tests.support.cluster import Cluster, Worker, until
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 100
LONG = 800
METRIC = "pullfill_frontend_migrated_total"


@dataclass
class Asked:
    """A request, what was heard, and what one aggregated engine says."""

    prompt: list[int]
    heard: Heard
    stop: str | None = None
    max_tokens: int = TOKENS

    def check(self, oracle: Oracle) -> None:
        """Complete, no token lost or repeated, all of them the oracle's."""
        heard = self.heard
        assert heard.done.wait(60), "it does not end"
        assert not heard.error
        (right,) = oracle.generate(
            [self.prompt], self.max_tokens, logprobs=1, ignore_eos=True, stop=self.stop
        )
        assert heard.text == right.text
        assert heard.tokens == right.token_ids
        assert heard.finish_reason == right.finish_reason == ("stop" if self.stop else "length")
        assert heard.completion_tokens == len(right.token_ids)
        for ours, token, step in zip(
            heard.logprobs, right.token_ids, right.logprobs or [], strict=False
        ):
            assert math.isclose(ours, step[token], abs_tol=1e-3)


def late_stop(oracle: Oracle, prompt: list[int]) -> str:
    """Some text that the answer first says in its second half."""
    (answer,) = oracle.generate([prompt], TOKENS, logprobs=1, ignore_eos=True, stop=None)
    text = answer.text
    return next(
        text[i : i + 8] for i in range(len(text) // 2, len(text)) if text.find(text[i : i + 8]) == i
    )


def ask_everything(cluster: Cluster, oracle: Oracle) -> list[Asked]:
    """Each form twice in a row: two workers take turns, so both have one of each."""
    asked = []
    for i in range(2):
        prompt = random_prompt(700, seed=41_000 + i)
        asked.append(Asked(prompt, ask_for(cluster, prompt, TOKENS, logprobs=1)))
    for i in range(2):
        text = f"tell me about number {i}"
        heard = ask_for(cluster, text, TOKENS, logprobs=True, top_logprobs=1)
        asked.append(Asked(chat_tokens(cluster, text), heard))
    for i in range(2):
        prompt = random_prompt(90, seed=41_100 + i)
        stop = late_stop(oracle, prompt)
        asked.append(Asked(prompt, ask_for(cluster, prompt, TOKENS, stop=[stop]), stop))
    for i in range(2):
        prompt = random_prompt(120, seed=41_200 + i)
        asked.append(Asked(prompt, ask_for(cluster, prompt, TOKENS, logprobs=1, stream=False)))
    return asked


def under_way(cluster: Cluster, victim: Worker, streams: list[Heard], requests: int) -> None:
    """Wait until every stream has begun, and every answer of the victim has a token."""
    until(lambda: cluster.load_of(victim)["requests"] == requests, 20, "it has its share")
    until(lambda: all(len(h.tokens) > 5 for h in streams), 20, "they are under way")
    # What runs gets a token in each step. More tokens of a stream tell that steps have passed.
    until(lambda: cluster.load_of(victim)["running"] == requests, 20, "its whole share runs")
    heard = [len(h.tokens) for h in streams]

    def went_on() -> bool:
        pairs = zip(streams, heard, strict=True)
        return all(h.done.is_set() or len(h.tokens) > before + 1 for h, before in pairs)

    until(went_on, 20, "two more tokens of each stream")


def continued(cluster: Cluster, asked: list[Asked], victim: Worker) -> int:
    """How many were continued, all of them after the victim."""
    told = [cluster.explain(a.heard.request_id) for a in asked]
    found = [t for t in told if t["migrated_from"]]
    assert all(t["migrated_from"] == [victim.instance_id] for t in found)
    assert all(t["decode_instance"] != victim.instance_id for t in found)
    assert all(t["migrated_tokens"] > 0 for t in found)
    return len(found)


@pytest.mark.essential
def test_row_9_a_killed_workers_answers_go_on_in_every_form(
    paired: Cluster, oracle: Oracle
) -> None:
    """Killed in the middle of eight answers, four of them its own, and of one that it would not
    be exact to continue. The migrations are prefilled remotely like any long prompt."""
    victim = paired.add("decode")
    for i in range(2):
        late_stop(oracle, random_prompt(90, seed=41_100 + i))  # thought of before the fault
    with checked(paired, oracle):
        victim.arm("engine.step=sleep:0.1")  # none of its answers ends before it does
        sent, refused = (paired.counter(METRIC, result=r) for r in ("sent", "not_exact"))
        seeded = []
        for i in range(2):
            prompt = random_prompt(40, seed=i)
            seeded.append(ask_for(paired, prompt, 3 * TOKENS, temperature=1, seed=7))
            until(lambda: all(h.tokens for h in seeded), 20, "its turn")
        asked = ask_everything(paired, oracle)
        under_way(paired, victim, [*seeded, *(a.heard for a in asked[:6])], 5)
        victim.kill()
        for one in asked:
            one.check(oracle)
        count = continued(paired, asked, victim)
        assert count == 4
        assert paired.counter(METRIC, result="sent") == sent + count
        assert all(h.done.wait(30) for h in seeded)
        (failed,) = [h for h in seeded if h.error]
        assert (failed.status, failed.finish_reason) == (503, None)
        assert victim.instance_id in failed.error
        assert "sampled with a seed" in failed.error
        assert paired.counter(METRIC, result="not_exact") == refused + 1


@pytest.mark.long
@pytest.mark.essential
def test_row_21_what_a_drain_does_not_finish_goes_on_elsewhere(
    paired: Cluster, oracle: Oracle
) -> None:
    """The drain's time is up long before the answers end; the worker leaves, they do not."""
    victim = paired.add("decode", "--drain-timeout=0.5")
    with checked(paired, oracle):
        victim.arm("engine.step=sleep:0.1")  # none of its answers ends before it does
        prompts = [random_prompt(60, seed=42_000 + i) for i in range(6)]
        asked = [Asked(p, ask_for(paired, p, LONG), max_tokens=LONG) for p in prompts]
        under_way(paired, victim, [a.heard for a in asked], 3)
        assert victim.stop(within_s=10) == 0
        for one in asked:
            one.check(oracle)
        assert continued(paired, asked, victim) == 3
        assert "migrating 3 unfinished requests" in victim.log.read_text()
