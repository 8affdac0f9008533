"""`pullfill doctor`: checks this machine (machine.py) and the cluster; changes nothing.

Each check yields findings. Each finding is printed as one line, with advice below it. The exit code
is 1 if anything failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from pullfill import redact
from pullfill.config import ClusterRef
from pullfill.deploy import local_servers, machine, members, status
from pullfill.deploy.machine import FAIL, OK, WARN, Finding
from pullfill.deploy.state import full_disk
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.options import ClusterOptions
from pullfill.registry import self_checks
from pullfill.wire import SelfCheck, WorkerRecord

_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def run(options: ClusterOptions) -> int:
    """Print all findings. Return 1 if any failed."""
    console = Console()
    failed = False
    for finding in _findings(options):
        failed |= finding.level == FAIL
        line = Text(f"{finding.level:<5}", style=_STYLES[finding.level])
        console.print(line.append(finding.what, style="default"), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"       {finding.advice}", style="dim"), soft_wrap=True)
    return int(failed)


def _findings(options: ClusterOptions) -> Iterator[Finding]:
    for check in (
        machine.packages,
        machine.torch_add_ons,
        machine.server_binaries,
        machine.compute,
        machine.shared_memory,
        machine.transports,
    ):
        yield from check()
    try:
        ref = options.find_to_ask()
    except ConfigError as exc:
        yield Finding(WARN, "no cluster to look at", str(exc))
    else:
        yield from processes(ref)
        yield from cluster(ref)


def processes(ref: ClusterRef) -> Iterator[Finding]:
    """Tell which processes of `up` have ended, and whether it starts them again."""
    if ref.state_dir is not None and (full := full_disk(ref.state_dir)):
        yield Finding(FAIL, *full.rsplit(". ", 1))
    try:
        found = status.processes(ref)
    except ConfigError as exc:
        yield Finding(WARN, *str(exc).split(": ", 1))
        return
    for line in status.process_lines(found):
        yield Finding(WARN, line)


def cluster(ref: ClusterRef) -> Iterator[Finding]:
    """Check that the servers answer, the workers fit together, and no job is dead-lettered."""
    if no_nats := local_servers.nats_ready(ref.nats_url, 2.0):
        yield Finding(FAIL, no_nats, "start it, or give its address with --nats")
    else:
        yield Finding(OK, f"NATS answers at {redact.url(ref.nats_url)}")
    try:
        workers = members.ask_etcd(ref, members.workers, wait_s=2.0)
        results = members.ask_etcd(ref, self_checks.kept, wait_s=2.0).values()
    except PullfillError as exc:
        yield Finding(FAIL, *str(exc).split(": ", 1))
        return
    yield Finding(OK, f"etcd answers at {redact.url(ref.etcd_url)}")
    yield from fit(workers, by_stock=_served_by_stock(ref))
    yield from compared(list(results))
    if key := ref.security.cluster.load():
        yield Finding(OK, f"cluster key {key.fingerprint}")
    if not any(w.role == "frontend" for w in workers) and not members.local_urls(ref):
        yield Finding(
            WARN, "no frontend", "start one: pullfill frontend, unless all decode in stock vLLM"
        )
    if no_nats is None:
        yield from dead_letters(ref)


def _served_by_stock(ref: ClusterRef) -> bool:
    """Whether stock vLLM servers decode, as a frontend tells."""
    with suppress(UnavailableError):
        rows = status.ask(ref).stock or ()
        return any(row["role"] == "decode" and row["state"] == "ready" for row in rows)
    return False


def fit(workers: Sequence[WorkerRecord], *, by_stock: bool = False) -> Iterator[Finding]:
    """Check that there are decode and prefill workers, and that they can exchange KV.

    by_stock: stock vLLM servers decode, so there need be no workers."""
    decode = [worker for worker in workers if worker.role == "decode"]
    prefill = [worker for worker in workers if worker.role == "prefill"]
    if decode:
        yield Finding(OK, f"{len(decode)} decode worker(s) registered")
    elif not by_stock:
        yield Finding(FAIL, "no decode worker: nothing can be served", "pullfill decode")
    if prefill:
        yield Finding(OK, f"{len(prefill)} prefill worker(s) registered")
    elif decode or not by_stock:
        yield Finding(
            WARN, "no prefill worker: every prompt is prefilled locally", "pullfill prefill"
        )
    peers = [(w.instance_id, w.compat) for w in (*decode, *prefill) if w.compat is not None]
    for name, compat in peers[1:]:
        first, first_compat = peers[0]
        for what, ours, theirs in first_compat.differs_from(compat)[:1]:
            yield Finding(
                FAIL,
                f"{first} and {name} cannot exchange KV: {what} is {ours!r} and {theirs!r}",
                f"start them with the same {what}, or in different namespaces",
            )


def compared(results: Sequence[SelfCheck]) -> Iterator[Finding]:
    """Tell which self-checks have failed. If none has, say how many pairs have passed."""
    failed = [result for result in results if not result.passed]
    for result in failed:
        what, _, advice = result.advice().partition(". ")
        yield Finding(FAIL, what, advice)
    if results and not failed:
        yield Finding(OK, f"self-check passed for {len(results)} kind(s) of worker pairs")


def dead_letters(ref: ClusterRef) -> Iterator[Finding]:
    """Count the jobs that nobody may try again."""
    try:
        found = asyncio.run(ask_nats(ref))
    except PullfillError as exc:
        yield Finding(WARN, f"dead letters cannot be counted: {exc}", "see NATS above")
        return
    for stream, count in found.items():
        if count:
            yield Finding(
                WARN,
                f"{count} dead letter(s) in stream {stream}: their requests were served locally",
                f"`nats stream view {stream}` says why; the oldest go by themselves",
            )
    if not any(found.values()):
        yield Finding(OK, "no dead letters")


async def ask_nats(ref: ClusterRef) -> dict[str, int]:
    """Return the number of dead letters by stream. Raises ConfigError, QueueUnavailable."""
    # It brings the client of NATS, for which other commands need not wait.
    from pullfill.queue.nats_connection import NatsConnection

    connection = NatsConnection(ref.nats_url, "doctor", ref.security.nats.options())
    await connection.start(2.0)
    try:
        found = await connection.api("STREAM.LIST", {"subject": f"pullfill.{ref.namespace}.*.dead"})
    finally:
        await connection.close()
    return {one["config"]["name"]: one["state"]["messages"] for one in found["streams"]}
