"""Writer processes of their own: `python -m tests.support.transfer_writer DESCRIPTOR_FILE FILL`.

Connects over the first transport offered, with memory whose every byte is FILL; over cuda_ipc it is
on a GPU of plain memory. Prints `ready`, then answers a line each:

    write SLOT EPOCH   writes all blocks; `done`, `fenced` or `failed TEXT`
    loop SLOT EPOCH    the same until it is fenced or fails
    break SLOT EPOCH   as write, but the GPU fails
    start SLOT EPOCH   as write, on a thread, which stops with copies queued; `queued`
    unlock             gives back its file locks, as the kernel does for the dying; `unlocked`
    close              closes the session; `closed`
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import psutil

from pullfill.errors import Fenced, PullfillError
from pullfill.runtime.failpoints import ENV
from pullfill.transfer.contract import PeerTransport
from pullfill.transfer.cuda_ipc.ipc_transport import CudaIpcTransport
from pullfill.transfer.layout import layout_of
from pullfill.transfer.nixl.nixl_backend import NixlKind
from pullfill.transfer.shm import lock
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import FenceToken, RegionDescriptor, decode, encode
from tests.support.fake_gpu import FakeDriver
from tests.support.transfer_rigs import Region, memory_over

FOREIGN, OURS = 0xEE, 0x11
PATIENCE_S = 20.0


class Program:
    """A program that obeys lines, from outside. `close` ends it whatever state it is in.

    greeting: its first line."""

    def __init__(self, module: str, *arguments: object, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=Path(__file__).parents[2],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.greeting = self.answer()

    def tell(self, *words: object) -> None:
        """A fence token is two words."""
        said = [f"{w.slot} {w.epoch}" if isinstance(w, FenceToken) else str(w) for w in words]
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(said) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def stopped(self) -> bool:
        return bool(psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Writer(Program):
    def __init__(self, region: Region, directory: Path, failpoints: str = "") -> None:
        path = directory / "descriptor.bin"
        path.write_bytes(encode(region.descriptor))
        env = {**os.environ, ENV: failpoints, "OPENBLAS_NUM_THREADS": "1"}
        super().__init__("tests.support.transfer_writer", path, FOREIGN, env=env)
        assert self.greeting == "ready"
        path.unlink()


def obey(do: Callable[[str, FenceToken | None], str]) -> None:
    """Answer every line of stdin."""
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *rest = line.split()
        token = FenceToken(slot=int(rest[0]), epoch=int(rest[1])) if rest else None
        print(outcome(do, verb, token), flush=True)


def outcome(do: Callable[..., str], *arguments: object) -> str:
    try:
        return do(*arguments)
    except Fenced:
        return "fenced"
    except PullfillError as exc:
        return f"failed {exc}"


def main() -> None:
    descriptor = decode(Path(sys.argv[1]).read_bytes(), RegionDescriptor)
    layout, name, gpus = layout_of(descriptor), next(iter(descriptor.endpoints)), FakeDriver()
    blocks, driver = range(layout.num_blocks), cast(Any, gpus)
    transports: dict[str, Callable[[], PeerTransport]] = {
        "shm": ShmTransport,
        "tcp": lambda: StreamTransport(TcpKind()),
        "nixl": lambda: StreamTransport(NixlKind()),
        "cuda_ipc": lambda: CudaIpcTransport([0], lambda: driver, gpus.lane),
    }
    on_gpu = name == "cuda_ipc"
    data = gpus.allocate(descriptor.nbytes).data if on_gpu else np.empty(descriptor.nbytes, "u1")
    data[:] = int(sys.argv[2])
    memory = replace(memory_over(data, layout), device=0 if on_gpu else None)
    transport = transports[name]()
    reason = transport.can_reach(descriptor)
    assert reason is None, reason
    session: Any = transport.connect(memory, descriptor)
    waiting = threading.Event()

    def never_end() -> None:
        waiting.set()
        threading.Event().wait()

    def write(verb: str, token: FenceToken) -> str:
        gpus.fail_sync = verb == "break"
        session.move("write", token, blocks, blocks)
        while verb == "loop":
            session.move("write", token, blocks, blocks)
        return "done"

    def do(verb: str, token: FenceToken | None) -> str:
        if token is None and verb == "close":
            session.close()
            return "closed"
        if token is None:
            lock.unlock(session.hold._fd, 0, 0)  # to the end of the file
            return "unlocked"
        if verb == "start":
            gpus.before_sync = never_end
            threading.Thread(target=outcome, args=(write, verb, token), daemon=True).start()
            assert waiting.wait(20)
            return "queued"
        return write(verb, token)

    obey(do)
    session.close()


if __name__ == "__main__":
    main()
