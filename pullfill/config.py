"""Where a process finds its cluster, and the options all roles share."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pullfill.errors import ConfigError
from pullfill.ids import is_name
from pullfill.net.security import OPEN, Security, load
from pullfill.wire import DigestMode, KvMode

DEFAULT_STATE_DIR = ".pullfill"
STATE_DIR_ENV = "PULLFILL_STATE_DIR"
CLUSTER_FILE = "cluster.json"
TRANSPORTS = ("cuda_ipc", "shm", "nccl", "nixl", "tcp")
"""Names of the ways to move KV, best first."""

NO_DATA_PARALLEL = (
    "workers do not run data-parallel engines: start more workers instead (`pullfill up --decode N "
    "--prefill N`)"
)
NO_KV_OFFLOADING = (
    "workers do not offload KV: give the KV cache more room instead (--kv-cache-memory-bytes N)"
)


RESTARTS_ENV = "PULLFILL_RESTARTS"
"""Set by `up` in every child: how often it was started again."""


class NoCluster(ConfigError):
    """There is no cluster.json in the directory."""


class ProcessEntry(msgspec.Struct, kw_only=True):
    """One process of a local cluster.

    started: the kernel's start time in clock ticks since boot (field 22 of /proc/PID/stat). A pid
    may be used again, but not with the same start time.
    url: where a frontend answers.
    restarts: how often the process died and was started again.
    gave_up: why it is not started again any more, with the last lines of its log. Empty while it
    is restarted."""

    name: str
    role: str
    instance_id: str | None
    pid: int
    log: str
    started: int = 0
    url: str = ""
    restarts: int = 0
    gave_up: str = ""


class ClusterFile(msgspec.Struct, kw_only=True):
    """STATE/cluster.json (design.md §5). security: the file it was started with, if any."""

    namespace: str
    nats_url: str
    etcd_url: str
    frontend_url: str
    processes: list[ProcessEntry] = []
    security: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class ClusterRef:
    """The three addresses every process needs, what it shows to be let in there and to its peers,
    and the state directory if there is one."""

    namespace: str
    etcd_url: str
    nats_url: str
    state_dir: Path | None = None
    security: Security = OPEN

    @staticmethod
    def resolve(
        *,
        state_dir: str | os.PathLike[str] | None = None,
        etcd: str | None = None,
        nats: str | None = None,
        namespace: str | None = None,
        security: str | os.PathLike[str] | None = None,
    ) -> ClusterRef:
        """From explicit URLs and file, else STATE/cluster.json. Raises ConfigError saying what to
        do."""
        if namespace is not None and not is_name(namespace):
            raise ConfigError(
                f"namespace {namespace!r} is not usable: lower-case letters, digits, '-', '_' only"
            )
        if etcd and nats:
            own = Path(state_dir) if state_dir else None
            return ClusterRef(namespace or "default", etcd, nats, own, load(security))
        directory = Path(state_dir or os.environ.get(STATE_DIR_ENV) or DEFAULT_STATE_DIR)
        cluster = read_cluster_file(directory)
        return ClusterRef(
            namespace or cluster.namespace,
            etcd or cluster.etcd_url,
            nats or cluster.nats_url,
            directory,
            load(security or cluster.security or None),
        )


def read_cluster_file(directory: Path) -> ClusterFile:
    """Read STATE/cluster.json. Raises NoCluster when missing, ConfigError when it cannot be read or
    is damaged."""
    path = directory / CLUSTER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterFile)
    except FileNotFoundError:
        raise NoCluster(
            f"no cluster at {path}: start one with `pullfill up`, or name one with "
            "--state-dir DIR or --etcd URL --nats URL"
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"cannot read {path} ({exc.strerror}): run as the user who started the cluster, or "
            "name "
            "another with --state-dir DIR or --etcd URL --nats URL"
        ) from exc
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{path} is damaged ({exc}): run `pullfill down`, then `pullfill up`"
        ) from exc


def restarts_so_far() -> int:
    """How often `up` has started this process again."""
    text = os.environ.get(RESTARTS_ENV, "")
    return int(text) if text.isdecimal() else 0


def split_urls(urls: str) -> list[str]:
    """The members of `URL,URL`."""
    return [url for part in urls.split(",") if (url := part.strip())]


def parse_transports(text: str | None) -> frozenset[str] | None:
    """`--transports`: names separated by commas; None: whatever works. Raises ConfigError."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in TRANSPORTS]
    if wrong or not names:
        what = f"no transport is called {wrong[0]!r}" if wrong else "--transports names none"
        raise ConfigError(f"{what}: use one or more of {', '.join(TRANSPORTS)}")
    return frozenset(names)


