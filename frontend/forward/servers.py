"""The stock vLLM servers that are known, their health, and which of them gets a stage.

A server stays while it is named. A task of its own looks at it every second:

    new ──► ready ◄──► failing          refused
              └────────────────────────────┘

- failing: `/health` has not answered MISSES times, or a request could not reach it. Its waiting
  requests end at once, to be repeated elsewhere. One good answer makes it ready again.
- refused: it serves another model, lists none, lacks a KV address or its connector. It is looked
  at again, and the reason is shown in /ready, in the status and in the log.
Single event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pullfill.errors import ConfigError
from pullfill.frontend.forward.sources import ROLES, StockEntry
from pullfill.frontend.routing.choice import BY_PREFIX, Placer, Prompt, Share
from pullfill.prefix import chain
from pullfill.runtime import log
from pullfill.runtime.lifecycle import end
from pullfill.wire import DecodeChoice, DecodePolicy

if TYPE_CHECKING:
    from pullfill.frontend.forward.protocols import KvProtocol

_log = log.get("frontend.forward")

# How long a server may take to answer one question about its health.
ANSWER_S = 3.0
MISSES = 3
# How long a server is left out whose prefill answers lack what the protocol needs. Its health says
# nothing about that, so after this time one request tries it again.
LACK_S = 30.0
_METRIC = re.compile(r"^(vllm:[a-z_]+)(?:\{([^}\n]*)\})? ([0-9.eE+-]+)$", re.M)
# Counts of requests, of tokens looked up in the server's own cache, and of tokens looked up at
# its connector. vLLM counts the last two together. Without a connector, the last one stays 0.
_ASKED = (
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:external_prefix_cache_queries_total",
)
_UNSERVED = re.compile(r'finished_reason="(abort|error)"')


# A decode server without a KV connector computes each prompt itself, and nobody reads the KV of the
# prefill. Its /metrics show that once it has served requests. A server without /metrics is served,
# with the load that this frontend knows.
@dataclass(slots=True)
class StockLoad:
    """What a server's /metrics says, in requests.

    bare: it has served requests, and has never asked a KV connector for one. False: not known."""

    running: float = 0.0
    waiting: float = 0.0
    bare: bool = False


class _Model(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    """What /v1/models says."""

    data: list[_Model]


def load_of(text: str) -> StockLoad:
    """Read the text of vLLM's /metrics. Sums over engines. What is missing counts 0."""
    sums: dict[str, float] = defaultdict(float)
    for name, labels, value in _METRIC.findall(text):
        if not _UNSERVED.search(labels):
            sums[name] += float(value)
    served, cache, connector = (sums.get(name) for name in _ASKED)
    return StockLoad(
        running=sums["vllm:num_requests_running"],
        waiting=sums["vllm:num_requests_waiting"],
        bare=bool(served and cache) and connector == 0.0,
    )


@dataclass(slots=True, eq=False)
class Server:
    """One stock server. role, url, kv: see `StockEntry`.

    state: `new`, `ready`, `failing`, `refused` or `gone`. why: the reason, for people.
    model: the `root` of the model that it serves under our name.
    engine_id: what Mooncake's bootstrap service calls its engine.
    waits: deadlines of requests that wait for it, and of those that may still read its KV, with
    their decode servers. They end when the server is lost.
    streams: number of answers that are being read from it.
    lacking_until: it is left out until then, in seconds of the loop's clock."""

    role: str
    url: str
    kv: str
    state: str = "new"
    why: str = "not asked yet"
    model: str = ""
    engine_id: str = ""
    load: StockLoad | None = None
    lacking_until: float = 0.0
    waits: dict[asyncio.Timeout, Server | None] = field(default_factory=dict)
    streams: int = 0

    @property
    def kv_url(self) -> str:
        return self.kv if "://" in self.kv else f"http://{self.kv}"

    @contextlib.asynccontextmanager
    async def watched(self, reader: Server | None = None) -> AsyncIterator[None]:
        """While open, the wait of this task ends with TimeoutError when this server is lost.

        reader: a decode server that may wait for the KV of this one. vLLM would wait without end
        for a server that hangs."""
        async with asyncio.timeout(None) as wait:
            self.waits[wait] = reader
            try:
                yield
            finally:
                del self.waits[wait]

    def lose(self) -> None:
        """End all waits for this server. A decode server that computes all it has needs no KV."""
        _end(w for w, at in self.waits.items() if at is None or at.load is None or at.load.waiting)


