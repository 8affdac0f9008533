"""KV memory of ranks: vLLM's allocation in a file, its layout, and the main process's view."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pullfill.errors import IncompatibleError, PeerUnavailable
from pullfill.transfer import owners
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.shm.files import RegionFiles, create_kv
from tests.support.late import Late
from tests.support.transfer_rigs import pages

torch: Any = Late("torch")
shm_pool: Any = Late("pullfill.transfer.shm.kv_pool")

BLOCKS, HEADS, ROWS, WIDTH, LAYERS = 6, 2, 4, 8, 3
REPO = Path(__file__).resolve().parents[3]

# --------------------------------------------------------------------------- the pool


def views(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """float32 [B, H, N, C] views of one flat int8 buffer, as vLLM makes them for LBHNC."""
    page = ROWS * WIDTH
    size = (LAYERS, BLOCKS, HEADS, ROWS, WIDTH)
    stride = (BLOCKS * HEADS * page, HEADS * page, page, WIDTH, 1)
    whole = torch.as_strided(buffer.view(torch.float32), size, stride)
    return {f"layers.{i}": whole[i] for i in range(LAYERS)}


NBYTES = LAYERS * BLOCKS * HEADS * ROWS * WIDTH * 4


def test_pool_backs_the_big_allocation_with_the_file(tmp_path: Path) -> None:
    pool = shm_pool.SharedKvPool("decode-a", 1, tmp_path)
    with pool:
        other = torch.zeros(8, dtype=torch.int64, device="cpu")
        small = torch.zeros((2, 2), dtype=torch.int8)
        assert list(tmp_path.iterdir()) == []
        buffer = torch.zeros(NBYTES, dtype=torch.int8, device=torch.device("cpu"))
        assert [path.name for path in tmp_path.iterdir()] == ["pullfill-decode-a-1.kv"]
        second = torch.zeros(NBYTES, dtype=torch.int8, device="cpu")
    assert (other.sum(), small.sum(), int(buffer.sum())) == (0, 0, 0)
    assert buffer.shape == (NBYTES,)
    assert second.data_ptr() != buffer.data_ptr()
    caches = views(buffer)
    caches["layers.0-again"] = caches["layers.0"]  # a layer that reuses another's cache
    told = shm_pool.tell(pool, caches, BLOCKS)
    assert told.memory is not None
    assert told.memory.layout == dense_layout(LAYERS, BLOCKS, HEADS, ROWS * WIDTH * 4)
    assert (told.memory.address, told.memory.nbytes) == (buffer.data_ptr(), NBYTES)
    assert (told.device, told.num_layers, told.page_bytes) == ("cpu", LAYERS, ROWS * WIDTH * 4)
    caches["layers.1"][3, 1] = 7.5
    assert os.listdir(tmp_path) == ["pullfill-decode-a-1.kv"]
    in_file = np.fromfile(tmp_path / "pullfill-decode-a-1.kv", np.float32)
    found = pages(in_file.view(np.uint8), told.memory.layout)
    assert set(found[1, 3, 1].view(np.float32)) == {7.5}
    assert int((in_file != 0).sum()) == ROWS * WIDTH
    os.unlink(told.path)
    caches["layers.1"][3, 1] += 1  # the engine's mapping lives on
    assert float(caches["layers.1"][3, 1, 0, 0]) == 8.5


def test_memory_that_vllm_allocated_elsewhere_is_refused(tmp_path: Path) -> None:
    pool = shm_pool.SharedKvPool("decode-a", 0, tmp_path)
    with pytest.raises(IncompatibleError, match="memory pool"):
        shm_pool.tell(pool, views(torch.zeros(NBYTES, dtype=torch.int8)), BLOCKS)


def test_memory_of_another_device_is_told_by_its_shape(tmp_path: Path) -> None:
    caches = {name: tensor.to("meta") for name, tensor in views(torch.zeros(NBYTES).char()).items()}
    for pool in (None, shm_pool.SharedKvPool("decode-a", 0, tmp_path)):
        told = shm_pool.tell(pool, caches, BLOCKS)
        assert (told.memory, told.device) == (None, "meta")
        assert (told.num_layers, told.page_bytes) == (LAYERS, ROWS * WIDTH * 4)
        assert owners.attach_ranks({(0, 0): told}, HEADS) == []
    with pytest.raises(IncompatibleError):
        shm_pool.tell(None, {}, BLOCKS)


# --------------------------------------------------------------------------- ranks


def view_of(memory: LocalMemory) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_ubyte * memory.nbytes).from_address(memory.address))


def region(
    directory: Path, rank: int, heads: int = 1, layers: int = 2, **changes: object
) -> owners.RankRegion:
    """As the process of a rank tells it: its address means nothing here."""
    layout = dense_layout(layers, int(changes.get("blocks", BLOCKS)), heads, 64)  # type: ignore[call-overload]
    nbytes = layout.num_layers * layout.layer_stride
    path = create_kv(directory, "decode-a", rank, nbytes)
    path.write_bytes(bytes([rank + 1]) * nbytes)
    told = owners.region_of(LocalMemory(0xDEAD0000, nbytes, layout), str(path))
    return replace(told, pid=1)


def test_ranks_of_tensor_and_pipeline_parallel_engines_find_their_place(tmp_path: Path) -> None:
    files = RegionFiles("decode-a", tmp_path)
    layers = {0: 2, 1: 3}
    told = {
        (pp, tp): region(tmp_path, pp * 2 + tp, layers=layers[pp]) for tp in (1, 0) for pp in (1, 0)
    }
    mapped = owners.attach_ranks(told, kv_heads=2)
    places = [(r.memory.first_head, r.memory.first_layer) for r in mapped]
    assert places == [(0, 0), (1, 0), (0, 2), (1, 2)]
    for number, rank in enumerate(mapped):
        assert set(view_of(rank.memory)) == {number + 1}
        view_of(rank.memory)[:] = 99
        assert set(Path(rank.path).read_bytes()) == {99}, "shared, not a copy"
        rank.close()
        rank.close()
    files.close()
    assert os.listdir(tmp_path) == []


def test_ranks_that_do_not_fit_are_refused_and_nothing_stays_mapped(tmp_path: Path) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    told = {(0, 0): region(tmp_path, 0), (0, 1): region(tmp_path, 1, heads=2)}
    with pytest.raises(IncompatibleError, match="2 KV heads where 1"):
        owners.attach_ranks(told, kv_heads=2)
    told[0, 1] = region(tmp_path, 2, blocks=BLOCKS + 1)
    with pytest.raises(IncompatibleError, match="KV blocks"):
        owners.attach_ranks(told, kv_heads=2)
    with pytest.raises(FileNotFoundError):
        owners.attach_ranks({(0, 0): replace(region(tmp_path, 3), inode=(1, 1))}, kv_heads=1)
    short = region(tmp_path, 4)
    os.truncate(short.path, 10)
    with pytest.raises(PeerUnavailable, match="shorter"):
        owners.attach_ranks({(0, 0): short}, kv_heads=1)
    assert maps() == 0


def test_a_process_that_fails_at_its_start_leaves_no_files(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from pullfill.runtime.lifecycle import at_leave, leave\n"
        "from pullfill.transfer.shm.files import RegionFiles, create_kv\n"
        "at_leave(lambda: 1 / 0)\n"
        "files = RegionFiles('decode-a', Path(sys.argv[1]))\n"
        "create_kv(files.directory, 'decode-a', 1, 4096)\n"
        "RegionFiles('decode-b', Path(sys.argv[1])).close()\n"
        "leave(2)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPO, check=False)
    assert done.returncode == 2
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------- layouts


def test_describe_reads_strides_and_offset() -> None:
    page = ROWS * WIDTH
    buffer = torch.zeros(4096, dtype=torch.float32)
    padded = torch.as_strided(
        buffer, (2, BLOCKS, HEADS, ROWS, WIDTH), (1000, 100, 40, WIDTH, 1), 10
    )
    memory = shm_pool.describe({"a": padded[0], "b": padded[1]}, BLOCKS)
    assert memory.layout == KvLayout(
        base_offset=40,
        num_layers=2,
        num_blocks=BLOCKS,
        num_kv_heads=HEADS,
        page_bytes=page * 4,
        layer_stride=4000,
        block_stride=400,
        head_stride=160,
    )
    assert (memory.address, memory.nbytes) == (buffer.data_ptr(), 4096 * 4)


def _broken(make: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, torch.Tensor]:
    caches = views(torch.zeros(NBYTES, dtype=torch.int8))
    make(caches)
    return caches


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda c: c.update(x=torch.zeros(4)), "layout"),
        (lambda c: c.update({"layers.0": c["layers.0"].transpose(2, 3)}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"].transpose(1, 2)}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"][:3]}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"].view(torch.int32)}), "layout"),
        (lambda c: c.update({"layers.1": c["layers.1"].clone()}), "layer_stride"),
        (lambda c: c.update({"layers.1": c["layers.0"][:]}), "layer_stride"),
        (lambda c: [c.popitem(), c.popitem(), c.update(z=c["layers.0"][:])], "layer_stride"),
        (lambda c: c.update({"layers.0": c["layers.0"].to("meta")}), "device"),
    ],
)
def test_describe_names_what_is_off(
    make: Callable[[dict[str, torch.Tensor]], object], field: str
) -> None:
    with pytest.raises(IncompatibleError) as caught:
        shm_pool.describe(_broken(make))
    assert caught.value.field == field


def test_describe_refuses_split_blocks() -> None:
    with pytest.raises(IncompatibleError, match="--block-size") as caught:
        shm_pool.describe(_broken(lambda c: None), BLOCKS // 2)
    assert caught.value.field == "block_size"
