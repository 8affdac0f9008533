"""`pullfill doctor`: looks at this machine (machine.py) and at the cluster; changes nothing.

Each check yields findings, one line each: ok, warn (works, but not as well) or fail, and for the
last two what to do. Exit code 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from pullfill.config import ClusterRef, ProcessEntry, split_urls
from pullfill.deploy import machine, recheck, servers, transports
from pullfill.deploy.machine import FAIL, OK, WARN, Finding
from pullfill.deploy.members import Members, http_get
from pullfill.deploy.procs import is_alive
from pullfill.deploy.report import frontend_urls
from pullfill.deploy.state import StateDir, identity
from pullfill.deploy.up_options import find_cluster
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.options import ClusterOptions
from pullfill.registry.orders import LiveWorker

_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def run(options: ClusterOptions) -> int:
    """Print all findings; 1 if any failed."""
    console = Console()
    worst = OK
    checks: list[Callable[[], Iterable[Finding]]] = [
        machine.python_version,
        machine.packages,
        machine.torch_add_ons,
        machine.server_binaries,
        machine.compute,
        machine.shared_memory,
        transports.transports,
    ]
    try:
        ref = find_cluster(options)
    except ConfigError as exc:
        missing = Finding(WARN, "no cluster to look at", str(exc))
        checks += [machine.default_port, lambda: [missing]]
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
            # A worker may have been drained; a server is always missed.
            level = FAIL if entry.role in ("nats", "etcd") else WARN
            yield Finding(level, f"{entry.name} (pid {entry.pid}) is gone", f"its log: {entry.log}")
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
    no_nats = servers.nats_ready(ref.nats_url, 2.0)
    for name, url, why in (
        ("NATS", ref.nats_url, no_nats),
        ("etcd", ref.etcd_url, servers.etcd_ready(ref.etcd_url, 2.0, ref.security.etcd.tls())),
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
    yield from transports.pairs(workers)
    yield from recheck.findings(ref)
    yield from keys(ref, workers)
    if not any(w.record.role == "frontend" for w in workers) and not any(frontend_urls(ref)):
        yield Finding(WARN, "no frontend", "start one: pullfill frontend")
    if no_nats is None:
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


def keys(ref: ClusterRef, workers: Iterable[LiveWorker]) -> Iterator[Finding]:
    """Which cluster key this is, and whether workers turned away somebody with another."""
    key = ref.security.cluster.load()
    if key is not None:
        yield Finding(OK, f"cluster key {key.fingerprint}")
    for record in (w.record for w in workers if w.record.http and w.record.role != "frontend"):
        with suppress(UnavailableError):
            text = http_get(f"{record.http}/metrics", 2.0)[1].decode("utf-8", "replace")
            values = re.findall(r"^pullfill_auth_refused_total\{.*\} ([0-9.e+]+)$", text, re.M)
            if count := int(sum(map(float, values))):
                yield Finding(
                    WARN,
                    f"{record.instance_id} met {count} time(s) a peer with another cluster key",
                    "compare the fingerprints in both logs, and [cluster] key_file on both",
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

    async def quiet(_: Exception) -> None:
        """Keep the client from printing tracebacks. Errors that matter are raised."""

    # Without a limit the client tries the first connection 60 times, every two seconds.
    client = await nats.connect(
        split_urls(ref.nats_url),
        connect_timeout=2,
        allow_reconnect=False,
        max_reconnect_attempts=1,
        reconnect_time_wait=0.05,
        error_cb=quiet,
        **ref.security.nats.options(),
    )
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
