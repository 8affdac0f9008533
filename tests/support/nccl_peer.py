"""A prefill worker's end of nccl with real GPU memory, in a process of its own:

    python -m tests.support.nccl_peer DESCRIPTOR_FILE DEVICE FILL

prints `ready`, then obeys a line each, with memory whose every byte is FILL: `write SLOT EPOCH`,
`read SLOT EPOCH` (block 0 into its last one), `loop SLOT EPOCH` (writes until fenced). Answers
`done`, or `done N` (the first byte read), `fenced`, or `failed TEXT`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from pullfill.errors import Fenced, PullfillError
from pullfill.transfer.contract import PeerSession
from pullfill.transfer.layout import layout_of
from pullfill.transfer.nccl.nccl_backend import make_kind
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.wire import FenceToken, RegionDescriptor
from tests.support.gpu_programs import GpuMemory


def main(path: str, device: int, fill: int) -> None:
    descriptor = msgspec.json.decode(Path(path).read_bytes(), type=RegionDescriptor)
    mine = GpuMemory(layout_of(descriptor), device)
    mine.buffer.view(torch.uint8).fill_(fill)
    torch.cuda.synchronize(device)
    transport = StreamTransport(make_kind())
    if (reason := transport.can_reach(descriptor)) is not None:
        print(f"failed {reason}", flush=True)
        return
    session = transport.connect(mine.memory, descriptor)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, slot, epoch = line.split()
        try:
            answer = _do(session, mine, verb, FenceToken(slot=int(slot), epoch=int(epoch)))
            print(answer, flush=True)
        except Fenced:
            print("fenced", flush=True)
        except PullfillError as exc:
            print(f"failed {exc}", flush=True)
    session.close()


def _do(session: PeerSession, mine: GpuMemory, verb: str, token: FenceToken) -> str:
    layout = mine.memory.layout
    blocks = range(layout.num_blocks)
    if verb == "read":
        session.read_blocks(token, [0], [blocks[-1]])
        torch.cuda.synchronize(mine.buffer.device)
        return f"done {int(mine.buffer.view(torch.uint8)[blocks[-1] * layout.block_stride])}"
    session.write_blocks(token, blocks, blocks)
    while verb == "loop":
        session.write_blocks(token, blocks, blocks)
    return "done"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
