"""A real etcd of a test's own: free loopback ports, a data directory, and ways to hurt it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import httpx
import psutil

from pullfill.deploy.local_servers import etcd_binary, etcd_command
from tests.support.certificates import Certificates


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports, free a moment ago and below the range the kernel gives to outgoing
    connections: a server that is down for a while must find its port still free."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


class ServerProcess:
    """A server of a test's own, and ways to hurt it. Its ports and data stay over restarts.

    directory: what it owns. The context manager starts and ends it.
    before: what goes before its command line."""

    store = ""
    """The folder of its data, in `directory`."""
    env: ClassVar[dict[str, str]] = {}

    def __init__(self, directory: Path, before: Sequence[str]) -> None:
        self.directory, self.log = directory, directory / "server.log"
        self._before = before
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Its command line. Writes what else it needs to start."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """Why it does not answer yet. None: it does."""
        raise NotImplementedError

    def launch(self) -> None:
        """Start without waiting."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._before, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env},
            )

    def wait_ready(self) -> None:
        give_up = time.monotonic() + 20.0
        while self.problem() is not None:
            if not self.alive or time.monotonic() > give_up:
                self.stop()
                raise RuntimeError(self.log.read_text()[-2000:])
            time.sleep(0.01)

    def start(self) -> None:
        """Start, and wait until it answers."""
        self.launch()
        self.wait_ready()

    def restart(self, *, empty: bool = False) -> None:
        """SIGKILL if alive, then start again with the same data or with none."""
        self.kill()
        if empty:
            shutil.rmtree(self.directory / self.store, ignore_errors=True)
        self.start()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL and reap, whatever state it is in. Idempotent."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Send SIGTERM, also if it is paused. Idempotent."""
        if self.process is not None and self.alive:
            self.resume()
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()

    def pause(self) -> None:
        """SIGSTOP: connected, but silent."""
        os.kill(self.pid, signal.SIGSTOP)
        # The signal takes effect a little later; tests count on silence from here on.
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def resume(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class EtcdServer(ServerProcess):
    """One etcd with a single member.

    tls: it shows `cert` to clients and wants theirs, signed by `ca`.
    host: where it listens."""

    store = "data"
    env: ClassVar = {"GOMAXPROCS": "1"}

    def __init__(
        self,
        directory: Path,
        tls: Certificates | None = None,
        *,
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, before)
        (self._port,) = free_ports(1)
        self.url = f"{'https' if tls else 'http'}://{host}:{self._port}"
        self.options = {"listen-client-urls": self.url, "advertise-client-urls": self.url}
        self._context, self._ctl_flags = None, list[str]()
        if tls is not None:
            files = {"cert": tls.cert, "key": tls.key, "cacert": tls.ca}
            self._ctl_flags = [f"--{name}={path}" for name, path in files.items()]
            self._context = ssl.create_default_context(cafile=tls.ca)
            self._context.load_cert_chain(tls.cert, tls.key)
            self.options |= {
                "cert-file": str(tls.cert),
                "key-file": str(tls.key),
                "trusted-ca-file": str(tls.ca),
                "client-cert-auth": "true",
            }

    def command(self) -> list[str]:
        command = etcd_command(self.directory / self.store, self._port)
        # Of two flags with one name the last counts.
        return command + [f"--{name}={value}" for name, value in self.options.items()]

    def problem(self) -> str | None:
        """Why it is not healthy. It needs no login for that."""
        try:
            answer = httpx.get(f"{self.url}/health", verify=self._context or False, trust_env=False)
        except httpx.HTTPError as exc:
            return repr(exc)
        return None if answer.json()["health"] == "true" else answer.text

    def ctl(self, *arguments: str) -> str:
        """Run the real etcdctl against it. Returns its stdout."""
        program = str(etcd_binary().with_name("etcdctl"))
        command = [program, f"--endpoints={self.url}", *self._ctl_flags, *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout

    def enable_auth(self, password: str) -> None:
        """From now on nothing without a login; the user is root."""
        self.ctl("user", "add", f"root:{password}")
        self.ctl("auth", "enable")
        self._ctl_flags.append(f"--user=root:{password}")


class EtcdCluster:
    """Three members on free loopback ports. The context manager starts and ends them."""

    def __init__(self, directory: Path) -> None:
        self.members = [EtcdServer(directory / f"m{i}") for i in range(3)]

    @property
    def url(self) -> str:
        """Of all members, the leader first: clients use it until it is gone."""
        leader = self.leader()
        return ",".join([leader.url, *(m.url for m in self.members if m is not leader)])

    def leader(self) -> EtcdServer:
        """The member that leads now."""
        for member in self.members:
            told = json.loads(member.ctl("endpoint", "status", "--write-out=json"))[0]["Status"]
            if told["leader"] == told["header"]["member_id"]:
                return member
        raise AssertionError("no leader")

    def __enter__(self) -> Self:
        peers = {f"m{i}": f"http://127.0.0.1:{port}" for i, port in enumerate(free_ports(3))}
        cluster = ",".join(f"{name}={peer}" for name, peer in peers.items())
        for member, (name, peer) in zip(self.members, peers.items(), strict=True):
            member.options |= {
                "name": name, "initial-cluster": cluster, "election-timeout": "500",
                "listen-peer-urls": peer, "initial-advertise-peer-urls": peer,
            }  # fmt: skip
            member.launch()
        for member in self.members:
            member.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            member.stop()
