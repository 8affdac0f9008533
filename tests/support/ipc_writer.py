"""A GPU writer process of its own: `python -m tests.support.ipc_writer DESCRIPTOR_FILE FILL`.

Connects over cuda_ipc, on GPUs of plain memory, with memory whose every byte is FILL. Commands on
stdin, an answer each:

    write SLOT EPOCH   writes all blocks; `done`, `fenced` or `failed TEXT`
    start SLOT EPOCH   the same on a thread, which stops with copies queued; `queued`
    unlock             gives back its file locks, as the kernel does for the dying; `unlocked`
    break SLOT EPOCH   as write, but the GPU fails; `failed TEXT`
    close              closes the session; `closed`
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

from pullfill.errors import Fenced, PullfillError
from pullfill.transfer.contract import PeerSession
from pullfill.transfer.cuda_ipc.ipc_transport import CudaIpcTransport, IpcHold
from pullfill.transfer.layout import layout_of
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm import lock
from pullfill.wire import FenceToken, RegionDescriptor, decode
from tests.support.fake_gpu import FakeDriver, FakeStream
from tests.support.transfer_rigs import memory_over


class StoppingStream(FakeStream):
    """Its device never finishes once `stop` is set."""

    stop = False
    waiting = threading.Event()

    def synchronize(self) -> None:
        if self.stop:
            self.waiting.set()
            threading.Event().wait()
        super().synchronize()


class Driver(FakeDriver):
    def stream(self, device: int) -> FakeStream:
        return StoppingStream(self, device)


def write(session: PeerSession, token: FenceToken, blocks: range) -> str:
    try:
        session.move("write", token, blocks, blocks)
    except Fenced:
        return "fenced"
    except PullfillError as exc:
        return f"failed {exc}"
    return "done"


def obey(line: str, driver: Driver, session: PeerSession, blocks: range) -> str:
    verb, *rest = line.split()
    token = FenceToken(slot=int(rest[0]), epoch=int(rest[1])) if rest else None
    if verb == "start":
        StoppingStream.stop = True
        threading.Thread(target=write, args=(session, token, blocks), daemon=True).start()
        assert StoppingStream.waiting.wait(20)
        return "queued"
    if verb == "unlock":
        assert isinstance(session, MappedSession)
        assert isinstance(session._hold, IpcHold)
        lock.unlock(session._hold._fd, 0, 0)  # to the end of the file
        return "unlocked"
    if verb == "close":
        session.close()
        return "closed"
    driver.fail_sync = verb == "break"
    assert token is not None
    return write(session, token, blocks)


def main() -> None:
    descriptor = decode(Path(sys.argv[1]).read_bytes(), RegionDescriptor)
    layout = layout_of(descriptor)
    driver = Driver()
    data = driver.allocate(descriptor.nbytes).data
    data[:] = int(sys.argv[2])
    transport = CudaIpcTransport(0, lambda: driver, driver.lane)
    reason = transport.can_reach(descriptor)
    assert reason is None, reason
    session = transport.connect(replace(memory_over(data, layout), device=0), descriptor)
    print("ready", flush=True)
    for line in sys.stdin:
        print(obey(line, driver, session, range(layout.num_blocks)), flush=True)


if __name__ == "__main__":
    main()
