"""A real nats-server for tests: loopback, a free port, JetStream on files in a temp dir."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from pullfill.deploy.local_servers import MAX_PAYLOAD, nats_binary, nats_ready
from pullfill.errors import QueueUnavailable
from pullfill.queue.dead_letters import get_message
from pullfill.queue.nats_connection import NatsConnection
from pullfill.queue.streams import DELIVERIES, JOB_ID, REASON, Names
from tests.support.etcd import ServerProcess, free_ports
from tests.support.waiting import soon


class DeadLetter(NamedTuple):
    """A record of a job that nobody may try again."""

    job_id: str
    reason: str
    deliveries: int
    body: bytes


async def dead_letters(connection: NatsConnection, names: Names) -> list[DeadLetter]:
    """The dead letters of a queue, newest first."""
    stream = names.dead_stream
    state = (await connection.api(f"STREAM.INFO.{stream}"))["state"]
    letters = []
    for seq in range(state["last_seq"], max(0, state["first_seq"] - 1), -1):
        if (found := await get_message(connection, stream, seq)) is not None:
            told, body = found
            letters.append(DeadLetter(told[JOB_ID], told[REASON], int(told[DELIVERIES]), body))
    return letters


class NatsServer(ServerProcess):
    """One nats-server with JetStream.

    extra: more of its configuration (logins, TLS).
    host: where it listens."""

    store = "store"

    def __init__(
        self,
        directory: Path,
        *,
        extra: str = "",
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, before)
        self._extra = extra
        (self.port,) = free_ports(1)
        self.url = f"nats://{host}:{self.port}"

    def command(self) -> list[str]:
        config = self.directory / "nats.conf"
        config.write_text(
            f'listen: "{self.url.removeprefix("nats://")}"\n'
            f"max_payload: {MAX_PAYLOAD}\n"
            f'jetstream {{ store_dir: "{self.directory / self.store}" }}\n{self._extra}\n'
        )
        return [str(nats_binary()), "-c", str(config)]

    def problem(self) -> str | None:
        return nats_ready(self.url)

    stop = ServerProcess.kill


class NatsCluster:
    """Three servers with JetStream on free loopback ports. The context manager launches and ends
    them. JetStream answers once it has a leader."""

    def __init__(self, directory: Path) -> None:
        ports = free_ports(3)
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports)
        self.members = [
            NatsServer(
                directory / f"n{i}",
                extra=f'server_name: "n{i}"\n'
                f'cluster {{ name: "test", listen: "127.0.0.1:{port}", routes: [{routes}] }}\n',
            )
            for i, port in enumerate(ports)
        ]

    @property
    def url(self) -> str:
        """Of all servers. Known after the start."""
        return ",".join(member.url for member in self.members)

    def __enter__(self) -> Self:
        for member in self.members:
            member.launch()
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            member.stop()

    async def info(self, connection: NatsConnection, stream: str) -> dict[str, Any]:
        """Wait until the stream has a leader and all replicas on running servers are up to date."""
        alive = {f"n{i}" for i, member in enumerate(self.members) if member.alive}

        async def look() -> dict[str, Any]:
            with contextlib.suppress(QueueUnavailable):
                return await connection.api(f"STREAM.INFO.{stream}")
            return {"cluster": {}}

        def settled(info: dict[str, Any]) -> bool:
            replicas = [r for r in info["cluster"].get("replicas", ()) if r["name"] in alive]
            return info["cluster"].get("leader") in alive and all(r["current"] for r in replicas)

        found: dict[str, Any] = await soon(look, good=settled)
        return found