_SIZES = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp"}


def ranks_of(vllm_args: Sequence[str]) -> int:
    """How many processes compute in one engine: TP x PP, by vLLM's own flags.

    The last of several equal flags counts, as in vLLM. vLLM itself refuses bad values later.
    """
    sizes = dict.fromkeys(_SIZES, 1)
    for flag, value in zip_longest(vllm_args, vllm_args[1:], fillvalue=""):
        given, _, joined = flag.partition("=")
        name = given.replace("_", "-")
        for size, short in _SIZES.items():
            # vLLM also takes a shortened flag, e.g. --tensor-parallel.
            known = name == short or (len(name) >= len("--tensor") and size.startswith(name))
            if known and (number := joined or value).isdecimal():
                sizes[size] = max(1, int(number))
    return math.prod(sizes.values())


def check_address(flag: str, address: str | None) -> str | None:
    """An address to publish, as `tcp://HOST:PORT`. Raises ConfigError."""
    if address is None:
        return None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "#" in host:
        raise ConfigError(f"{flag} {address!r}: give tcp://HOST:PORT")
    return f"tcp://{host}:{port}"


def check_url(flag: str, url: str | None) -> str | None:
    """An address to publish, as `http[s]://HOST[:PORT]`. Raises ConfigError."""
    if url is None:
        return None
    with suppress(ValueError):
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or parts.username)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and plain:
            return url.rstrip("/")
    raise ConfigError(f"{flag} {url!r}: give http://HOST:PORT or https://HOST:PORT")


STANDING_LINKS = 32
"""How many prefill workers stay connected to one decode worker."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a decode or prefill worker besides vLLM's own flags.

    host: address to bind and publish (loopback unless told otherwise).
    cpu: pin the process to this core. None: do not pin it.
    drain_timeout_s: how long a drain after SIGTERM may take.
    engine_stall_s: an engine that takes no step for this long while requests wait is stuck.
    transports: names of the transports that may move KV. None: all that work here, except nixl.
    kv_port: port for KV over tcp, 0 for any. Decode workers use it, and with `kv_mode` pull also
    prefill workers.
    advertise_kv: address for KV to publish instead of the bound one.
    http_port: port of the probe server, 0 for any.

    Decode workers only:
    kv_digest: which of the written KV is compared with digests.
    kv_mode: how KV gets into the decode worker's blocks.
    data_port: port for the requests of frontends, 0 for any.
    control_port: port for the claims of prefill workers, 0 for any.
    advertise_control: address for claims to publish instead of the bound one (a forwarded port).

    Prefill workers only:
    kv_credits: bytes of KV that may be computed for one decode worker but not delivered. None: 256
    MiB, or the KV of a whole prefill budget if that is more.
    standing_links: how many prefill workers stay connected to one decode worker. Must be the same
    for all prefill workers.
    """

    model: str
    host: str = "127.0.0.1"
    instance_id: str | None = None
    lease_ttl_s: int = 5
    drain_timeout_s: float = 60.0
    cpu: int | None = None
    connect_timeout_s: float = 30.0
    engine_stall_s: float = 60.0
    kv_digest: DigestMode = DigestMode.OFF
    kv_mode: KvMode = KvMode.PUSH_ASYNC
    kv_credits: int | None = None
    standing_links: int = STANDING_LINKS
    control_port: int = 0
    advertise_control: str | None = None
    transports: frozenset[str] | None = None
    kv_port: int = 0
    advertise_kv: str | None = None
    http_port: int = 0
    data_port: int = 0


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """Options of a frontend besides vLLM's own flags.

    port: 0 for any.
    max_inflight: requests served at once. More are refused with 429.
    restart_wait_s: how long a request whose decode worker was lost waits for one that is being
    started, if no other is ready.
    advertise: URL to publish instead of the bound address."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    instance_id: str | None = None
    lease_ttl_s: int = 5
    drain_timeout_s: float = 60.0
    connect_timeout_s: float = 30.0
    max_inflight: int = 1024
    restart_wait_s: float = 0.0
    advertise: str | None = None
