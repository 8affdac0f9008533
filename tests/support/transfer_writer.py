"""A writer process of its own: `python -m tests.support.transfer_writer DESCRIPTOR_FILE FILL`.

Connects over the first transport offered, with memory whose every byte is FILL. Per line
`write SLOT EPOCH` or `loop SLOT EPOCH` on stdin: writes all blocks (once, or until fenced), then
prints `done`, `fenced` or `failed TEXT`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pullfill.errors import Fenced, PullfillError
from pullfill.runtime.failpoints import ENV
from pullfill.transfer.contract import PeerTransport
from pullfill.transfer.layout import layout_of
from pullfill.transfer.nixl.nixl_backend import NixlKind
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken, RegionDescriptor, decode, encode
from tests.support.transfer_rigs import Region, memory_over

TRANSPORTS: dict[str, Callable[[], PeerTransport]] = {
    "shm": ShmTransport,
    "tcp": lambda: StreamTransport(TcpKind()),
    "nixl": lambda: StreamTransport(NixlKind()),
}


FOREIGN, OURS = 0xEE, 0x11
PATIENCE_S = 20.0


class Writer:
    """The program, from outside. `close` ends it whatever state it is in."""

    def __init__(
        self, region: Region, directory: Path, failpoints: str = "", *,
        fill: int = FOREIGN, program: str = "tests.support.transfer_writer",
    ) -> None:  # fmt: skip
        path = directory / "descriptor.bin"
        path.write_bytes(encode(region.descriptor))
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, str(path), str(fill)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, ENV: failpoints, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"
        path.unlink()

    def send(self, verb: str, token: FenceToken | None = None) -> None:
        assert self.process.stdin is not None
        words = [verb] if token is None else [verb, str(token.slot), str(token.epoch)]
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, verb: str, token: FenceToken | None = None) -> str:
        self.send(verb, token)
        return self.line()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stopped(self) -> bool:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


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
            session.move("write", token, blocks, blocks)
            while verb == "loop":
                session.move("write", token, blocks, blocks)
            print("done", flush=True)
        except Fenced:
            print("fenced", flush=True)
        except PullfillError as exc:
            print(f"failed {exc}", flush=True)
    session.close()


if __name__ == "__main__":
    main()