# --------------------------------------------------------------------------- which gets a stage


# Tokens of a hashed block.
BLOCK = 64
# Of a prompt, so many bytes are looked at. To hash an image of 10 MB takes 80 ms and more, while
# all streams wait, and its blocks would push those of other prompts out.
LOOKED_AT = 1 << 20
# /metrics counts requests, not their tokens. Each one that waits counts as so many tokens, and each
# one that runs as so many blocks of KV.
_WAITS_TOKENS = 512
_RUNS_BLOCKS = 8


def prompt_of(body: dict[str, Any]) -> Prompt:
    """Return what the policies need of a prompt. It never fails: an odd prompt has no blocks.

    Nothing is tokenized here. Four bytes of the prompt's JSON are taken for one token, and its
    blocks are hashed over these. So equal beginnings have equal hashes, which is all that `kv`
    needs. The hashes mean nothing to a vLLM server."""
    what, messages = body.get("prompt"), body.get("messages")
    if isinstance(messages, list):
        # A longer conversation begins with the text of a shorter one.
        what = [body.get("tools"), *messages]
    text = to_json(what)[:LOOKED_AT]
    count = max(1, len(text) // 4)
    salt, model = (
        value if isinstance(value, str) else None
        for value in (body.get("cache_salt"), body.get("model"))
    )
    root = chain.root(salt, model, BLOCK)
    return Prompt(count, BLOCK, chain.extend(root, text[: count * 4], BLOCK))


def to_json(value: Any) -> bytes:
    """Return what `json.loads` has read as JSON, which vLLM reads in the same way."""
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(slots=True)
class Pick:
    """A chosen server. share: what the request adds to its load, until it is ended."""

    server: Server
    share: Share
    choice: DecodeChoice


# --------------------------------------------------------------------------- the servers


@dataclass(slots=True, eq=False)
class Servers:
    """All known servers. `start` nothing: `set` does what is needed. `close` it at the end.

    names: the model names that this frontend serves. model: its model, a path or a name.
    protocol: says what servers must be registered with, and checks their KV addresses.
    policy: returns `router.decode_policy`.
    session: its headers are those of each request to a server, e.g. a key.
    look_s: how often each server is looked at. answer_s: how long it may take to answer."""

    session: aiohttp.ClientSession
    names: Sequence[str]
    model: str
    protocol: KvProtocol
    policy: Callable[[], DecodePolicy]
    _: KW_ONLY
    look_s: float = 1.0
    answer_s: float = ANSWER_S
    known: dict[StockEntry, Server] = field(default_factory=dict)
    _placers: dict[str, Placer] = field(init=False)
    _tasks: dict[asyncio.Task[None], Server] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The beginning of a prompt counts as held where it was sent for so many seconds, at least.
        self._placers = {role: Placer(random.Random(), predicted_s=600.0) for role in ROLES}

    def set(self, entries: Iterable[StockEntry]) -> None:
        """These are the servers from now on."""
        # A server that is named twice has one place, with its KV address.
        wanted = {entry[:2]: entry for entry in sorted(entries, key=lambda e: bool(e.kv))}.values()
        for entry in self.known.keys() - set(wanted):
            # Its requests go on, and `_watch` until they have ended.
            server = self.known.pop(entry)
            server.state, server.why = "gone", "it is registered no more"
            self._placers[server.role].drop(server.url)
            _log.info("stock %s server %s is gone", entry.role, entry.url)
        for entry in (one for one in wanted if one not in self.known):
            server = self.known[entry] = Server(*entry)
            task = asyncio.create_task(self._watch(server), name=f"stock-{entry.url}")
            self._tasks[task] = server
            task.add_done_callback(self._tasks.pop)
            _log.info("stock %s server %s is known", entry.role, entry.url)

    async def close(self) -> None:
        """Forget all servers. Requests that wait for them end."""
        self.fail_all("this frontend ends")
        await end(*self._tasks)

    def fail_all(self, why: str) -> None:
        """Forget all servers, and end all requests at them. Their clients are told `why`."""
        for server in self._tasks.values():  # also those that finish their last requests
            server.state, server.why = "gone", why
            server.lose()
        self.known.clear()

    # ---------------------------------------------------------------- questions

    def ready(self, role: str) -> list[Server]:
        """Return the servers of a role that can take requests."""
        return [s for s in self.known.values() if s.role == role and s.state == "ready"]

    def count(self, role: str, state: str) -> int:
        """Return how many servers of a role are in a state."""
        return sum(s.role == role and s.state == state for s in self.known.values())

    def pick(self, role: str, prompt: Prompt, bad: Collection[Server]) -> Pick | None:
        """Choose a server that is ready, and count the prompt there. None: there is none.

        By the policies for decode workers (routing/choice). A stock server tells no blocks, so the
        policy `kv` knows only where this frontend sent the beginning of a prompt. The load of a
        server is what its /metrics says, and what this frontend has sent since.

        bad: chosen only if there are no others."""
        ready = self.ready(role)
        by_url = {s.url: s for s in ready if s not in bad} or {s.url: s for s in ready}
        if not by_url:
            return None
        placer, policy, now = self._placers[role], self.policy(), _now()
        if policy not in BY_PREFIX:
            prompt = Prompt(prompt.tokens, BLOCK)
        view, choice = placer.choose(policy, prompt, by_url, now)
        share = placer.send(view, choice.matched_tokens, prompt, now)
        return Pick(by_url[view.instance_id], share, choice)

    def none_ready(self, role: str) -> str:
        """Return why no server of a role can take requests, for people."""
        lines = [s for s in self.known.values() if s.role == role]
        if not lines:
            return f"no stock {role} server is known: name one with --servers or heartbeats"
        one = min(lines, key=lambda s: s.state != "refused")
        return f"no stock {role} server is ready: {one.url} is {one.state}: {one.why}"

    def troubles(self) -> list[str]:
        """Return a line for each server that takes no requests."""
        return [
            f"stock {server.role} server {server.url} is {server.state}: {server.why}"
            for server in self.known.values()
            if server.state != "ready"
        ]

    def status(self) -> list[dict[str, Any]]:
        """Return what is known of each server, for JSON."""
        rows = []
        for server in sorted(self.known.values(), key=lambda s: (s.role, s.url)):
            row: dict[str, Any] = {"role": server.role, "url": server.url, "state": server.state}
            row |= {"why": server.why, "kv_address": server.kv, "model": server.model}
            if server.load is not None:
                row["running"], row["waiting"] = server.load.running, server.load.waiting
            rows.append(row)
        return rows

    # ---------------------------------------------------------------- from requests

    def failed(self, server: Server, why: str) -> None:
        """A request could not reach a server. It gets no more until its health is good again."""
        if server.state == "ready":
            # Other requests may still get their answers there, so they are not ended.
            self._turn(server, "failing", why)

    def lacks(self, server: Server, why: str) -> None:
        """A prefill server answered without what the protocol needs. It is left out for a while."""
        server.lacking_until = _now() + LACK_S
        self._turn(server, "refused", why)

    # ---------------------------------------------------------------- inside

    def _turn(self, server: Server, state: str, why: str = "") -> None:
        if state == "refused":  # it gives no KV, so nobody waits for that
            _end(wait for wait, reader in server.waits.items() if reader is not None)
        if server.state == "gone" or (server.state, server.why) == (state, why):
            return
        before, server.state, server.why = server.state, state, why
        if state == "ready":
            _log.info("stock %s server %s is ready", server.role, server.url)
        elif state != before or state == "refused":
            _log.warning("stock %s server %s is %s: %s", server.role, server.url, state, why)

    async def _watch(self, server: Server) -> None:
        misses = 0
        while server.state != "gone" or server.waits or server.streams:
            try:
                await self._look(server)
                misses = 0
            except ConfigError as exc:
                self._turn(server, "refused", str(exc))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
                misses += 1
                if server.state not in ("ready", "gone") or misses >= MISSES:
                    server.lose()
                    text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                    self._turn(server, "failing", f"/health does not answer ({text})")
            except Exception as exc:
                if server.state != "failing":
                    _log.exception("cannot look at stock %s server %s", server.role, server.url)
                why = f"its health cannot be read: see the log of this frontend ({exc!r})"
                self._turn(server, "failing", why)
            await asyncio.sleep(self.look_s)

    async def _look(self, server: Server) -> None:
        """Ask for the health, for the load, and for the models if that matters."""
        await self._get(server.url + "/health")
        load = None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, ConfigError):
            server.load = load = load_of((await self._get(server.url + "/metrics")).decode())
        if server.state != "gone":
            why = ""
            if server.load is not None and server.load.bare:
                why = "it has no KV connector, so it neither gives nor gets KV: "
                why += self.protocol.start_with
            elif server.state != "ready":
                why = await self._refusal(server)
                if not why and _now() < server.lacking_until:
                    why = server.why
            self._turn(server, "refused" if why else "ready", why)
        # An old load would count requests of this frontend that have ended, as those of others.
        if server.state == "ready" and load is not None:
            tokens, blocks = load.waiting * _WAITS_TOKENS, load.running * _RUNS_BLOCKS
            self._placers[server.role].report(server.url, tokens, blocks, None)

    async def _refusal(self, server: Server) -> str:
        """Return why the server cannot be used here. Empty: it can."""
        try:
            models = msgspec.json.decode(await self._get(server.url + "/v1/models"), type=_Models)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "its /v1/models lists no models as vLLM does: register the URL of a vLLM server"
        served = {model.id: model.root or model.id for model in models.data}
        if not all(name in served for name in self.names):
            return (
                f"it serves {', '.join(served) or 'no model'}, and this frontend serves "
                f"{', '.join(self.names)}: start it with "
                f"--served-model-name {' '.join(self.names)}"
            )
        name = self.names[0]
        server.model = served[name]
        if stem(self.model) != stem(server.model):
            return (
                f"it serves {server.model} as {name}, and this frontend serves {self.model} under "
                "that name: give one of the models another --served-model-name, or, if they are "
                "the same model, give its folders the same name"
            )
        return await self.protocol.check(server, self._get)

    async def _get(self, url: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self.answer_s)
        get = self.session.get
        async with get(url, timeout=timeout, allow_redirects=False) as answer:
            if answer.status in (401, 403):
                raise ConfigError(
                    f"{url} answers {answer.status}: start it without an API key, or "
                    "give this frontend the same one as [frontend] stock_key_file of --security"
                )
            if answer.status != 200:
                raise ValueError(f"{url} answers {answer.status}")
            return await answer.read()


def _end(waits: Iterable[asyncio.Timeout]) -> None:
    for wait in list(waits):
        if not wait.expired():
            wait.reschedule(_now())


def _now() -> float:
    return asyncio.get_running_loop().time()


def stem(model: str) -> str:
    """Return the name of a model without its folders: it may lie elsewhere on each machine."""
    path = PurePosixPath(model)
    for part in path.parts:
        if part.startswith("models--"):  # a snapshot in the cache of the hub
            return part.rpartition("--")[2]
    return path.name
