"""The stock vLLM servers that are known, their health, and which of them gets a stage.

A server stays as long as one source names it. One task for each looks every second:

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
import random
import re
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pullfill.errors import ConfigError
from pullfill.frontend.forward.sources import ROLES, StockEntry
from pullfill.frontend.routing.choice import Placer, Prompt, Share
from pullfill.prefix import chain
from pullfill.runtime import log
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
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')
_BLOCK_SIZE = re.compile(r'[{,]block_size="(\d+)"')


# A decode server without a KV connector computes each prompt itself, and nobody reads the KV of the
# prefill. Its /metrics show that once it has served requests. A server without /metrics is served,
# with the load that this frontend knows.
@dataclass(slots=True)
class StockLoad:
    """What a server's /metrics says. kv_blocks: all blocks. 0: unknown.

    bare: it has served requests, and has never asked a KV connector for one. False: not known."""

    running: float = 0.0
    waiting: float = 0.0
    kv_used: float = 0.0
    kv_blocks: int = 0
    block_size: int = 0
    bare: bool = False


class _Model(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    """What /v1/models says."""

    data: list[_Model]


def load_of(text: str) -> StockLoad:
    """Read the text of vLLM's /metrics. Sums over engines. What is missing counts 0."""
    load = StockLoad()
    asked: dict[str, float] = {}
    for name, labels, value in _METRIC.findall(text):
        if name in _ASKED and not _UNSERVED.search(labels):
            asked[name] = asked.get(name, 0.0) + float(value)
        elif name == "vllm:num_requests_running":
            load.running += float(value)
        elif name == "vllm:num_requests_waiting":
            load.waiting += float(value)
        elif name == "vllm:kv_cache_usage_perc":
            load.kv_used = max(load.kv_used, float(value))
        elif name == "vllm:cache_config_info":
            blocks, size = _BLOCKS.search(labels), _BLOCK_SIZE.search("," + labels)
            load.kv_blocks += int(blocks[1]) if blocks else 0
            load.block_size = int(size[1]) if size else load.block_size
    served, cache, connector = (asked.get(name) for name in _ASKED)
    load.bare = bool(served and cache) and connector == 0.0
    return load


@dataclass(slots=True, eq=False)
class Server:
    """One stock server.

    state: `new`, `ready`, `failing`, `refused` or `gone`. why: the reason, for people.
    sources: which sources name it.
    model: the `root` of the model that it serves under our name.
    engine_id: what Mooncake's bootstrap service calls its engine.
    waits: deadlines of requests that wait for it, and of those that may still read its KV, with
    their decode servers. They end when the server is lost.
    streams: number of answers that are being read from it.
    lacking_until: it is left out until then, in seconds of the loop's clock."""

    entry: StockEntry
    state: str = "new"
    why: str = "not asked yet"
    sources: tuple[str, ...] = ()
    model: str = ""
    engine_id: str = ""
    load: StockLoad | None = None
    misses: int = 0
    lacking_until: float = 0.0
    waits: dict[asyncio.Timeout, Server | None] = field(default_factory=dict)
    streams: int = 0

    @property
    def url(self) -> str:
        return self.entry.url

    @property
    def role(self) -> str:
        return self.entry.role

    @property
    def kv(self) -> str:
        return self.entry.kv

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

    def misfits(self) -> None:
        """End all waits for KV of this server, which gives none."""
        _end(wait for wait, reader in self.waits.items() if reader is not None)


# --------------------------------------------------------------------------- which gets a stage


# Tokens of a hashed block.
BLOCK = 64
_MEAN = 0.95


