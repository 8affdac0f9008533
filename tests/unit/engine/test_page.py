"""How pages can be cut: found by having them filled, and never guessed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pullfill.engine.page import Cut, Numbers, cut_of, find
from tests.support.late import Late

torch: Any = Late("torch")

HEAD = 6
WIDTH = 2 * HEAD
Backend = Callable[[Numbers], NDArray[np.int64]]


def by_token(numbers: Numbers) -> Numbers:
    """K and V of one token after another, as most backends store them."""
    return numbers.flatten()


def by_column(numbers: Numbers) -> Numbers:
    """K column by column, then V token by token, as vLLM does on a CPU."""
    return np.concatenate([numbers[:, :HEAD].T.flatten(), numbers[:, HEAD:].flatten()])


def in_fours(numbers: Numbers) -> Numbers:
    """Four tokens belong together, as for a matrix unit."""
    keys = numbers[:, :HEAD].reshape(-1, 4, HEAD).transpose(0, 2, 1)
    values = numbers[:, HEAD:].reshape(-1, 4, 2, HEAD // 2).transpose(2, 0, 1, 3)
    return np.concatenate([keys.flatten(), values.flatten()])


def swapped(numbers: Numbers) -> Numbers:
    """As `by_column`, with K and V exchanged."""
    return np.concatenate([numbers[:, HEAD:].T.flatten(), numbers[:, :HEAD].flatten()])


def rotated(numbers: Numbers) -> Numbers:
    """Where a token begins depends on the length of the page."""
    return np.roll(numbers, len(numbers) // 8, axis=0).flatten()


def half(numbers: Numbers) -> Numbers:
    """V is somewhere else."""
    return numbers[:, :HEAD].flatten()


def gaps(numbers: Numbers) -> Numbers:
    """Some places are never written."""
    return np.where(np.arange(numbers.size) % 5 == 0, 0, numbers.flatten())


def rounded(numbers: Numbers) -> Numbers:
    """The cache does not hold what was written."""
    return numbers.flatten() // 2


@pytest.mark.parametrize(
    ("backend", "tokens", "sections"),
    [
        (by_token, 1, ((1, 4 * WIDTH),)),
        (by_column, 1, ((HEAD, 4), (1, 4 * HEAD))),
        (in_fours, 4, ((1, 16 * HEAD), (2, 8 * HEAD))),
        (swapped, 1, ((HEAD, 4), (1, 4 * HEAD))),
    ],
)
@pytest.mark.parametrize("block_size", [8, 16, 96])
def test_pages_are_cut_where_tokens_are(
    backend: Backend, tokens: int, sections: tuple[tuple[int, int], ...], block_size: int
) -> None:
    found = find(backend, block_size, WIDTH, 4)
    assert found is not None
    assert (found.tokens, found.sections) == (tokens, sections)


def test_a_page_of_one_piece_is_understood_like_a_longer_one() -> None:
    assert find(in_fours, 4, WIDTH, 2) == find(in_fours, 64, WIDTH, 2)


def test_only_pieces_of_the_same_bytes_have_the_same_order() -> None:
    def order(backend: Backend, size: int = 16) -> str:
        found = find(backend, size, WIDTH, 4)
        assert isinstance(found, Cut)
        return found.order

    assert order(by_column) == order(by_column, 96)
    assert len({order(b) for b in (by_token, by_column, in_fours, swapped)}) == 4


@pytest.mark.parametrize("backend", [rotated, half, gaps, rounded])
def test_what_is_not_understood_is_not_cut(backend: Backend) -> None:
    assert find(backend, 16, WIDTH, 4) is None


# ------------------------------------------------------------------ vLLM's layers


class Attention:
    """Fills a page as vLLM's CPU attention does. It wants to be called like that, too."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        assert (layer.isa, layer._k_scale_float, layer._v_scale_float) == ("vec", 1.0, 1.0)
        page = torch.cat([key[:, 0].T.flatten(), value[:, 0].flatten()])
        kv_cache[0, 0] = page.view(kv_cache.shape[2:])


class Latent:
    """The same of MLA."""

    kv_lora_rank, kv_cache_dtype = HEAD, "auto"

    def do_kv_cache_update(
        self, latent: Any, rotated: Any, cache: Any, slots: Any, kind: str, scale: Any
    ) -> None:
        cache[0, slots] = torch.cat([latent, rotated[:, 0]], dim=1)


class Other(Attention):
    """Another backend."""


def told(specs: list[Any], *impls: Any, tokens: int = 32) -> Cut | None:
    """What `cut_of` says of layers with these specs. tokens: of a page; a block has 32."""
    layers = {str(at): SimpleNamespace(impl=impl, isa="vec") for at, impl in enumerate(impls)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(block_size=32),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    cache = torch.zeros((3, 2, tokens, WIDTH))
    return cut_of(config, SimpleNamespace(kv_cache_groups=groups), dict.fromkeys(layers, cache))


class FullAttentionSpec(SimpleNamespace):
    """Named like vLLM's."""


class MLAAttentionSpec(SimpleNamespace):
    """Named like vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named like vLLM's."""


class RSWASpec(SimpleNamespace):
    """Named like vLLM's. It keeps the first blocks of a prompt, and the last ones."""


def test_the_backend_of_the_layers_is_asked() -> None:
    assert told([FullAttentionSpec()], Attention(), Attention()) == find(by_column, 32, WIDTH, 4)
    assert told([MLAAttentionSpec()], Latent()) == find(by_token, 32, WIDTH, 4)


def test_layers_with_a_window_have_the_same_pages() -> None:
    full, window = FullAttentionSpec(), SlidingWindowSpec(sliding_window=96)
    for specs in ([window], [full, window], [FullAttentionSpec(sliding_window=96)]):
        assert told(specs, Attention()) == find(by_column, 32, WIDTH, 4)


@pytest.mark.parametrize(
    ("specs", "impls", "tokens", "why"),
    [
        ([RSWASpec(sliding_window=96)], [Attention()], 32, "which blocks of ['RSWASpec'] are kept"),
        ([FullAttentionSpec(), SimpleNamespace()], [Attention()], 32, "['SimpleNamespace']"),
        ([FullAttentionSpec()], [], 32, "0 kinds of attention layers"),
        ([FullAttentionSpec()], [Attention(), Other()], 32, "2 kinds of attention layers"),
        ([FullAttentionSpec()], [SimpleNamespace()], 32, "do_kv_cache_update"),
        ([FullAttentionSpec()], [Attention()], 16, "vLLM splits them into blocks of 16 tokens"),
    ],
)
def test_an_unknown_kind_or_backend_keeps_pages_whole(
    specs: list[Any],
    impls: list[Any],
    tokens: int,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pullfill.engine.page")
    assert told(specs, *impls, tokens=tokens) is None
    assert "need the same --block-size" in caplog.text
    assert why in caplog.text
