"""Processes with real GPU memory, for tests/gpu and bench_gpu. CUDA lets no process map its own
memory again, so an owner and its peers never share one.

    python -m tests.support.gpu_programs owner DIRECTORY LAYERS BLOCKS HEADS PAGE_BYTES [TRANSPORT]

prints its region's descriptor as a line of JSON, or `refused TEXT`, then answers a line each, over
`cuda_ipc`, or `nccl`:

    open                every block; SLOT EPOCH
    revoke SLOT EPOCH   True or False
    fill N              every byte of every block becomes N; `filled`
    others N            how many bytes are not N
    digest B,B,...      of these blocks, hexadecimal

    python -m tests.support.gpu_programs writer DESCRIPTOR_FILE FILL [DEVICE]

prints `ready`, then obeys a line each, from memory whose every byte is FILL: `write SLOT EPOCH`
(all blocks), `loop SLOT EPOCH` and `beat SLOT EPOCH` (the same until fenced; a beat five times a
second), and `read SLOT EPOCH` (block 0 into its last one). Answers `done`, or `done N` (the first
byte read), `fenced` or `failed TEXT`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch

from pullfill.transfer.contract import KvLayout, LocalMemory, PeerSession, PeerTransport
from pullfill.transfer.copying import read_pages
from pullfill.transfer.cuda_ipc.ipc_transport import CudaIpcTransport
from pullfill.transfer.layout import dense_layout, layout_of
from pullfill.transfer.nccl.gpu_turns import CudaGpu
from pullfill.transfer.nccl.library import NcclMove
from pullfill.transfer.nccl.nccl_backend import make_kind, nccl
from pullfill.transfer.owners import MappedRank, Owner, tell_gpu
from pullfill.transfer.shm.files import RegionFiles
from pullfill.transfer.shm.kv_pool import describe
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.wire import FenceToken, RegionDescriptor
from tests.support.transfer_writer import Program, obey


class GpuMemory:
    """A KV cache as vLLM allocates it: one int8 buffer, [B, H, N, C] views of it."""

    def __init__(self, layout: KvLayout, device: int = 0) -> None:
        """`layout`: dense, pages a multiple of 16 bytes."""
        count, heads, page = layout.num_blocks, layout.num_kv_heads, layout.page_bytes
        nbytes = layout.num_layers * layout.layer_stride
        self.buffer = torch.zeros(nbytes, dtype=torch.int8, device=f"cuda:{device}")
        whole = self.buffer.view(layout.num_layers, count, heads, 16, page // 16)
        self.caches = {f"layers.{i}": whole[i] for i in range(layout.num_layers)}
        self.memory: LocalMemory = describe(self.caches, count, "cuda")

    def randomize(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.buffer.random_(-128, 128)
        torch.cuda.synchronize(self.buffer.device)


class NcclToItself:
    """A communicator of one rank on a GPU. NCCL moves bytes to ourselves if both halves are in one
    group."""

    def __init__(self, device: int) -> None:
        gpu = CudaGpu(device)
        self.stream = gpu.stream()
        self._nccl = nccl()
        gpu.activate()
        comm, error = self._nccl.init(self._nccl.unique_id(), 0, ranks=1)
        if error is not None:
            raise error
        assert comm is not None
        self._comm = comm
        self._settle()

    def _settle(self) -> None:
        while self._nccl.busy(self._comm):
            time.sleep(20e-6)

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Returns when done."""
        messages = [NcclMove(True, source, nbytes), NcclMove(False, target, nbytes)]
        self._nccl.issue(self._comm, messages, 0, self.stream.handle)
        self._settle()
        while not self.stream.done:
            time.sleep(20e-6)

    def close(self, *others: NcclToItself) -> None:
        """All in one group."""
        every = (self, *others)
        self._nccl.abort([one._comm for one in every])
        for one in every:
            one.stream.close()


