"""The options of every process, each declared once: a field of a class here that is a `flag`.

The fields give the command's flags and their defaults (`deploy/cli.py`), and the command lines
of the processes that `pullfill up` starts (`arguments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum, StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, TypeVar, get_type_hints
from urllib.parse import urlsplit

from pullfill import redact
from pullfill.config import STATE_DIR_ENV, TRANSPORTS, ClusterRef, OtherCluster
from pullfill.errors import ConfigError
from pullfill.net.security import OPEN, SECURITY_ENV, Security
from pullfill.wire import KvMode

T = TypeVar("T")


class LogFormat(StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


class ForwarderName(StrEnum):
    """`--forwarder`: how stock vLLM servers are used."""

    # Decode when the prefill is done, with the parameters that the prefill server returned.
    STAGED = "staged"
    # Both servers of a request are asked at once. They find each other by an id.
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How a field is given on a command line. The flag's default is the field's."""

    help: str = field(kw_only=False)
    # `--lease-ttl` for the field `lease_ttl_s`, unless it is named here. `INSTANCE_ID` and `[NAME]`
    # are arguments.
    name: str = ""
    # The word for the value in `--help`.
    metavar: str | None = None
    # Bounds of a number.
    least: float | None = None
    most: float | None = None
    # The side that has the flag. Empty: both, and all that have the class.
    role: str = ""
    # `pullfill up` has the flag too, for the processes that it starts.
    up: bool = False
    # An environment variable that is read when the flag is not given.
    env: str | None = None
    hidden: bool = False
    # Type of the value on the command line, if it is not the field's.
    given: Any = None
    # Makes the field's value of the given one. Raises ConfigError.
    parse: Callable[[Any], Any] = lambda value: value
    # Makes the given value of the field's value.
    text: Callable[[Any], str] = str
    # The last three are set by `declared`.
    field: str = ""
    default: Any = None
    # The type of the value on the command line.
    type: Any = None

    def fits(self, role: str) -> bool:
        """Whether a process of this role has the flag. `worker` has both sides."""
        return self.role in ("", role) or role == "worker"


def flag(default: T, help: str, **how: Any) -> T:
    """Return a field of an options class that is a flag. how: see `Flag`."""
    found: T = field(default=default, metadata={"flag": Flag(help=help, **how)})
    return found


def declared(options: type) -> tuple[Flag, ...]:
    """Return the flags of an options class."""
    hints = get_type_hints(options)
    return tuple(
        replace(
            how,
            name=how.name or "--" + each.name.removesuffix("_s").replace("_", "-"),
            field=each.name,
            default=each.default,
            type=how.given or hints[each.name],
        )
        for each in fields(options)
        if (how := each.metadata.get("flag")) is not None
    )


def arguments(options: Any, role: str = "") -> Iterator[str]:
    """Yield the flags that make these options for the role. Defaults are left out."""
    for one in declared(type(options)):
        value = getattr(options, one.field)
        if value == one.default or not one.fits(role):
            continue
        if isinstance(value, bool):
            yes, _, no = one.name.partition("/")
            yield yes if value else no
        else:
            yield from (one.name, value.value if isinstance(value, Enum) else one.text(value))


# --------------------------------------------------------------------------- values of flags


