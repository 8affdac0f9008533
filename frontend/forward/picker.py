"""Which stock server gets a stage: the same policies as for decode workers (`routing/choice`).

A stock server tells no blocks, so the policy `kv` knows only where this frontend sent the beginning
of a prompt. Nothing is tokenized here. The length of a text is taken as a quarter of its UTF-8
bytes, and its blocks are hashed over those bytes, four of them for one token. So equal beginnings
have equal hashes, which is all that `kv` needs. The hashes mean nothing to a vLLM server.

The load of a server is what its /metrics says, and what this frontend has sent since.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pullfill.frontend.forward.servers import Server
from pullfill.frontend.routing.choice import Candidates, Placer, Share
from pullfill.prefix import chain
from pullfill.wire import DecodeChoice, DecodePolicy

# Tokens of a hashed block.
BLOCK = 64
_MEAN = 0.95


@dataclass(frozen=True, slots=True)
class Prompt:
    """tokens: its length, estimated for text. hashes: of its whole blocks (prefix/chain.py)."""

    tokens: int
    hashes: list[int]


def prompt_of(body: dict[str, Any] | None) -> Prompt:
    """Return what the policies need of a prompt. It never fails: an odd prompt has no blocks."""
    body = body or {}
    ids = body.get("prompt")
    if isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        tokens = array("I", ids).tobytes()
    else:
        tokens = _text(body).encode("utf-8", "surrogatepass")
    count = max(1, len(tokens) // 4)
    salt = body.get("cache_salt")
    model = body.get("model")
    root = chain.root(
        salt if isinstance(salt, str) else None, model if isinstance(model, str) else None, BLOCK
    )
    return Prompt(count, chain.extend(root, tokens[: count * 4], BLOCK))


def _text(body: dict[str, Any]) -> str:
    """The prompt as text. A longer conversation begins with the text of a shorter one."""
    messages = body.get("messages")
    if isinstance(messages, list):
        tools = body.get("tools")
        head = msgspec.json.encode(tools).decode() if tools else ""
        return head + "".join(msgspec.json.encode(message).decode() for message in messages)
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()


class Pick:
    """A chosen server, counted until `end`. Both methods may be called again without effect."""

    def __init__(self, server: Server, share: Share, choice: DecodeChoice) -> None:
        self.server, self.choice = server, choice
        self._share = share

    def first(self) -> None:
        """The prompt is computed."""
        self._share.first()

    def end(self, made: int = 0) -> None:
        """The request has left the server. made: tokens of its answer."""
        self._share.end(made)


class Picker:
    """Chooses among the servers of one role.

    policy: returns the policy to use now.
    remember_s: how long the beginning of a prompt counts as held where it was sent, at least."""

    def __init__(
        self, policy: Callable[[], DecodePolicy], rng: random.Random, remember_s: float = 600.0
    ) -> None:
        self._policy = policy
        self._placement = Placer(rng, remember_s)
        self._servers: Sequence[Server] = ()
        self._by_id: dict[str, Server] = {}
        self._among = Candidates.of([])
        self._mean_tokens = 256.0

    def choose(
        self, prompt: Prompt, servers: Sequence[Server], not_these: Collection[Server] = ()
    ) -> Pick:
        """Return one of `servers`, which is not empty, and count the prompt there.

        not_these: chosen only if there are no others."""
        left = [server for server in servers if server not in not_these]
        if left and len(left) < len(servers):
            among = self._candidates(left)
            by_id = {server.url: server for server in left}
        else:
            if servers is not self._servers:  # a new list after each change
                self._servers = servers
                self._by_id = {server.url: server for server in servers}
                self._among = self._candidates(servers)
            among, by_id = self._among, self._by_id
        now, policy = asyncio.get_running_loop().time(), self._policy()
        self._mean_tokens = _MEAN * self._mean_tokens + (1 - _MEAN) * prompt.tokens
        hashes = prompt.hashes if policy is DecodePolicy.KV else None
        choice = self._placement.choose(
            policy, prompt.tokens, among, now, block=BLOCK, hashes=hashes
        )
        share = self._placement.send(choice, prompt.tokens, now, block=BLOCK, hashes=hashes)
        told = DecodeChoice(
            policy=policy,
            matched_tokens=choice.matched_tokens,
            score=None if choice.score is None else round(choice.score, 1),
            reason=choice.reason,
        )
        return Pick(by_id[choice.view.instance_id], share, told)

    def report(self, server: Server) -> None:
        """Take the load that a server's /metrics shows."""
        load = server.load
        if load is None:
            return
        fleet = self._placement.fleet
        fleet.join(server.url)
        # /metrics counts waiting requests, not their tokens: each is taken for a mean prompt.
        tokens = load.kv_blocks * load.block_size
        used = load.kv_used * tokens / BLOCK if tokens else load.running * 8.0
        free = (1 - load.kv_used) * tokens / BLOCK
        fleet.report(server.url, load.waiting * self._mean_tokens, used, free)
        if not tokens:
            fleet.join(server.url).free_blocks = None

    def gone(self, server: Server) -> None:
        """Forget a server."""
        self._placement.drop(server.url)
        self._servers = ()

    def _candidates(self, servers: Sequence[Server]) -> Candidates:
        return self._placement.candidates([server.url for server in servers])
