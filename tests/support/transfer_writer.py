"""A writer process of its own: `python -m tests.support.transfer_writer DESCRIPTOR_FILE FILL`.

Connects over the first transport offered, with memory whose every byte is FILL. Per line
`write SLOT EPOCH` or `loop SLOT EPOCH` on stdin: writes all blocks (once, or until fenced), then
prints `done`, `fenced` or `failed TEXT`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pullfill.errors import Fenced, PullfillError
from pullfill.transfer.contract import PeerTransport
from pullfill.transfer.layout import layout_of
from pullfill.transfer.nixl.nixl_backend import NixlKind
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken, RegionDescriptor, decode
from tests.support.transfer_rigs import memory_over

TRANSPORTS: dict[str, Callable[[], PeerTransport]] = {
    "shm": ShmTransport,
    "tcp": lambda: StreamTransport(TcpKind()),
    "nixl": lambda: StreamTransport(NixlKind()),
}


def main() -> None:
    descriptor = decode(Path(sys.argv[1]).read_bytes(), RegionDescriptor)
    data = np.full(descriptor.nbytes, int(sys.argv[2]), np.uint8)
    layout = layout_of(descriptor)
    session = TRANSPORTS[next(iter(descriptor.endpoints))]().connect(
        memory_over(data, layout), descriptor
    )
    blocks = range(layout.num_blocks)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, slot, epoch = line.split()
        token = FenceToken(slot=int(slot), epoch=int(epoch))
        try:
            session.write_blocks(token, blocks, blocks)
            while verb == "loop":
                session.write_blocks(token, blocks, blocks)
            print("done", flush=True)
        except Fenced:
            print("fenced", flush=True)
        except PullfillError as exc:
            print(f"failed {exc}", flush=True)
    session.close()


if __name__ == "__main__":
    main()
