"""From the changes of vLLM's prefix cache to numbered events that a frontend can follow."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import operator
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import pytest

from pullfill.decode_worker.prefix import block_events
from pullfill.decode_worker.prefix.block_events import BlockEvents, Held
from pullfill.engine.kv_events import Change, Cleared, KvEvents, Places, Removed, Stored
from pullfill.prefix import chain
from pullfill.prefix.events import Replica, State
from pullfill.prefix.index import PrefixIndex
from pullfill.wire import u32
from pullfill.wire.prefix import PrefixEvents, PrefixPage
from tests.support.waiting import soon

SIZE = 4
ONE = Places({0: 1}, SIZE)
ON_GPU, IN_CPU = 1, 2


def hashes(tokens: Sequence[int], salt: str | None = None, lora: str | None = None) -> list[int]:
    """What a frontend computes for a prompt."""
    root = chain.root(salt, lora, SIZE)
    return chain.extend(root, u32.pack(list(tokens)), SIZE)


def handles(tokens: Sequence[int], origin: str = "") -> list[bytes]:
    """What stands for vLLM's hashes."""
    blocks = range(SIZE, len(tokens) + 1, SIZE)
    return [hashlib.sha256(f"{origin}{list(tokens[:end])}".encode()).digest() for end in blocks]


def stored(tokens: Sequence[int], after: int = 0, place: int = ON_GPU, salt: str = "") -> Stored:
    """The blocks of a prompt from block `after` on."""
    names = handles(tokens, salt)
    keys = [(salt,) if salt and not i else None for i in range(len(names))]
    parent = names[after - 1] if after else None
    rest = list(tokens[after * SIZE : len(names) * SIZE])
    return Stored(place, names[after:], parent, rest, "", keys[after:])


A = list(range(100, 116))


@pytest.fixture
def held() -> Held:
    return Held(ONE)


def test_blocks_have_the_hashes_that_a_frontend_computes(held: Held) -> None:
    assert list(held.store(stored(A[:8]))) == hashes(A)[:2]
    assert list(held.store(stored(A, after=2))) == hashes(A)[2:]
    salted = held.store(stored(A, salt="pepper"))
    assert list(salted) == hashes(A, salt="pepper")
    assert len(held) == 8


def test_blocks_from_an_image_on_are_left_out(held: Held) -> None:
    image = stored(A)
    image = Stored(ON_GPU, image.handles, None, image.tokens, "", [None, (("id", 3),), None, None])
    assert list(held.store(image)) == hashes(A)[:1]
    more = A + [1] * SIZE
    assert list(held.store(stored(more, after=4))) == [], "its parent comes after an image"
    assert list(held.remove(Removed(ON_GPU, handles(A)))) == hashes(A)[:1]
    assert len(held) == 0


def test_a_block_in_cpu_memory_counts_until_it_is_gone_there_too(held: Held) -> None:
    names = handles(A)
    offloaded = Stored(IN_CPU, names, None, [], "", None)
    assert list(held.store(offloaded)) == [], "its tokens were never told"
    held.store(stored(A))
    assert list(held.store(offloaded)) == []
    assert list(held.remove(Removed(ON_GPU, names))) == []
    assert list(held.store(stored(A))) == []
    assert list(held.remove(Removed(IN_CPU, names))) == []
    assert list(held.remove(Removed(ON_GPU, names))) == hashes(A)
    assert len(held) == 0


def test_a_block_counts_while_every_group_holds_it() -> None:
    held = Held(Places({0: 1, 1: 2}, SIZE))
    assert list(held.store(stored(A, place=1))) == []
    assert list(held.store(stored(A, place=2))) == hashes(A)
    assert list(held.remove(Removed(1, handles(A)[:1]))) == hashes(A)[:1]
    assert list(held.remove(Removed(2, handles(A)[:1]))) == []
    assert list(held.remove(Removed(2, handles(A)[1:2]))) == hashes(A)[1:2]


class FakeView:
    """An engine that tells what the test says, through `take`."""

    def tell_blocks(self, events: KvEvents, take: Callable[[list[Change]], None]) -> None:
        events.places = ONE
        self.take = take


