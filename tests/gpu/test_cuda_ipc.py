"""cuda_ipc with real GPU memory and real processes; everything else of it is tested on GPUs of
plain memory (tests/contract/test_cuda_ipc.py)."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pullfill.errors import PeerUnavailable, TransferFailed
from pullfill.runtime import failpoints
from pullfill.transfer.contract import PeerSession
from pullfill.transfer.cuda_ipc.ipc_transport import CudaIpcTransport
from pullfill.transfer.cuda_ipc.writers import why_no_proof
from pullfill.transfer.gpu.cuda import load
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.shm.kv_pool import tell
from tests.support.gpu_programs import GpuMemory, GpuProgram, digest

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, HEADS, PAGE = SHAPE = 3, 40, 2, 4096
LAYOUT = dense_layout(*SHAPE)
GIB = 4, 4096, 1, 64 << 10
"""Layers, blocks, heads and page bytes of 1 GiB."""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[GpuProgram]:
    """A process with a KV cache on the first GPU."""
    with GpuProgram("owner", tmp_path, *SHAPE) as program:
        yield program


@pytest.fixture
def mine() -> GpuMemory:
    made = GpuMemory(LAYOUT)
    made.randomize(1)
    return made


@pytest.fixture
def session(owner: GpuProgram, mine: GpuMemory) -> Iterator[PeerSession]:
    transport, descriptor = CudaIpcTransport([0]), owner.descriptor()
    assert transport.can_reach(descriptor) is None
    made = transport.connect(mine.memory, descriptor)
    yield made
    made.close()


def theirs(owner: GpuProgram, blocks: Sequence[int]) -> bytes:
    return bytes.fromhex(owner.ask("digest", ",".join(map(str, blocks))))


def test_writes_and_reads_move_the_named_blocks_and_no_other(
    owner: GpuProgram, mine: GpuMemory, session: PeerSession
) -> None:
    assert owner.ask("fill", 7) == "filled"
    token = owner.open()
    order = random.Random(1).sample(range(BLOCKS), BLOCKS)
    source, target, rest = order[:17], order[17:34], order[:17] + order[34:]
    untouched = theirs(owner, rest)
    result = session.move("write", token, source, target)
    assert result == 17 * LAYOUT.block_bytes
    assert theirs(owner, target) == digest(mine, source)
    assert theirs(owner, rest) == untouched
    # One run of neighbours in each layer.
    session.move("write", token, range(BLOCKS), range(BLOCKS))
    assert theirs(owner, range(BLOCKS)) == digest(mine, range(BLOCKS))
    kept = digest(mine, [0, 1])
    session.move("read", token, [3, 30, 4], [10, 11, 20])
    assert digest(mine, [10, 11, 20]) == theirs(owner, [3, 30, 4])
    assert digest(mine, [0, 1]) == kept
    assert owner.revoke(token)


def test_the_end_of_a_process_ends_its_copies_here() -> None:
    """No MPS, and a driver whose settings can be read: without both, nothing below is promised."""
    assert why_no_proof(load(), 0) is None


@pytest.mark.parametrize("when", ["at any moment", "with a batch queued"])
def test_a_killed_writer_leaves_not_one_byte_after_the_proof(when: str, tmp_path: Path) -> None:
    """The writer copies 1 GiB in one batch, about half a millisecond of the GPU, over and over. It
    is killed, and the owner's memory stands still from the proof on."""
    path, env = tmp_path / "descriptor", dict(os.environ)
    if when == "with a batch queued":
        env[failpoints.ENV] = "gpu.queued=kill@3"
    with GpuProgram("owner", tmp_path, *GIB) as owner:
        path.write_text(owner.greeting)
        for round_ in range(10):
            token = owner.open()
            with GpuProgram("writer", path, 7, env=env) as writer:
                assert writer.greeting == "ready"
                writer.tell("loop", token)
                if when == "at any moment":
                    time.sleep(random.Random(round_).random() * 0.05)
                    writer.process.kill()
                deadline = time.monotonic() + 20
                # Not before: a token that is revoked while the writer lives is just refused.
                while not (is_dying(writer) and owner.revoke(token)):
                    assert time.monotonic() < deadline, "a dead writer was never proved dead"
                assert owner.ask("fill", 9) == "filled"
                for _ in range(20):
                    assert owner.ask("others", 9) == "0"
    path.unlink()


def is_dying(writer: GpuProgram) -> bool:
    """From the moment when the kernel begins to take the process apart (PF_EXITING)."""
    stat = Path(f"/proc/{writer.process.pid}/stat").read_text()
    state, *rest = stat.rpartition(")")[2].split()
    return state in "ZX" or bool(int(rest[5]) & 4)


def test_expandable_segments_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        env = {**os.environ, name: "expandable_segments:True"}
        with GpuProgram("owner", tmp_path, *SHAPE, env=env) as program:
            assert program.greeting.startswith("refused")
            assert "expandable_segments" in program.greeting


def test_memory_of_sleep_mode_is_refused() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    from pullfill.transfer.owners import tell_gpu

    with CuMemAllocator.get_instance().use_memory_pool(tag="kv_cache"):
        pages = GpuMemory(LAYOUT)
    told = tell_gpu(pages.memory)
    assert told.exported is None
    assert "--enable-sleep-mode" in told.why_not


def test_an_owner_that_dies_takes_nobody_with_it(
    owner: GpuProgram, mine: GpuMemory, session: PeerSession
) -> None:
    """Its memory is mapped here, and copies are under way when it dies. Our own work must go on."""
    token = owner.open()
    session.move("write", token, range(BLOCKS), range(BLOCKS))
    before = digest(mine, range(BLOCKS))
    killing = threading.Timer(0.2, owner.process.kill)
    killing.start()
    while owner.process.poll() is None:
        with suppress(TransferFailed):  # the owner ended in the middle
            session.move("write", token, range(BLOCKS), range(BLOCKS))
    killing.join()
    with pytest.raises(TransferFailed, match="owned the GPU memory has ended"):
        session.move("write", token, range(BLOCKS), range(BLOCKS))
    # The fence file is still there (nobody swept it), but the memory's handle opens no more.
    with pytest.raises(PeerUnavailable):
        CudaIpcTransport([0]).connect(mine.memory, owner.descriptor())
    assert digest(mine, range(BLOCKS)) == before
    assert int((mine.buffer + 1 - mine.buffer).sum(dtype=torch.int64)) == mine.buffer.numel()


def test_gpu_memory_once_told_is_not_given_to_others() -> None:
    """It outlives vLLM's tensors, as the CPU's does (unit/engine/test_life.py)."""
    raw = torch.full((LAYERS * BLOCKS * HEADS * PAGE,), 7, dtype=torch.int8, device="cuda")
    whole = raw.view(LAYERS, BLOCKS, HEADS, PAGE // 4, 4)
    told = tell(None, {f"layers.{i}": whole[i] for i in range(LAYERS)}, BLOCKS).memory
    del raw, whole
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.empty(told.nbytes, dtype=torch.int8, device="cuda") for _ in range(4)]
    for other in others:
        start = other.data_ptr()
        assert start + told.nbytes <= told.address or told.address + told.nbytes <= start
