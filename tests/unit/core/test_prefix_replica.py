"""Following the block events of decode workers. Whatever is lost, repeated, reordered or restarted,
in the end the index equals the workers."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pullfill.prefix.events import Original, Replica, State
from pullfill.prefix.index import PrefixIndex
from pullfill.wire.codec import decode, encode
from pullfill.wire.prefix import MAX_EVENTS, Op, PrefixEvents, PrefixFollow, PrefixPage
from tests.support.fuzz import MANY


class Pair:
    """A decode worker's blocks and their replica, and the messages in between."""

    def __init__(self) -> None:
        self.original = Original()
        self.index = PrefixIndex(1000)
        self.now = 0.0
        self.replica = Replica(self.index, 5, self.now)

    def store(self, *hashes: int) -> list[PrefixEvents]:
        self.original.append(Op.STORE, hashes)
        return self.original.news()

    def heal(self, follow: PrefixFollow | None) -> None:
        assert follow is not None
        for page in self.original.snapshot():
            assert self.replica.take(page, self.now) is None

    def equal(self) -> bool:
        """Whether the next event finds no difference."""
        (event,) = self.store(100)
        told = self.replica.take(event, self.now)
        return told is None and len(self.index.held(5).blocks) == event.held


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.essential
def test_a_gap_brings_a_snapshot(pair: Pair) -> None:
    pair.heal(pair.replica.ask(0))
    assert pair.replica.state is State.WARM
    pair.now = 10.0
    pair.store(1, 2, 3)  # lost
    (late,) = pair.store(4)
    pair.now = 11.0
    wanted = pair.replica.take(late, pair.now)
    assert pair.replica.state is State.BEHIND
    assert pair.replica.since == 11.0
    assert pair.replica.take(late, pair.now) is None, "asked twice"
    pair.heal(wanted)
    assert pair.replica.state is State.WARM
    assert pair.equal()
    assert (pair.replica.healing["gaps"], pair.replica.healing["snapshots"]) == (1, 2)


def test_an_index_that_differs_is_found_and_replaced(pair: Pair) -> None:
    pair.store(1, 2, 3)
    pair.heal(pair.replica.ask(0))
    pair.index.apply(5, b"\0", [2])
    (event,) = pair.store(4)
    pair.now = 5.0
    wanted = pair.replica.take(event, pair.now)
    assert pair.replica.state is State.BEHIND
    pair.heal(wanted)
    assert pair.equal()
    assert pair.replica.healing["differences"] == 1


def test_blocks_that_the_index_refused_are_not_asked_for_again(pair: Pair) -> None:
    pair.index = PrefixIndex(2)
    pair.replica = Replica(pair.index, 5, 0)
    pair.store(1, 2, 3)
    pair.heal(pair.replica.ask(0))
    (event,) = pair.store(4)
    assert pair.replica.take(event, pair.now) is None
    assert pair.replica.state is State.WARM
    assert pair.index.held(5).refused == 2
    assert pair.replica.healing["differences"] == 0


# ------------------------------------------------------------------ the decode worker's side


