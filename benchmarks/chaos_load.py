"""Clients that stream greedy completions and remember every token with the time it came.

`Load` runs an asyncio loop on a thread of its own, so that whoever hurts the cluster may block.
A client asks one thing after the other at its own frontend. A frontend that accepts no connection
has taken no request: the client goes to the next one, as behind any load balancer. A request that
was accepted is never sent twice: what happens to it is the result.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import aiohttp

from benchmarks.live import BenchError
from tests.support.cluster import MODEL
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt

ASK_LIMIT_S = 120.0
PATIENCE_S = 0.8
"""A client that hangs up does so within this: before the first token, or in the middle."""


@dataclass(slots=True, eq=False)
class Ask:
    """One request. `at`: time.monotonic of each token. `error`: "" unless it failed. `cut`: the
    client itself hung up early."""

    prompt: int
    url: str
    began: float
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    error: str = ""
    cut: bool = False
    ended: float = 0.0


@dataclass(slots=True)
class Work:
    """Prompts and what one plain vLLM engine answers to each, `max_tokens` tokens."""

    prompts: list[list[int]]
    truth: list[list[int]]
    max_tokens: int

    def wrong(self, asks: Sequence[Ask]) -> list[Ask]:
        """Answers that differ: a failed or cut one must be a prefix of the truth."""
        return [a for a in asks if not self._right(a)]

    def _right(self, ask: Ask) -> bool:
        truth = self.truth[ask.prompt]
        whole = not ask.cut and not ask.error
        return ask.tokens == (truth if whole else truth[: len(ask.tokens)])


def make_work(
    oracle: Oracle, count: int, lengths: Sequence[int], max_tokens: int, *, grow: float = 0.0
) -> Work:
    """`count` prompts of these lengths in turn. `grow`: share of them that begin with the prompt
    before them, as the next turn of a conversation does."""
    rng = random.Random(count)
    prompts: list[list[int]] = []
    for number in range(count):
        prompt = random_prompt(lengths[number % len(lengths)], seed=number)
        if prompts and rng.random() < grow and len(prompts[-1]) <= max(lengths):
            prompt = prompts[-1] + prompt[: min(lengths)]
        prompts.append(prompt)
    answers = oracle.generate(prompts, max_tokens, ignore_eos=True)
    return Work(prompts, [a.token_ids for a in answers], max_tokens)


class Load:
    """`clients` at once, each `each` requests (None: until `stop`). Use as a `with` block.

    urls: frontends that live now; clients are spread over them. pause_s: mean time between two
    requests of a client. cut_share: how many requests their client abandons.
    """

    def __init__(
        self,
        work: Work,
        urls: Callable[[], Sequence[str]],
        *,
        clients: int,
        each: int | None,
        pause_s: float = 0.0,
        cut_share: float = 0.0,
        seed: int = 1,
    ) -> None:
        self._work, self._urls = work, urls
        self._clients, self._each = clients, each
        self._pause_s, self._cut_share = pause_s, cut_share
        self._seed = seed
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="load", daemon=True)
        self.asks: list[Ask] = []
        self.turned_away = 0
        self.died: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, within_s: float = ASK_LIMIT_S + 10) -> None:
        """No more requests; wait for those that run."""
        self._stop.set()
        self.join(within_s)

    def join(self, within_s: float = 600.0) -> None:
        """Until every client is done. Raises BenchError when one never ends."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            raise BenchError(f"clients still wait after {within_s:g} s")
        if self.died is not None:
            raise self.died

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def ended(self) -> list[Ask]:
        """Requests that are over, whichever way."""
        return [a for a in self.asks if a.ended]

    def failed(self) -> list[Ask]:
        return [a for a in self.ended if a.error]

    def token_times(self) -> list[float]:
        """When the tokens of all answers came, ascending."""
        return sorted(t for a in list(self.asks) for t in list(a.at))

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as exc:
            self.died = exc

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._client(session, n) for n in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        for _ in itertools.count() if self._each is None else range(self._each):
            if self._stop.is_set():
                return
            ask = Ask(next(self._numbers) % len(self._work.prompts), "", time.monotonic())
            self.asks.append(ask)
            await self._ask(session, ask, number, rng)
            ask.ended = time.monotonic()
            if self._pause_s:
                await asyncio.sleep(rng.expovariate(1 / self._pause_s))

    async def _ask(
        self, session: aiohttp.ClientSession, ask: Ask, number: int, rng: random.Random
    ) -> None:
        patience_s = None
        if rng.random() < self._cut_share:
            patience_s = rng.uniform(0, PATIENCE_S)
        body = {
            "model": MODEL,
            "prompt": self._work.prompts[ask.prompt],
            "max_tokens": self._work.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        tries = 0
        while True:
            urls = self._urls()
            ask.url = urls[(number + tries) % len(urls)]
            try:
                async with (
                    asyncio.timeout(patience_s) as patience,
                    session.post(f"{ask.url}/v1/completions", json=body) as response,
                ):
                    await _read(response, ask)
                return
            except aiohttp.ClientConnectorError as exc:
                tries, self.turned_away = tries + 1, self.turned_away + 1
                if tries > 3 * len(urls):
                    ask.error = f"no frontend: {exc}"
                    return
                await asyncio.sleep(0.05)
            except TimeoutError:
                ask.cut = patience.expired()
                ask.error = "" if ask.cut else f"not done within {ASK_LIMIT_S:g} s"
                return
            except (aiohttp.ClientError, OSError, ValueError) as exc:
                ask.error = f"{type(exc).__name__}: {exc}"
                return


async def _read(response: aiohttp.ClientResponse, ask: Ask) -> None:
    """Follow the stream to its end."""
    if response.status != 200:
        ask.error = f"{response.status}: {(await response.text())[:500]}"
        return
    finished = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            if not finished:
                ask.error = "the stream ended without a finish reason"
            return
        event = json.loads(line[6:])
        if "error" in event:
            ask.error = str(event["error"])[:500]
            return
        ask.request_id = event.get("id", ask.request_id)
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            ask.tokens += new
            ask.at += [time.monotonic()] * len(new)
            finished |= choice.get("finish_reason") is not None
    ask.error = "the stream broke off"