class GpuProgram(Program):
    """One of the programs, from outside."""

    def __init__(self, *arguments: object, env: dict[str, str] | None = None) -> None:
        super().__init__("tests.support.gpu_programs", *arguments, env=env)

    def descriptor(self) -> RegionDescriptor:
        """An owner's. Raises msgspec.DecodeError with what it said instead."""
        return msgspec.json.decode(self.greeting, type=RegionDescriptor)

    def open(self) -> FenceToken:
        slot, epoch = self.ask("open").split()
        return FenceToken(slot=int(slot), epoch=int(epoch))

    def revoke(self, token: FenceToken) -> bool:
        return self.ask("revoke", token) == "True"


def owner(
    directory: str, layers: str, blocks: str, heads: str, page: str, transport: str = "cuda_ipc"
) -> None:
    kv = GpuMemory(dense_layout(int(layers), int(blocks), int(heads), int(page)))
    exported, kinds = None, {}
    if transport == "nccl":
        kinds = {"nccl": make_kind()}
    else:
        told = tell_gpu(kv.memory)
        if (exported := told.exported) is None:
            print(f"refused {told.why_not}", flush=True)
            return
    files = RegionFiles("gpu-owner", Path(directory))
    ranks = [MappedRank(kv.memory, "", None, exported)]
    made = Owner(files, ranks, "i1", instance_id="gpu-owner", kinds=kinds)
    made.listen("127.0.0.1")
    (descriptor,) = made.describe()
    print(msgspec.json.encode(descriptor).decode(), flush=True)
    for line in sys.stdin:
        print(_obey(line.split(), kv, made), flush=True)
    made.close()


def digest(kv: GpuMemory, blocks: Sequence[int]) -> bytes:
    """Of the bytes of these blocks."""
    return blake2b(read_pages([kv.memory], blocks).tobytes()).digest()


def _obey(words: list[str], kv: GpuMemory, made: Owner) -> Any:
    verb, *rest = words
    if verb == "open":
        token = made.fences.open(range(kv.memory.layout.num_blocks))
        return f"{token.slot} {token.epoch}"
    if verb == "revoke":
        return made.fences.try_revoke(FenceToken(slot=int(rest[0]), epoch=int(rest[1])))
    if verb == "digest":
        return digest(kv, [int(b) for b in rest[0].split(",")]).hex()
    if verb == "fill":
        kv.buffer.fill_(int(rest[0]))
        torch.cuda.synchronize()
        return "filled"
    return int((kv.buffer != int(rest[0])).sum())


def writer(path: str, fill: str, device: str = "0") -> None:
    descriptor = msgspec.json.decode(Path(path).read_bytes(), type=RegionDescriptor)
    kv = GpuMemory(layout_of(descriptor), int(device))
    kv.buffer.view(torch.uint8).fill_(int(fill))
    torch.cuda.synchronize(kv.buffer.device)
    over: PeerTransport = CudaIpcTransport([int(device)])
    if "nccl" in descriptor.endpoints:
        over = StreamTransport(make_kind())
    session = over.connect(kv.memory, descriptor)
    obey(lambda verb, token: _move(session, kv, verb, token))


def _move(session: PeerSession, kv: GpuMemory, verb: str, token: FenceToken | None) -> str:
    assert token is not None
    layout = kv.memory.layout
    blocks = range(layout.num_blocks)
    if verb == "read":
        session.move("read", token, [0], [blocks[-1]])
        torch.cuda.synchronize(kv.buffer.device)
        return f"done {int(kv.buffer.view(torch.uint8)[blocks[-1] * layout.block_stride])}"
    session.move("write", token, blocks, blocks)
    while verb in ("loop", "beat"):
        time.sleep(0.2 if verb == "beat" else 0)
        session.move("write", token, blocks, blocks)
    return "done"


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {"owner": owner, "writer": writer}
    programs[sys.argv[1]](*sys.argv[2:])
