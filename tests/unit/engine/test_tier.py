"""KV blocks are kept and brought back byte for byte, in the groups that vLLM names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.late import Late

np: Any = Late("numpy")
torch: Any = Late("torch")
BLOCKS, PAGE, ROWS = 20, 24, 9


def cache() -> list[Any]:
    """Two tensors. The second one's blocks are apart, as where layers share a block."""
    return [
        torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8),
        torch.randint(-128, 127, (BLOCKS, 3 * PAGE), dtype=torch.int8)[:, PAGE : 2 * PAGE],
    ]


def described(tensors: list[Any]) -> Any:
    """Two groups. The second has layers in the second tensor only."""
    pages = [SimpleNamespace(tensor=t, page_size_bytes=PAGE) for t in tensors]
    refs = [SimpleNamespace(tensor_idx=i, page_size_bytes=PAGE) for i in range(2)]
    return SimpleNamespace(tensors=pages, group_data_refs=[refs, refs[1:]])


def spec(ids: list[int], sizes: list[int]) -> Any:
    return SimpleNamespace(block_ids=np.array(ids), group_sizes=sizes)


def test_store_and_load() -> None:
    from pullfill.engine.tier import HostCopies

    before, after = cache(), cache()
    kept = [torch.zeros((ROWS, PAGE), dtype=torch.int8) for _ in range(2)]
    rows = spec([6, 0, 3, 8, 2], [])
    out = HostCopies(described(before), kept)
    assert out.submit_store(1, spec([3, 19, 4, 7, 11], [4, 1]), rows)
    back = HostCopies(described(after), kept)
    untouched = [tensor.clone() for tensor in after]
    assert back.submit_load(2, rows, spec([1, 2, 5, 6, 8], [4, 1]))
    for index in range(2):
        assert torch.equal(after[index][[1, 2, 5, 6]], before[index][[3, 19, 4, 7]])
        rest = [block for block in range(BLOCKS) if block not in (1, 2, 5, 6, 8)]
        assert torch.equal(after[index][rest], untouched[index][rest])
    assert torch.equal(after[1][8], before[1][11])
    assert torch.equal(after[0][8], untouched[0][8]), "no layer of its group is there"
    (told,) = back.get_finished()
    assert (told.job_id, told.success, told.transfer_size) == (2, True, 9 * PAGE)
    assert back.get_finished() == []
