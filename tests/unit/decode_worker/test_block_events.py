"""From the changes of vLLM's prefix cache to numbered events that a frontend can follow."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from pullfill.decode_worker.prefix.block_events import Held
from pullfill.engine.kv_events import Places, Removed, Stored
from pullfill.prefix import chain
from pullfill.wire import u32

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