def parse_transports(text: str | None) -> frozenset[str] | None:
    """Return the transports that are named. None: whatever works. Raises ConfigError."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in TRANSPORTS]
    if wrong or not names:
        what = f"no transport is called {wrong[0]!r}" if wrong else "--transports names none"
        raise ConfigError(f"{what}: use one or more of {', '.join(TRANSPORTS)}")
    return frozenset(names)


def check_address(flag: str, address: str | None) -> str | None:
    """Return the address to publish as `tcp://HOST:PORT`. Raises ConfigError."""
    if address is None:
        return None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "#" in host:
        raise ConfigError(f"{flag} {address!r}: give tcp://HOST:PORT")
    return f"tcp://{host}:{port}"


def parse_listen(flag: str, text: str | None) -> str | None:
    """Return `tcp://HOST:PORT` of `[HOST:]PORT`. HOST is loopback at first. Raises ConfigError."""
    if text is None or text.removeprefix("tcp://").rpartition(":")[0]:
        return check_address(flag, text)
    return check_address(flag, f"127.0.0.1:{text}")


Network = IPv4Network | IPv6Network


def parse_networks(text: str | None) -> tuple[Network, ...]:
    """Return the networks of `10.0.0.0/24,fd00::/64`. None: (). Raises ConfigError."""
    try:
        return tuple(ip_network(part.strip()) for part in text.split(",")) if text else ()
    except ValueError as exc:
        raise ConfigError(f"--heartbeats-from: {exc}; give networks, e.g. 10.0.0.0/24") from None


def check_url(flag: str, url: str | None) -> str | None:
    """Return the address to publish as `http[s]://HOST[:PORT]`. Raises ConfigError."""
    if url is None:
        return None
    with suppress(ValueError):
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or parts.username)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and plain:
            return url.rstrip("/")
    raise ConfigError(f"{flag} {redact.url(url)!r}: give http://HOST:PORT or https://HOST:PORT")


def parse_numbers(flag: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers of `3` or `0-3,8`, each once. None: (). Raises ConfigError."""
    found: list[int] = []
    for part in text.split(",") if text is not None else ():
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high) if dash else int(low)
        except ValueError:
            first, last = 0, -1
        if last < first:
            raise ConfigError(f"{flag} {text!r}: give numbers, e.g. 1 or 0-3")
        found.extend(range(first, last + 1))
    return tuple(dict.fromkeys(found))


# --------------------------------------------------------------------------- options


PORT: dict[str, Any] = {"metavar": "N", "least": 0, "most": 65535}
DIRECTORY = f"Directory of a local cluster  [default: .pullfill, or ${STATE_DIR_ENV}]"
CREDENTIALS = f"File of credentials and keys (docs/operations.md), or ${SECURITY_ENV}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDirOptions:
    """Which cluster of this machine a command is about."""

    state_dir: str | None = flag(None, DIRECTORY, metavar="DIR", env=STATE_DIR_ENV)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(StateDirOptions):
    """Which cluster a command is about."""

    etcd: str | None = flag(None, "etcd, e.g. http://127.0.0.1:2379", metavar="URL")
    nats: str | None = flag(None, "NATS, e.g. nats://127.0.0.1:4222", metavar="URL")
    namespace: str | None = flag(None, "Namespace of the cluster", metavar="NS")
    security: str | None = flag(None, CREDENTIALS, metavar="FILE", env=SECURITY_ENV)

    def find(self) -> ClusterRef:
        """Return the cluster, for a process that joins it. Raises ConfigError."""
        return ClusterRef.resolve(**asdict(self))

    def find_to_ask(self, frontend: str | None = None) -> ClusterRef:
        """Return the cluster, for a command that only asks it. Raises ConfigError.

        frontend: the URL of one, if the command asks nobody else."""
        try:
            return self.find()
        except ConfigError as exc:
            if isinstance(exc, OtherCluster) and self.namespace is None:
                raise  # `config set` must not write to a namespace that nobody has named
            alone = frontend and not self.state_dir
            if self.nats or not (self.etcd or alone):
                raise
            # One URL is enough.
            etcd = self.etcd or "http://"
            return replace(self, etcd=etcd, nats="nats://", state_dir=None).find()