def prompt_of(body: dict[str, Any] | None) -> Prompt:
    """Return what the policies need of a prompt. It never fails: an odd prompt has no blocks.

    Nothing is tokenized here. The length of a text is taken as a quarter of its UTF-8 bytes, and
    its blocks are hashed over those bytes, four of them for one token. So equal beginnings have
    equal hashes, which is all that `kv` needs. The hashes mean nothing to a vLLM server."""
    body = body or {}
    ids, messages = body.get("prompt"), body.get("messages")
    if isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        tokens = array("I", ids).tobytes()
    elif isinstance(messages, list):
        # A longer conversation begins with the text of a shorter one.
        tools = body.get("tools")
        parts = [tools, *messages] if tools else messages
        tokens = b"".join(map(msgspec.json.encode, parts))
    else:
        tokens = ids.encode() if isinstance(ids, str) else msgspec.json.encode(ids)
    count = max(1, len(tokens) // 4)
    salt, model = body.get("cache_salt"), body.get("model")
    root = chain.root(
        salt if isinstance(salt, str) else None, model if isinstance(model, str) else None, BLOCK
    )
    return Prompt(count, BLOCK, chain.extend(root, tokens[: count * 4], BLOCK))


@dataclass(slots=True)
class Pick:
    """A chosen server. share: what the request adds to its load, until it is ended."""

    server: Server
    share: Share
    choice: DecodeChoice


class Picker:
    """Chooses among the servers of one role, by the policies for decode workers (routing/choice).

    A stock server tells no blocks, so the policy `kv` knows only where this frontend sent the
    beginning of a prompt. The load of a server is what its /metrics says, and what this frontend
    has sent since.

    policy: returns the policy to use now."""

    def __init__(self, policy: Callable[[], DecodePolicy], rng: random.Random) -> None:
        self._policy = policy
        # The beginning of a prompt counts as held where it was sent for so many seconds, at least.
        self._placer = Placer(rng, predicted_s=600.0)
        self._mean_tokens = 256.0

    def choose(
        self, prompt: Prompt, servers: Sequence[Server], not_these: Collection[Server] = ()
    ) -> Pick:
        """Return one of `servers`, which is not empty, and count the prompt there.

        not_these: chosen only if there are no others."""
        left = [server for server in servers if server not in not_these] or servers
        by_id = {server.url: server for server in left}
        now, policy = asyncio.get_running_loop().time(), self._policy()
        self._mean_tokens = _MEAN * self._mean_tokens + (1 - _MEAN) * prompt.tokens
        if policy is not DecodePolicy.KV:
            prompt = Prompt(prompt.tokens, BLOCK)
        view, choice = self._placer.choose(policy, prompt, by_id, now)
        share = self._placer.send(view, choice.matched_tokens, prompt, now)
        return Pick(by_id[view.instance_id], share, choice)

    def report(self, server: Server, load: StockLoad) -> None:
        """Take the load that a server's /metrics shows."""
        # /metrics counts waiting requests, not their tokens: each is taken for a mean prompt.
        tokens = load.kv_blocks * load.block_size
        used = load.kv_used * tokens / BLOCK if tokens else load.running * 8.0
        free = (1 - load.kv_used) * tokens / BLOCK if tokens else None
        self._placer.report(server.url, load.waiting * self._mean_tokens, used, free)

    def gone(self, server: Server) -> None:
        """Forget a server."""
        self._placer.drop(server.url)


# --------------------------------------------------------------------------- the servers


class Servers:
    """All known servers. `start` nothing: `set` does what is needed. `close` it at the end.

    names: the model names that this frontend serves. model: its model, a path or a name.
    protocol: says what servers must be registered with, and checks their KV addresses.
    policy: returns `router.decode_policy`.
    headers: of each question, e.g. a key.
    look_s: how often each server is looked at. answer_s: how long it may take to answer."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        names: Sequence[str],
        model: str,
        protocol: KvProtocol,
        policy: Callable[[], DecodePolicy],
        headers: Mapping[str, str] | None = None,
        *,
        look_s: float = 1.0,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._session = session
        self._names = names
        self._model = model
        self._protocol = protocol
        self._pickers = {role: Picker(policy, random.Random()) for role in ROLES}
        self._headers = headers or {}
        self.look_s, self._answer_s = look_s, answer_s
        self._sources: dict[str, tuple[StockEntry, ...]] = {}
        self.known: dict[StockEntry, Server] = {}
        self._ready: dict[str, Sequence[Server]] = {role: () for role in ROLES}
        self._tasks: dict[asyncio.Task[None], Server] = {}

    # ---------------------------------------------------------------- sources

    def set(self, source: str, entries: Iterable[StockEntry]) -> None:
        """A source knows exactly these servers now."""
        self._sources[source] = tuple(entries)
        named: dict[tuple[str, str], list[str]] = {}
        wanted: dict[tuple[str, str], StockEntry] = {}
        for name, found in self._sources.items():
            for entry in found:
                place = entry.role, entry.url
                named.setdefault(place, []).append(name)
                if entry.kv or place not in wanted:
                    wanted[place] = entry
        for entry in self.known.keys() - set(wanted.values()):
            # Its requests go on, and `_watch` until they have ended.
            server = self.known.pop(entry)
            server.state, server.why = "gone", "it is registered no more"
            self._pickers[server.role].gone(server)
            _log.info("stock %s server %s is gone (%s)", entry.role, entry.url, source)
        for place, entry in wanted.items():
            if entry not in self.known:
                server = self.known[entry] = Server(entry)
                task = asyncio.create_task(self._watch(server), name=f"stock-{entry.url}")
                self._tasks[task] = server
                task.add_done_callback(self._tasks.pop)
                _log.info("stock %s server %s is known (%s)", entry.role, entry.url, source)
            self.known[entry].sources = tuple(named[place])
        self._update()

    async def close(self) -> None:
        """Forget all servers. Requests that wait for them end."""
        self.fail_all("this frontend ends")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def fail_all(self, why: str) -> None:
        """Forget all servers, and end all requests at them. Their clients are told `why`."""
        for server in self._tasks.values():  # also those that finish their last requests
            server.state, server.why = "gone", why
            server.lose()
        self.known.clear()
        self._update()

    # ---------------------------------------------------------------- questions

    def ready(self, role: str) -> Sequence[Server]:
        """Return the servers of a role that can take requests. A new list after each change."""
        return self._ready[role]

    def count(self, role: str, state: str) -> int:
        """Return how many servers of a role are in a state."""
        return sum(s.role == role and s.state == state for s in self.known.values())

    def pick(self, role: str, prompt: Prompt, bad: Collection[Server]) -> Pick | None:
        """Choose a server that is ready, and count the prompt there. None: there is none.

        bad: chosen only if there are no others."""
        servers = self._ready[role]
        return self._pickers[role].choose(prompt, servers, bad) if servers else None

    def none_ready(self, role: str) -> str:
        """Return why no server of a role can take requests, for people."""
        lines = [s for s in self.known.values() if s.role == role]
        if not lines:
            how = "--servers, --servers-file or heartbeats"
            return f"no stock {role} server is known: name one with {how}"
        one = min(lines, key=lambda s: s.state != "refused")
        return f"no stock {role} server is ready: {one.url} is {one.state}: {one.why}"

    def troubles(self) -> list[str]:
        """Return a line for each server that takes no requests, with the reason."""
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
            row["sources"] = server.sources
            if server.load is not None:
                row["running"], row["waiting"] = server.load.running, server.load.waiting
            rows.append(row)
        return rows

    # ---------------------------------------------------------------- from requests

    def failed(self, server: Server, why: str) -> None:
        """A request could not reach a server. It gets no more until its health is good again."""
        if server.state == "ready":
            # Other requests may still get their answers there, so they are not ended.
            self._turn(server, "failing", why, end=False)

    def lacks(self, server: Server, why: str) -> None:
        """A prefill server answered without what the protocol needs. It is left out for a while."""
        server.lacking_until = asyncio.get_running_loop().time() + LACK_S
        self._turn(server, "refused", why)

    # ---------------------------------------------------------------- inside

    def _turn(self, server: Server, state: str, why: str = "", *, end: bool = True) -> None:
        if state == "failing" and end:
            server.lose()
        if state == "refused":
            server.misfits()
        if server.state == "gone" or (server.state, server.why) == (state, why):
            return
        before, server.state, server.why = server.state, state, why
        if state == "ready":
            _log.info("stock %s server %s is ready", server.role, server.url)
        elif state != before or state == "refused":
            _log.warning("stock %s server %s is %s: %s", server.role, server.url, state, why)
        self._update()

    def _update(self) -> None:
        for role in ROLES:
            now = [s for s in self.known.values() if s.role == role and s.state == "ready"]
            if now != list(self._ready[role]):
                self._ready[role] = now

    async def _watch(self, server: Server) -> None:
        while server.state != "gone" or server.waits or server.streams:
            try:
                await self._look(server)
            except ConfigError as exc:
                self._turn(server, "refused", str(exc))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
                server.misses += 1
                text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                if server.state not in ("ready", "gone") or server.misses >= MISSES:
                    self._turn(server, "failing", f"/health does not answer ({text})")
            except Exception as exc:
                if server.state != "failing":
                    _log.exception("cannot look at stock %s server %s", server.role, server.url)
                why = f"its health cannot be read: see the log of this frontend ({exc!r})"
                self._turn(server, "failing", why, end=False)
            await asyncio.sleep(self.look_s)

    async def _look(self, server: Server) -> None:
        """Ask for the health, for the load, and for the models if that matters."""
        await self._get(server.url + "/health")
        server.misses = 0
        load: StockLoad | None = None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, ConfigError):
            server.load = load = load_of((await self._get(server.url + "/metrics")).decode())
        if server.state == "ready":
            if why := self._bare(server):
                self._turn(server, "refused", why)
        elif server.state != "gone":
            why = self._bare(server) or await self._refusal(server)
            if why or asyncio.get_running_loop().time() < server.lacking_until:
                self._turn(server, "refused", why or server.why)
                return
            self._turn(server, "ready")
        if load is not None and server.state == "ready":
            self._pickers[server.role].report(server, load)

    def _bare(self, server: Server) -> str:
        """Return what to do about a server that has no KV connector. Empty: nothing."""
        if server.load is None or not server.load.bare:
            return ""
        return (
            f"it has no KV connector, so it neither gives nor gets KV: {self._protocol.start_with}"
        )

    async def _refusal(self, server: Server) -> str:
        """Return why the server cannot be used here. Empty: it can."""
        if (needs := self._protocol.needs(server.role)) and not server.kv:
            return f"register it with {needs}"
        try:
            models = msgspec.json.decode(await self._get(server.url + "/v1/models"), type=_Models)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "its /v1/models lists no models as vLLM does: register the URL of a vLLM server"
        served = {model.id: model.root or model.id for model in models.data}
        if not all(name in served for name in self._names):
            return (
                f"it serves {', '.join(served) or 'no model'}, and this frontend serves "
                f"{', '.join(self._names)}: start it with "
                f"--served-model-name {' '.join(self._names)}"
            )
        name = self._names[0]
        server.model = served[name]
        others = [s for s in self.known.values() if s is not server and s.state == "ready"]
        for model, who in [(self._model, "this frontend"), *((s.model, s.url) for s in others)]:
            if stem(model) != stem(server.model):
                return (
                    f"it serves {server.model} as {name}, and {who} serves {model} under that "
                    "name: give one of the models another --served-model-name, or, if they are "
                    "the same model, give its folders the same name"
                )
        return await self._protocol.check(server, self._get)

    async def _get(self, url: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._answer_s)
        get = self._session.get
        async with get(
            url, timeout=timeout, headers=self._headers, allow_redirects=False
        ) as answer:
            if answer.status in (401, 403):
                raise ConfigError(
                    f"{url} answers {answer.status}: start it without an API key, or "
                    "give this frontend the same one as [frontend] stock_key_file of --security"
                )
            if answer.status != 200:
                raise ValueError(f"{url} answers {answer.status}")
            return await answer.read()


def _end(waits: Iterable[asyncio.Timeout]) -> None:
    now = asyncio.get_running_loop().time()
    for wait in list(waits):
        if not wait.expired():
            wait.reschedule(now)


def stem(model: str) -> str:
    """Return the name of a model without its folders: it may lie elsewhere on each machine."""
    path = PurePosixPath(model)
    for part in path.parts:
        if part.startswith("models--"):  # a snapshot in the cache of the hub
            return part.rpartition("--")[2]
    return path.name
