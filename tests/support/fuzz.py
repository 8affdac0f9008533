"""What the fuzz tests share: how many examples, and how bytes go wrong on a wire.

Each property runs a little and always the same in every run; with FUZZ=N in the environment it
runs on N random examples instead (`make chaos` does).
"""

from __future__ import annotations

import functools
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MANY = int(os.environ.get("FUZZ", "0"))
EXAMPLES = pytest.mark.parametrize("examples", [MANY or 60], ids=["many" if MANY else "few"])


def explore(examples: int, prop: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
    """Run `prop` on `examples` draws of its arguments. No single one may hold much memory."""

    @functools.wraps(prop)
    def bounded(**drawn: Any) -> None:
        with little_memory():
            prop(**drawn)

    chosen = settings(
        max_examples=examples,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    chosen(given(**strategies)(bounded))()


def mutated(valid: list[bytes]) -> st.SearchStrategy[bytes]:
    """Good messages with something wrong: cut, lengthened, bytes changed, parts swapped; and noise,
    deep nesting, and lengths that lie."""
    good = st.sampled_from(valid)
    return st.one_of(
        st.binary(max_size=200),
        good,
        st.builds(lambda m, n: m[: n % (len(m) + 1)], good, st.integers(0, 10_000)),
        st.builds(lambda m, tail: m + tail, good, st.binary(min_size=1, max_size=20)),
        st.builds(
            _changed, good, st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=6)))
        ),
        st.builds(lambda a, b, n: a[:n] + b[n:], good, good, st.integers(0, 300)),
        st.integers(1, 100_000).map(lambda n: b"\x91" * n),  # arrays in arrays
        st.integers(1, 50_000).map(lambda n: b"\x81\xa0" * n),  # maps in maps
        st.sampled_from(_LIES),
        st.builds(lambda m, lie: m[:1] + lie + m[1:], good, st.sampled_from(_LIES)),
    )


# array32, map32, bin32, str32 and ext32 that announce 4 GiB and bring nothing
_LIES = [kind + b"\xff" * 4 for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")]


def _changed(message: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    body = bytearray(message)
    for where, new in changes:
        at = where % (len(body) + 1)
        body[at : at + len(new)] = new
    return bytes(body)


@contextmanager
def little_memory(limit: int = 32 << 20) -> Iterator[None]:
    """Fails when more than `limit` bytes were held at once inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
