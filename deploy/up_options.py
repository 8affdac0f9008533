"""Options of `pullfill up`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pullfill.net.security import OPEN, Security
from pullfill.option_values import parse_numbers
from pullfill.options import PORT, ForwarderName, FrontendOptions, WorkerOptions, flag

_DEVICES = "Only these GPUs for {} workers, e.g. 0-3; on CPU, these cores"


def _devices(role: str) -> dict[str, Any]:
    """Return how the flag for the devices of a role is parsed."""
    return {
        "metavar": "N",
        "given": str | None,
        "parse": lambda text: parse_numbers(f"--{role}-devices", text),
    }


@dataclass(slots=True, kw_only=True)
class UpOptions:
    """The command line of `up`.

    workers, frontend: what every worker and every frontend is started with.
    etcd_url, nats_url: servers to use. None: start one.
    settings: `KEY=VALUE`, stored in etcd before workers start.
    vllm_args: vLLM flags of every process.
    role_args: vLLM flags by role. They come after the flags for all roles.
    """

    model: str = flag("demo", "Checkpoint directory, hub name, or demo", metavar="PATH|demo")
    decode: int = flag(1, "Decode workers", metavar="N", least=0)
    prefill: int = flag(1, "Prefill workers", metavar="N", least=0)
    frontends: int = flag(1, "HTTP frontends", metavar="N", least=0)
    decode_devices: tuple[int, ...] = flag((), _DEVICES.format("decode"), **_devices("decode"))
    prefill_devices: tuple[int, ...] = flag((), _DEVICES.format("prefill"), **_devices("prefill"))
    host: str = flag("127.0.0.1", "Where frontends listen", metavar="H")
    port: int = flag(
        8000,
        "Port of all frontends. Several also listen at the next ports, one each. 0: any free one",
        **PORT,
    )
    ready_timeout_s: float = flag(600.0, "Longest start, in seconds", metavar="S", least=1)
    restart: bool = flag(True, "Restart processes that die", name="--restart/--no-restart")
    namespace: str = "default"
    etcd_url: str | None = None
    nats_url: str | None = None
    security: Security = OPEN
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    settings: list[str] = field(default_factory=list)
    vllm_args: list[str] = field(default_factory=list)
    role_args: dict[str, list[str]] = field(default_factory=dict)

    @property
    def by_stock(self) -> bool:
        """Whether frontends can serve without a decode worker: by stock vLLM servers."""
        return self.frontend.forwarder is not ForwarderName.PULL

    def drain_s(self, role: str) -> float:
        """Return how long a process of this role may take to leave."""
        if role == "frontend":
            return self.frontend.drain_timeout_s + self.frontend.ready_grace_s
        return self.workers.drain_timeout_s

    @property
    def frontend_url(self) -> str:
        """Where clients reach the frontends. Empty: there is none."""
        return frontend_url(self.host, self.port) if self.frontends else ""

    @property
    def own_ports(self) -> list[int]:
        """The port that reaches each frontend alone. 0: any free one, for the only frontend.

        Every frontend has one, so that its successor can share `port` with it."""
        if self.frontends == 1:
            return [0]
        return [self.port + 1 + index for index in range(self.frontends)]


def frontend_url(host: str, port: int) -> str:
    """Return a URL that reaches a server bound to `host`. For a wildcard: the loopback address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
