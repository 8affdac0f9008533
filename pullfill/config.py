"""Where a process finds its cluster, and what both `deploy` and the workers know."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import msgspec

from pullfill.errors import ConfigError, NotNow
from pullfill.ids import is_name
from pullfill.net.security import OPEN, Security, load
from pullfill.net.this_host import pid_space

DEFAULT_STATE_DIR = ".pullfill"
STATE_DIR_ENV = "PULLFILL_STATE_DIR"
CLUSTER_FILE = "cluster.json"
# Names of the ways to move KV, best first.
TRANSPORTS = ("cuda_ipc", "shm", "nccl", "nixl", "tcp")

NO_DATA_PARALLEL = (
    "workers do not run data-parallel engines: start more workers instead (`pullfill up --decode N "
    "--prefill N`)"
)

# Set by `up` in every child: how often it was started again.
RESTARTS_ENV = "PULLFILL_RESTARTS"


class NoCluster(ConfigError):
    """There is no cluster.json in the directory."""


class OtherCluster(ConfigError):
    """A URL is given that is not the one in cluster.json."""


class ProcessId(msgspec.Struct):
    """One process, also if its pid is used again later, in its boot and pid namespace.

    started: clock ticks since boot, field 22 of /proc/PID/stat.
    space: as of `this_host.pid_space`."""  # records may lie on a disk that several hosts share

    pid: int
    started: int = 0
    space: str = msgspec.field(default_factory=pid_space)


class ProcessEntry(ProcessId, kw_only=True):
    """One process of a local cluster."""

    name: str
    role: str
    instance_id: str | None
    log: str
    # Where a frontend answers.
    url: str = ""
    # How often the process died and was started again.
    restarts: int = 0
    # Why it is not started again any more, with the last lines of its log. Empty while it is
    # restarted.
    gave_up: str = ""
    # How long it may drain.
    drain_s: float = 60.0


class ClusterFile(msgspec.Struct, kw_only=True):
    """STATE/cluster.json: what `up` has started, and how.

    security: the file it was started with. Empty: none.
    cluster_id: is in the environment of every child.
    supervisor: the `up` that restarts processes. It may have ended.
    engine_args, role_args: vLLM flags of every process, and those of one role besides."""

    namespace: str
    nats_url: str
    etcd_url: str
    frontend_url: str
    processes: list[ProcessEntry] = []
    security: str = ""
    cluster_id: str = ""
    supervisor: ProcessId = msgspec.field(default_factory=lambda: ProcessId(0))
    restart: bool = True
    model: str = ""
    engine_args: list[str] = []
    role_args: dict[str, list[str]] = {}


@dataclass(frozen=True, slots=True)
class ClusterRef:
    """Where a cluster is.

    state_dir: its state directory, if it has one on this machine.
    security: logins for NATS and etcd, and keys for its other processes."""

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
        """Find the cluster by the URLs that are given, else by STATE/cluster.json.

        One URL alone is taken for that of the file's cluster only if the file holds it, or
        `state_dir` is given. Raises ConfigError, which says what to do."""
        if namespace is not None:
            check_namespace(namespace)
        if etcd and nats:
            own = Path(state_dir) if state_dir else None
            return ClusterRef(namespace or "default", etcd, nats, own, load(security))
        usual = os.environ.get(STATE_DIR_ENV)
        directory = Path(state_dir or usual or DEFAULT_STATE_DIR)
        cluster = read_cluster_file(directory)
        urls = (etcd or cluster.etcd_url, nats or cluster.nats_url)
        same = urls == (cluster.etcd_url, cluster.nats_url)
        # Else `config set --etcd REMOTE` would use the NATS of the local cluster.
        if not same and state_dir in (None, "", usual):
            given, missing = ("--etcd", "--nats") if etcd else ("--nats", "--etcd")
            raise OtherCluster(
                f"{given} {etcd or nats} is not the one in {directory / CLUSTER_FILE}: for another "
                f"cluster give {missing} URL, too"
            )
        return ClusterRef(
            namespace or cluster.namespace,
            *urls,
            directory,
            load(security or cluster.security),
        )


def check_namespace(namespace: str) -> None:
    """Raise ConfigError if the name of a namespace cannot be used."""
    if not is_name(namespace):
        raise ConfigError(
            f"namespace {namespace!r} is not usable: lower-case letters, digits, '-', '_' only"
        )


def read_cluster_file(directory: Path) -> ClusterFile:
    """Read cluster.json. Raises NoCluster if there is none, ConfigError if it is damaged."""
    path = directory / CLUSTER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterFile)
    except FileNotFoundError:
        raise NoCluster(
            f"no cluster at {path}: start one with `pullfill up`, or name one with "
            "--state-dir DIR or --etcd URL --nats URL"
        ) from None
    except OSError as exc:
        raise NotNow(
            f"cannot read {path} ({exc.strerror}): run as the user who started the cluster, or "
            "name another with --state-dir DIR or --etcd URL --nats URL"
        ) from exc
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{path} is damaged ({exc}): end what still runs of its cluster, which "
            "`pgrep -af pullfill` lists, then delete the file"
        ) from exc


def restarts_so_far() -> int:
    """Return how often `up` has started this process again."""
    text = os.environ.get(RESTARTS_ENV, "")
    return int(text) if text.isdecimal() else 0


def pod_name() -> str:
    """Return the name of the Kubernetes pod of this process. Empty: it runs in none."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:  # Kubernetes sets it in all containers
        return ""
    # The host name is the pod's, cut to 63 characters. The chart sets POD_NAME.
    return os.environ.get("POD_NAME") or socket.gethostname()


def split_urls(urls: str) -> list[str]:
    """Return the URLs of `URL,URL`."""
    return [url for part in urls.split(",") if (url := part.strip())]


_SIZES = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp"}


def ranks_of(vllm_args: Sequence[str]) -> int:
    """Return how many processes compute in one engine: TP x PP, by vLLM's flags.

    vllm_args: with whole names. The last of several equal flags counts, as in vLLM. vLLM itself
    refuses bad values later.
    """
    sizes = dict.fromkeys(_SIZES, 1)
    for flag, value in zip_longest(vllm_args, vllm_args[1:], fillvalue=""):
        given, _, joined = flag.partition("=")
        name = given.replace("_", "-")
        for size, short in _SIZES.items():
            if name in (size, short) and (number := joined or value).isdecimal():
                sizes[size] = max(1, int(number))
    return math.prod(sizes.values())