def test_a_message_has_at_most_so_many_events() -> None:
    original = Original()
    original.append(Op.STORE, range(1, 2 * MAX_EVENTS + 2))
    found = original.news()
    assert [one.first for one in found] == [0, MAX_EVENTS, 2 * MAX_EVENTS]
    assert [len(one.ops) for one in found] == [MAX_EVENTS, MAX_EVENTS, 1]
    assert [one.held for one in found] == [None, None, 2 * MAX_EVENTS + 1]
    for one in found:
        assert decode(encode(one), PrefixEvents) == one
    assert original.news() == []
    pages = original.snapshot()
    assert [len(one.hashes) // 8 for one in pages] == [MAX_EVENTS, MAX_EVENTS, 1]
    assert [one.last for one in pages] == [False, False, True]


# ------------------------------------------------------------------ whatever the network does


WORKERS = 3
WHICH = st.integers(0, WORKERS - 1)
HASHES = range(1, 6001)  # enough blocks for several pages
BLOCKS = st.lists(st.integers(0, 59), max_size=10).map(
    lambda rows: [one for row in rows for one in HASHES[row::60]]
)
ToFrontend = PrefixEvents | PrefixPage


def worker() -> Original:
    """A decode worker that nobody has followed yet."""
    made = Original()
    made.append(Op.STORE, HASHES[::2])
    made.news()
    return made


class Faults(RuleBasedStateMachine):
    """Some workers, one frontend, and a network that does what it likes with their messages."""

    def __init__(self) -> None:
        super().__init__()
        # Epochs are random. An example must run the same again.
        self.same = mock.patch("secrets.randbits", random.Random(1).getrandbits)
        self.same.start()
        self.now = 0.0
        self.workers = [worker() for _ in range(WORKERS)]
        self.up: list[tuple[int, bytes]] = []
        self.down: list[tuple[int, PrefixFollow]] = []
        self.restart_frontend()

    @rule()
    def restart_frontend(self) -> None:
        self.index = PrefixIndex(WORKERS * 2 * len(HASHES))
        self.replicas = [Replica(self.index, slot, self.now) for slot in range(WORKERS)]
        for number, replica in enumerate(self.replicas):
            self.down.append((number, replica.ask(self.now)))

    @rule(which=WHICH)
    def restart_worker(self, which: int) -> None:
        self.workers[which] = worker()

    @rule(which=WHICH, blocks=BLOCKS)
    def store(self, which: int, blocks: list[int]) -> None:
        self.workers[which].append(Op.STORE, blocks)

    @rule(which=WHICH, blocks=BLOCKS)
    def remove(self, which: int, blocks: list[int]) -> None:
        self.workers[which].append(Op.REMOVE, blocks)

    @rule(which=WHICH)
    def clear(self, which: int) -> None:
        self.workers[which].append(Op.CLEAR)

    @rule(which=WHICH)
    def publish(self, which: int) -> None:
        self.up += [(which, encode(message)) for message in self.workers[which].news()]

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        self.answer(self.down.pop(data.draw(st.integers(0, len(self.down) - 1)))[0])

    def answer(self, which: int) -> None:
        self.publish(which)
        self.up += [(which, encode(page)) for page in self.workers[which].snapshot()]

    @precondition(lambda self: self.up)
    @rule(data=st.data(), fate=st.sampled_from(["bring", "bring", "bring", "lose", "repeat"]))
    def network(self, data: st.DataObject, fate: str) -> None:
        place = data.draw(st.integers(0, len(self.up) - 1))
        which, message = self.up[place]
        if fate != "repeat":
            del self.up[place]
        if fate != "lose":
            self.bring(which, message)

    @precondition(lambda self: self.up)
    @rule(count=st.integers(1, 30), lost=st.integers(0, 40))
    def flow(self, count: int, lost: int) -> None:
        """The oldest messages in their order, but for perhaps one."""
        brought, self.up = self.up[:count], self.up[count:]
        for place, message in enumerate(brought):
            if place != lost:
                self.bring(*message)

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def lose_ask(self, data: st.DataObject) -> None:
        del self.down[data.draw(st.integers(0, len(self.down) - 1))]

    def bring(self, which: int, message: bytes) -> None:
        follow = self.replicas[which].take(decode(message, ToFrontend), self.now)
        if follow:
            self.down.append((which, follow))

    def heal(self) -> None:
        """The network works again, blocks change, and the frontend asks until it knows all."""
        for turn in range(6):
            for which, replica in enumerate(self.replicas):
                self.workers[which].append(Op.STORE, [len(HASHES) + 1 + turn])
                self.publish(which)
                if replica.state is not State.WARM:
                    self.down.append((which, replica.ask(self.now)))
            while self.up or self.down:
                for which, _ in self.down:
                    self.answer(which)
                brought, self.up, self.down = self.up, [], []
                for message in brought:
                    self.bring(*message)
        for number, worker in enumerate(self.workers):
            worker.append(Op.STORE, [10_000])
            (event,) = worker.news()
            self.bring(number, encode(event))
            found = self.index.held(number)
            assert (len(found.blocks), found.digest) == (event.held, event.digest)
            assert self.replicas[number].state is State.WARM

    def teardown(self) -> None:
        try:
            self.heal()
        finally:
            self.same.stop()


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=MANY or 30, stateful_step_count=50, deadline=None)
