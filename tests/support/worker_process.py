"""One process of a test's cluster: its signals, its failpoints, and its log."""

from __future__ import annotations

import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pullfill.runtime.failpoints import parse as check_failpoints
from pullfill.wire import RouterConfig
from tests.support.waiting import until
from tests.support.zygote import Forked


@dataclass
class Worker:
    """One process of the cluster."""

    role: str
    process: subprocess.Popen[bytes] | Forked
    log: Path
    instance_id: str = ""
    armed: str = ""  # its failpoints now

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """By SIGSTOP, or a failpoint's."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False  # it has ended
        return stat.rpartition(")")[2].split()[0] == "T"

    @property
    def answers(self) -> bool:
        """Whether it can answer: it lives and is not stopped."""
        return self.alive and not self.stopped

    @property
    def router(self) -> RouterConfig:
        """The settings that a decode worker or frontend last said it acts on."""
        said = re.findall(rb"router settings: ({[^}]*})", self.log.read_bytes())
        if not said:
            return RouterConfig()
        # In JSON logs the quotes are escaped.
        return msgspec.json.decode(said[-1].replace(b'\\"', b'"'), type=RouterConfig)

    def arm(self, spec: str) -> None:
        """Replace its failpoints now. Hits are counted from here."""
        self.armed = spec
        write_failpoints(self.log, spec)

    def hold(self, failpoint: str, within_s: float = 20.0) -> None:
        """Hold it at its next hit of a failpoint. Returns when it is there. `arm` lets it go."""
        line = f"failpoint {failpoint} acts: hold".encode()
        before = self.log.read_bytes().count(line)
        self.arm(f"{failpoint}=hold@1")
        until(lambda: self.log.read_bytes().count(line) > before, within_s, f"held at {failpoint}")

    def signal(self, number: int) -> None:
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and reap."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, within_s: float = 30.0) -> int:
        """Send SIGTERM (drain), wait, and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(within_s)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def write_failpoints(log: Path, spec: str) -> Path:
    """Replace the file from which a worker with this log takes its failpoints."""
    check_failpoints(spec)
    path = log.with_suffix(".failpoints")
    new = path.with_suffix(".new")
    new.write_text(spec)
    return new.replace(path)