class Follower:
    """A frontend that follows, over a wire that delivers in order."""

    def __init__(self, rig: Rig, name: bytes) -> None:
        self.index = PrefixIndex(10_000)
        self.replica = Replica(self.index, 1, 0.0)
        self.rig, self.name = rig, name
        self.messages: list[PrefixEvents | PrefixPage] = []

    def ask(self) -> None:
        self.replica.ask(0.0)
        self.rig.blocks.follow(self.name, self.rig.send)

    def take(self, payload: bytes) -> None:
        message = msgspec.msgpack.decode(payload, type=PrefixEvents | PrefixPage)
        self.messages.append(message)
        if self.replica.take(message, 0.0) is not None:
            self.rig.blocks.follow(self.name, self.rig.send)

    def holds(self, hashes: Collection[int]) -> bool:
        """Whether it knows exactly these blocks."""
        digest = functools.reduce(operator.xor, hashes, 0) & (2**63 - 1)
        return (self.index.blocks(1), self.index.digest(1)) == (len(hashes), digest)


class Rig:
    """Block events, and those who follow them."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.followers: dict[bytes, Follower] = {}
        view: Any = FakeView()
        self.blocks = BlockEvents(asyncio.get_running_loop(), view, KvEvents(), flush_s=0.01)
        self.take = view.take

    def send(self, payload: bytes, to: bytes | None) -> None:
        def deliver() -> None:
            self.sent.append(payload)
            for follower in [f for n, f in self.followers.items() if to in (None, n)]:
                follower.take(payload)

        asyncio.get_running_loop().call_soon(deliver)

    def follower(self, name: bytes = b"f") -> Follower:
        self.followers[name] = Follower(self, name)
        self.followers[name].ask()
        return self.followers[name]


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_nothing_is_sent_while_nothing_changes_or_nobody_follows(rig: Rig) -> None:
    rig.take([stored(A)])
    await soon(lambda: rig.blocks.status()["events"] == 4)
    await asyncio.sleep(0.05)
    assert rig.sent == []
    follower = rig.follower()
    await soon(lambda: follower.replica.state is State.WARM)
    sent = len(rig.sent)
    await asyncio.sleep(0.05)
    assert len(rig.sent) == sent


async def test_an_asyncio_thread_that_hangs_costs_a_bounded_queue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_events, "_MOST_STEPS", 5)
    follower = rig.follower()
    await soon(lambda: follower.replica.state is State.WARM)
    for number in range(20):
        rig.take([stored([number] * SIZE)])
        assert len(rig.blocks._queue) <= 6
    await soon(lambda: rig.blocks.status()["blocks"] > 0)
    await soon(lambda: follower.index.blocks(1) == rig.blocks.status()["blocks"])
    assert follower.index.match(hashes([19] * SIZE)) == {1: 1}
    assert "hangs" in caplog.text


@pytest.mark.parametrize("seed", range(2))
async def test_followers_end_with_what_the_cache_holds(rig: Rig, seed: int) -> None:
    """Random prompts with common beginnings, stored, evicted from the end and cleared."""
    rng = random.Random(seed)
    cached: dict[bytes, int] = {}
    first = rig.follower(b"first")
    for number in range(300):
        prompt = [rng.choice((1, 2)) for _ in range(SIZE * rng.randint(1, 6))]
        names = handles(prompt)
        start = next((i for i, name in enumerate(names) if name not in cached), len(names))
        changes: list[Change] = []
        if start < len(names):
            changes.append(stored(prompt, after=start))
        cached |= dict(zip(names, hashes(prompt), strict=True))
        for name in rng.sample(list(cached), rng.randint(0, min(3, len(cached)))):
            del cached[name]
            changes.append(Removed(ON_GPU, [name]))
        if rng.random() < 0.01:
            cached.clear()
            changes.append(Cleared())
        rig.take(changes)
        if number == 150:
            rig.follower(b"second")
        if rng.random() < 0.1:
            await asyncio.sleep(0.002)
    second = rig.followers[b"second"]
    await soon(lambda: not rig.blocks._armed)
    assert set(rig.blocks._held._known) <= set(cached)
    known = [one for one, _ in rig.blocks._held._known.values()]
    await soon(lambda: first.holds(known) and second.holds(known))
    assert first.replica.healing["differences"] == second.replica.healing["differences"] == 0
