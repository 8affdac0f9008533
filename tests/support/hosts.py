"""Several hosts on one machine: network namespaces with addresses and shared memory of their own.

A cluster whose workers, servers and frontend each run on their own host. The test itself is one
more host, so that it reaches the frontend and etcd. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.cluster import Cluster, Worker
from tests.support.etcd import EtcdServer
from tests.support.nats import NatsServer
from tests.support.wires import Wire, Wires
from tests.support.zygote import enter

TEST = "test"
_serials = itertools.count()


def why_not() -> str:
    """Why this machine cannot have hosts; "" when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (Debian: apt-get install iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun on this machine"
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


def _inside(namespace: Path, do: Callable[[], None]) -> None:
    """Run `do` in a thread that has entered the network namespace. Raises what it raises."""

    def run() -> None:
        enter(str(namespace))
        do()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


class Hosts:
    """Named hosts in one network. Owns the namespaces and the wires; `close` removes them. mtu:
    larger packets cost less; a wire that loses packets needs many."""

    def __init__(self, names: Sequence[str], *, mtu: int = 9000) -> None:
        # A network of its own: two of one process, or two runs on one machine, do not meet.
        serial = next(_serials) % 16
        self._prefix = f"pf{os.getpid():x}{serial:x}"
        net = (16 * os.getpid() + serial) % 32_768
        self._base = f"10.{128 + (net >> 8)}.{net & 255}"
        self._numbers = {name: index for index, name in enumerate((TEST, *names), start=1)}
        self._mtu = mtu
        self.wires = Wires()
        self._made: list[str] = []
        try:
            for name in self._numbers:
                self._make(name)
        except BaseException:
            self.close()
            raise
        self.wires.start()

    def address(self, name: str) -> str:
        return f"{self._base}.{self._numbers[name]}"

    def namespace(self, name: str) -> str:
        """The file of the host's network namespace."""
        return f"/run/netns/{self._namespace(name)}"

    def command(self, name: str) -> list[str]:
        """What goes before a command line to run it on the host. The pid stays the command's."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def wire(self, source: str, target: str) -> Wire:
        """The direction from one host to another."""
        return self.wires.wire(self.address(source), self.address(target))

    def close(self) -> None:
        self.wires.close()
        for namespace in self._made:
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "delete", namespace)

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make(self, name: str) -> None:
        device, address = f"{self._prefix}t", self.address(name)
        if name == TEST:
            self.wires.attach(address, device)
            where: tuple[str, ...] = ()
        else:
            namespace = self._namespace(name)
            _ip("netns", "add", namespace)
            self._made.append(namespace)
            path = Path(self.namespace(name))
            _inside(path, lambda: self.wires.attach(address, device))
            where = ("-n", namespace)
            _ip(*where, "link", "set", "lo", "up")
        _ip(*where, "address", "add", f"{address}/24", "dev", device)
        _ip(*where, "link", "set", device, "mtu", str(self._mtu), "up")


class SpreadCluster(Cluster):
    """A cluster on `hosts`: servers on "servers", the frontend on "front", each worker on the host
    that `launch_on` names. The hosts end with it."""

    def __init__(self, directory: Path, model_path: Path, hosts: Hosts) -> None:
        super().__init__(directory, model_path)
        self.hosts = hosts
        address, before = hosts.address("servers"), hosts.command("servers")
        self.etcd = EtcdServer(directory / "etcd", host=address, before=before)
        self.nats = NatsServer(directory / "nats", host=address, before=before)

    def launch_on(self, host: str, role: str, *extra: str) -> Worker:
        """Start one process on a host; does not wait."""
        address, namespace = self.hosts.address(host), self.hosts.namespace(host)
        return self.launch(role, f"--host={address}", *extra, namespace=namespace, address=address)

    def stop(self) -> None:
        super().stop()
        self.hosts.close()

    def mend(self) -> None:
        """All wires as new; returns when every worker is known and connected again."""
        self.hosts.wires.heal()
        self.wait_ready(*self.of("decode"), *self.of("prefill"))

    def assert_alive(self) -> None:
        """Every process runs. The message holds the last lines of the logs of others."""
        ended = [worker for worker in self.workers if not worker.alive]
        assert not ended, "\n".join(
            f"{w.log.name}: ended with exit code {w.process.returncode}\n{w.tail()}" for w in ended
        )