def _drain_timeout(default_s: float) -> float:
    return flag(
        default_s,
        "Longest drain, in seconds  [default: 60; of a frontend: 600]",
        metavar="S",
        least=0,
        up=True,
        given=float | None,  # so that each process of `up` has its own default
        parse=lambda given: default_s if given is None else given,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """Options of every process that joins a cluster."""

    model: str = flag("", "Checkpoint directory, hub name, or the demo model", metavar="PATH|demo")
    host: str = flag(
        "127.0.0.1", "Address to listen at; a worker also tells it to others", metavar="H"
    )
    instance_id: str | None = flag(None, "", hidden=True)
    lease_ttl_s: int = flag(
        5, "Seconds after which etcd removes a process that it does not hear", metavar="S", least=2
    )
    drain_timeout_s: float = _drain_timeout(60.0)
    connect_timeout_s: float = flag(
        30.0, "Longest wait for NATS and etcd, in seconds", metavar="S", least=0
    )
    log_format: LogFormat = flag(
        LogFormat.TEXT,
        "Form of log lines; json: one object each, with ids of requests, jobs and workers",
        metavar="text|json",
        up=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(RoleOptions):
    """Options of a worker besides vLLM's own flags."""

    cores: tuple[int, ...] = flag(
        (),
        "Run on these cores only, e.g. 1 or 0-3",
        name="--cpu",
        metavar="N",
        given=str | None,
        parse=lambda text: parse_numbers("--cpu", text),
        text=lambda cores: ",".join(map(str, cores)),
    )
    engine_stall_s: float = flag(
        60.0,
        "Take no new requests if the engine has work but ends no step for S seconds. Exit after "
        "twice that",
        name="--engine-stall-timeout",
        metavar="S",
        least=1,
        up=True,
    )
    transports: frozenset[str] | None = flag(
        None,
        f"Transports that may move KV: {', '.join(TRANSPORTS)}"
        "  [default: all that work here but nixl]",
        metavar="NAME,...",
        up=True,
        given=str | None,
        parse=parse_transports,
        text=lambda names: ",".join(sorted(names)),
    )
    kv_port: int = flag(
        0,
        "Port for KV over tcp; 0: any",
        **PORT,
    )
    advertise_kv: str | None = flag(
        None,
        "Tell others this address for KV instead of the one it listens at",
        metavar="tcp://H:P",
        parse=lambda text: check_address("--advertise-kv", text),
    )
    http_port: int = flag(0, "Port of /live, /ready, /metrics and /status; 0: any", **PORT)
    kv_mode: KvMode = flag(
        KvMode.PUSH_ASYNC,
        "push_async: prefill workers write KV while they compute the next chunk; pull: the decode "
        "worker reads it",
        metavar="push_async|pull",
        role="decode",
        up=True,
    )
    reserve_seats: bool = flag(
        False,
        "Admit a request only while running requests and those waiting for remote KV are fewer "
        "than --max-num-seqs",
        name="--reserve-seats/--no-reserve-seats",
        role="decode",
        up=True,
    )
    control_port: int = flag(0, "Where prefill workers claim jobs; 0: any", role="decode", **PORT)
    advertise_control: str | None = flag(
        None,
        "Tell others this address for claims instead of the one it listens at",
        metavar="tcp://H:P",
        role="decode",
        parse=lambda text: check_address("--advertise-control", text),
    )
    data_port: int = flag(0, "Where frontends send requests; 0: any", role="decode", **PORT)
    kv_credits: int | None = flag(
        None,
        "Stop pulling jobs while this much KV (MiB) for one decode worker is computed but not "
        "delivered  [default: 256, or the KV of a whole prefill budget if that is more]",
        metavar="MIB",
        least=1,
        role="prefill",
        parse=lambda mib: None if mib is None else mib << 20,
        text=lambda size: str(size >> 20),
    )
    concurrency: int | None = flag(
        None,
        "Compute at most N prompts in one step. The next one is pulled meanwhile, and its prefix "
        "read  [default: no limit but the prefill budget in tokens]",
        metavar="N",
        least=1,
        role="prefill",
        up=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions(RoleOptions):
    """Options of a frontend besides vLLM's own flags."""

    # Nobody else can finish its streams, as other decode workers can those of a decode worker.
    drain_timeout_s: float = _drain_timeout(600.0)
    ready_grace_s: float = flag(
        5.0,
        "How long a frontend that leaves answers /ready with 503 and still takes requests, so that "
        "load balancers notice",
        metavar="S",
        least=0,
        up=True,
    )
    port: int = flag(8000, "Port; 0: any free one", **PORT)
    own_port: int | None = flag(
        None,
        "Listen here too, and share --port with the other frontends of this cluster on this "
        "machine; 0: any free port",
        **PORT,
    )
    max_inflight: int = flag(
        1024,
        "HTTP requests that a frontend serves at once (n > 1 counts once); more get 429",
        metavar="N",
        least=1,
        up=True,
    )
    prefix_index_blocks: int = flag(
        1 << 20,
        "Cached blocks of decode workers that a frontend remembers; 0: none",
        metavar="N",
        least=0,
        up=True,
    )
    restart_wait_s: float = flag(
        0.0,
        "How long a request whose decode worker died waits for one that is being started",
        metavar="S",
        least=0,
    )
    advertise: str | None = flag(
        None,
        "Tell others this address instead of the one it listens at, e.g. https://h:443",
        metavar="URL",
        parse=lambda text: check_url("--advertise", text),
    )
    forwarder: ForwarderName = flag(
        ForwarderName.STAGED,
        "How stock vLLM servers are used. staged: prefill first, then decode. parallel: both at "
        "once (mooncake, p2p)",
        metavar="staged|parallel",
        up=True,
    )
    protocol: str = flag(
        "nixl",
        "KV connector of the stock vLLM servers",
        metavar="nixl|mooncake|p2p",
        up=True,
    )
    servers: str | None = flag(
        None,
        "Stock vLLM servers: ROLE=URL[@KV],..., e.g. prefill=http://h1:8100,decode=http://h2:8200",
        metavar="LIST",
        up=True,
    )
    heartbeats: str | None = flag(
        None,
        "Hear stock vLLM servers over ZMQ, as MoRIIOConnector and P2pNcclConnector send. "
        "No key is asked  [default host: 127.0.0.1]",
        metavar="[HOST:]PORT",
        parse=lambda text: parse_listen("--heartbeats", text),
    )
    heartbeats_from: tuple[Network, ...] = flag(
        (),
        "Hear those in these networks only, and on this machine. Needed if the host of "
        "--heartbeats is not loopback",
        metavar="NET,...",
        given=str | None,
        parse=parse_networks,
        text=lambda networks: ",".join(map(str, networks)),
    )
    stock_silence_s: float = flag(
        120.0,
        "Longest silence of a stock vLLM server during a request; ten times that while it "
        "computes an answer that is not streamed",
        metavar="S",
        least=1,
        up=True,
    )

    @property
    def by_stock(self) -> bool:
        """Whether a flag names stock vLLM servers, or hears them."""
        return self.servers is not None or self.heartbeats is not None


# --------------------------------------------------------------------------- pullfill up


# Not given: the number depends on another flag.
USUAL = -1


def _one_side(side: str) -> int:
    return flag(
        USUAL,
        f"Workers that only {side}  [default: 1; with --workers: 0]",
        metavar="N",
        least=0,
        given=int | None,
        parse=lambda given: USUAL if given is None else given,
    )


@dataclass(slots=True, kw_only=True)
class UpOptions:
    """The command line of `up`.

    worker, decode, prefill: number of workers, by the command that starts one."""

    model: str = flag("demo", "Checkpoint directory, hub name, or demo", metavar="PATH|demo")
    worker: int = flag(
        0,
        "Workers that decode and prefill. Those of --decode and --prefill come on top",
        name="--workers",
        metavar="N",
        least=0,
    )
    decode: int = _one_side("decode")
    prefill: int = _one_side("prefill")
    frontends: int = flag(1, "HTTP frontends", metavar="N", least=0)
    host: str = flag("127.0.0.1", "Where frontends listen", metavar="H")
    port: int = flag(
        8000,
        "Port of all frontends. Several also listen at the next ports, one each. 0: any free one",
        **PORT,
    )
    pin: bool = flag(True, "On CPU, give workers cores of their own", name="--pin/--no-pin")
    ready_timeout_s: float = flag(600.0, "Longest start, in seconds", metavar="S", least=1)
    restart: bool = flag(True, "Restart processes that die", name="--restart/--no-restart")
    namespace: str = "default"
    # Servers to use. None: start one.
    etcd_url: str | None = None
    nats_url: str | None = None
    security: Security = OPEN
    # What every worker and every frontend is started with.
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    frontend: FrontendOptions = field(default_factory=FrontendOptions)
    # `KEY=VALUE`, stored in etcd before workers start.
    settings: list[str] = field(default_factory=list)
    # vLLM flags of every process.
    vllm_args: list[str] = field(default_factory=list)
    # vLLM flags by role. They come after the flags for all roles.
    role_args: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        usual = 0 if self.worker else 1
        self.decode = usual if self.decode == USUAL else self.decode
        self.prefill = usual if self.prefill == USUAL else self.prefill

    @property
    def decodes(self) -> bool:
        """Whether some worker decodes."""
        return bool(self.worker or self.decode)

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
