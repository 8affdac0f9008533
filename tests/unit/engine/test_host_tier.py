"""KV blocks are kept and brought back byte for byte, in chunks and groups as vLLM names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.late import Late

torch: Any = Late("torch")
BLOCKS, PAGE, CHUNKS = 20, 24, 9


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_store_and_load(parts: int, first: int) -> None:
    from pullfill.engine.host_tier import HostCopies

    def cache() -> Any:
        # The second tensor's blocks are apart, as where layers share a block.
        return [
            torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8),
            torch.randint(-128, 127, (BLOCKS, 3 * PAGE), dtype=torch.int8)[:, PAGE : 2 * PAGE],
        ]

    def described(tensors: Any) -> Any:
        pages = [SimpleNamespace(tensor=t, page_size_bytes=PAGE) for t in tensors]
        refs = [SimpleNamespace(tensor_idx=i, page_size_bytes=PAGE) for i in range(2)]
        return SimpleNamespace(tensors=pages, group_data_refs=[refs, refs[1:]])

    def spec(ids: list[int], sizes: list[int], begins: list[int]) -> Any:
        import numpy

        return SimpleNamespace(block_ids=numpy.array(ids), group_sizes=sizes, block_indices=begins)

    kept = [torch.zeros((CHUNKS, parts * PAGE), dtype=torch.int8) for _ in range(2)]
    before, after = cache(), cache()
    chunks = (first % parts + 4 + parts - 1) // parts
    where = spec([*range(chunks), CHUNKS - 1], [], [])
    stored = spec([3, 19, 4, 7, 11], [4, 1], [first, 0])
    out = HostCopies(described(before), kept, parts)
    assert out.submit_store(1, stored, where)
    loaded = spec([1, 2, 5, 6, 8], [4, 1], [first, 0])
    back = HostCopies(described(after), kept, parts)
    untouched = [t.clone() for t in after]
    assert back.submit_load(2, where, loaded)
    for index in range(2):
        assert torch.equal(after[index][[1, 2, 5, 6]], before[index][[3, 19, 4, 7]])
        rest = [b for b in range(BLOCKS) if b not in (1, 2, 5, 6, 8)]
        assert torch.equal(after[index][rest], untouched[index][rest])
    assert torch.equal(after[1][8], before[1][11]), "the second group has the second tensor only"
    assert torch.equal(after[0][8], untouched[0][8])
    (told,) = back.get_finished()
    assert (told.job_id, told.success, told.transfer_size) == (2, True, 9 * PAGE)
    assert back.get_finished() == []
