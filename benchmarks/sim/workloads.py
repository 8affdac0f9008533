"""Generated workloads. Each is a pure function of its arguments and the seed.

Lengths are log-normal, as in the published traces: most are short, a few are long.
"""

from __future__ import annotations

import math
import random

from benchmarks.sim.requests import Req, Text, Workload, mix

BLOCK = 16
BURST_PREFIX = 4096
"""Tokens that the siblings of a burst share."""


def lognormal(rng: random.Random, median: float, sigma: float, most: float) -> int:
    """A length in tokens, at least 1."""
    return max(1, int(min(most, median * math.exp(rng.gauss(0.0, sigma)))))


def conversations(
    count: int,
    span_s: float,
    *,
    seed: int,
    turns: float = 5.0,
    prompts: int = 20,
    system: int = 512,
    first: int = 1024,
    turn: int = 256,
    output: int = 128,
    think_s: float = 20.0,
) -> Workload:
    """Conversations of several turns. Each turn waits for the answer, then for its user.

    count: conversations, which begin over `span_s` seconds.
    turns: mean number, geometric.
    prompts: different system prompts, of `system` tokens; the n-th is used 1/n as often as the 1st.
    first, turn, output: median length of the first message, of the others, and of an answer.
    think_s: mean time between answer and next turn, exponential.
    """
    rng = random.Random(mix(seed, 1))
    shares = [1.0 / (n + 1) for n in range(prompts)]
    requests: list[Req] = []
    for session, at in enumerate(sorted(rng.uniform(0.0, span_s) for _ in range(count))):
        text = Text(BLOCK, mix(seed, 2))
        if prompts:
            text.add(system, mix(seed, 3, rng.choices(range(prompts), shares)[0]))
        before, number = None, 0
        while number == 0 or rng.random() < 1.0 - 1.0 / turns:
            text.add(
                lognormal(rng, turn if number else first, 1.0, 32_768),
                mix(seed, 4, session, number),
            )
            answer = lognormal(rng, output, 0.8, 2048)
            prompt = list(text.hashes)
            length = text.tokens
            text.add(answer, mix(seed, 5, session, number))
            wait = rng.expovariate(1.0 / think_s) if number else at
            before = Req(
                len(requests),
                wait,
                length,
                answer,
                prompt,
                text.hashes[len(prompt) :],
                session,
                follows=before,
            )
            requests.append(before)
            number += 1
    return Workload("conversations", BLOCK, requests)


def paced(
    count: int,
    *,
    seed: int,
    gap_s: float = 0.5,
    system: int = 2048,
    own: int = 128,
    output: int = 16,
) -> Workload:
    """Requests with one system prompt, one after the other: no worker ever has a queue."""
    rng = random.Random(mix(seed, 7))
    requests: list[Req] = []
    before = None
    for number in range(count):
        text = Text(BLOCK, mix(seed, 8))
        text.add(system, mix(seed, 9))
        text.add(lognormal(rng, own, 0.5, 4 * own), mix(seed, 10, number))
        before = Req(
            number, gap_s, text.tokens, output, text.hashes, session=number, follows=before
        )
        requests.append(before)
    return Workload("paced", BLOCK, requests)


def bursts(
    groups: int,
    siblings: int,
    *,
    seed: int,
    gap_s: float = 1.0,
    prefix: int = BURST_PREFIX,
    own: int = 64,
    output: int = 64,
) -> Workload:
    """`groups` bursts of `siblings` requests that come at once and share a long prefix."""
    rng = random.Random(mix(seed, 11))
    requests: list[Req] = []
    for group in range(groups):
        for n in range(siblings):
            text = Text(BLOCK, mix(seed, 12))
            text.add(prefix, mix(seed, 13, group))
            text.add(own, mix(seed, 14, group, n))
            at = group * gap_s + n * 0.001 + rng.random() * 0.0005
            requests.append(
                Req(
                    len(requests),
                    at,
                    text.tokens,
                    output,
                    text.hashes,
                    session=len(requests),
                    group=group,
                )
            )
    return Workload("bursts", BLOCK, requests)


def storm(
    count: int, span_s: float, *, seed: int, cv: float = 13.0, prompt: int = 1500, output: int = 30
) -> Workload:
    """Prompts that share nothing. Times between arrivals are gamma distributed with this CV."""
    rng = random.Random(mix(seed, 15))
    shape = 1.0 / cv**2
    at, requests = 0.0, []
    for number in range(count):
        at += rng.gammavariate(shape, span_s / count / shape)
        text = Text(BLOCK, mix(seed, 16, number))
        text.add(lognormal(rng, prompt, 0.8, 8192), mix(seed, 17, number))
        requests.append(
            Req(
                number,
                at,
                text.tokens,
                lognormal(rng, output, 0.8, 512),
                text.hashes,
                session=number,
            )
        )
    return Workload("storm", BLOCK, requests)


def documents(
    count: int,
    span_s: float,
    *,
    seed: int,
    docs: int = 300,
    length: int = 8192,
    own: int = 64,
    output: int = 64,
) -> Workload:
    """Questions about documents: the n-th is asked about 1/n as often as the first."""
    rng = random.Random(mix(seed, 18))
    shares = [1.0 / (n + 1) for n in range(docs)]
    requests: list[Req] = []
    for number, at in enumerate(sorted(rng.uniform(0.0, span_s) for _ in range(count))):
        text = Text(BLOCK, mix(seed, 19))
        doc = rng.choices(range(docs), shares)[0]
        text.add(
            lognormal(random.Random(mix(seed, 20, doc)), length, 0.5, 32768), mix(seed, 20, doc)
        )
        text.add(lognormal(rng, own, 0.5, 512), mix(seed, 21, number))
        requests.append(
            Req(
                number,
                at,
                text.tokens,
                lognormal(rng, output, 0.8, 512),
                text.hashes,
                session=number,
            )
        )
    return Workload("documents", BLOCK, requests)
