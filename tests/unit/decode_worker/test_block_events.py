"""From the changes of vLLM's prefix cache to hashes of blocks that a frontend can follow.

Blocks of vLLM's real cache, with windows and salts: tests/integration/test_kv_events.py."""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.decode_worker.prefix.block_events import Held
from pullfill.engine.kv_events import Places, Removed, Stored
from pullfill.prefix import chain
from pullfill.wire import u32

SIZE = 4
ONE = Places({0: 1}, SIZE)
ON_GPU, IN_CPU = 1, 2


def hashes(tokens: Sequence[int]) -> list[int]:
    """What a frontend computes for a prompt."""
    return chain.extend(chain.root(None, None, SIZE), u32.pack(list(tokens)), SIZE)


def handles(tokens: Sequence[int]) -> list[bytes]:
    """What stands for vLLM's hashes."""
    return [str(list(tokens[:end])).encode() for end in range(SIZE, len(tokens) + 1, SIZE)]


def stored(tokens: Sequence[int], after: int = 0) -> Stored:
    """The blocks of a prompt from block `after` on."""
    names = handles(tokens)
    parent = names[after - 1] if after else None
    rest = list(tokens[after * SIZE :])
    return Stored(ON_GPU, names[after:], parent, rest, "", None)


A = list(range(100, 116))


def test_blocks_from_an_image_on_are_left_out() -> None:
    held = Held(ONE)
    image = stored(A)
    image = Stored(ON_GPU, image.handles, None, image.tokens, "", [None, (("id", 3),), None, None])
    assert list(held.store(image)) == hashes(A)[:1]
    more = A + [1] * SIZE
    assert list(held.store(stored(more, after=4))) == [], "its parent comes after an image"
    assert list(held.remove(Removed(ON_GPU, handles(A)))) == hashes(A)[:1]
    assert len(held) == 0


def test_a_block_in_cpu_memory_counts_until_it_is_gone_there_too() -> None:
    held = Held(ONE)
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
