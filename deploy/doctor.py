"""`pullfill doctor`: checks this machine (machine.py) and the cluster; changes nothing.

Each check yields findings. Each finding is printed as one line, with advice below it. The exit code
is 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from pullfill import redact
from pullfill.config import ClusterRef, split_urls
from pullfill.deploy import local_servers, machine, members
from pullfill.deploy.machine import FAIL, OK, WARN, Finding
from pullfill.deploy.state import StateDir, full_disk, identity, is_alive
from pullfill.deploy.status import start_another
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.options import ClusterOptions
from pullfill.registry import self_checks
from pullfill.wire import WorkerRecord

_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
_PAIRS = 32
"""Print at most this many pairs of workers."""


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
        machine.python,
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
        yield from machine.default_port()
        yield Finding(WARN, "no cluster to look at", str(exc))
    else:
        yield from processes(ref)
        yield from cluster(ref)


# --------------------------------------------------------------------------- its processes


def processes(ref: ClusterRef) -> Iterator[Finding]:
    """Check that everything recorded in cluster.json still runs."""
    if ref.state_dir is None:
        return
    try:
        state = StateDir(ref.state_dir)
        recorded = state.cluster()
    except ConfigError as exc:
        yield Finding(FAIL, str(exc), "pullfill down, then pullfill up")
        return
    if full := full_disk(ref.state_dir):
        yield Finding(FAIL, *full.rsplit(". ", 1))
    try:
        StateDir(ref.state_dir).refuse_foreign()
    except ConfigError as exc:
        yield Finding(WARN, *str(exc).split(": ", 1))
        return
    if recorded is None:
        return
    for entry in recorded.processes:
        if is_alive(identity(entry)):
            yield Finding(OK, f"{entry.name} runs (pid {entry.pid})")
        elif state.leaves(entry):
            another = start_another(state, recorded, entry)
            yield Finding(OK, f"{entry.name} was drained", f"to start another: {another}")
        else:
            level = FAIL if entry.role in ("nats", "etcd") else WARN
            yield Finding(level, f"{entry.name} (pid {entry.pid}) is gone", f"its log: {entry.log}")


# --------------------------------------------------------------------------- the cluster


@dataclass(frozen=True, slots=True)
class Seen:
    """What the checks of a cluster look at.

    no_nats: why NATS does not answer. None: it does.
    statuses: what each frontend answers to /pullfill/status, by its id."""

    ref: ClusterRef
    workers: Sequence[WorkerRecord] = ()
    no_nats: str | None = None
    statuses: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, role: str) -> list[WorkerRecord]:
        return [worker for worker in self.workers if worker.role == role]

    @property
    def stock(self) -> list[dict[str, Any]]:
        """What frontends say of stock vLLM servers, a row for each."""
        rows = [row for told in self.statuses.values() for row in told.get("stock", ())]
        return list({(row["role"], row["url"]): row for row in rows}.values())


def cluster(ref: ClusterRef) -> Iterator[Finding]:
    """Check that the servers answer, the workers fit together, and no job is dead-lettered."""
    no_nats = local_servers.nats_ready(ref.nats_url, 2.0)
    no_etcd = local_servers.etcd_ready(ref.etcd_url, 2.0, ref.security.etcd.tls())
    for name, url, why in (("NATS", ref.nats_url, no_nats), ("etcd", ref.etcd_url, no_etcd)):
        if why is None:
            yield Finding(OK, f"{name} answers at {redact.url(url)}")
        else:
            yield Finding(FAIL, why, "start it, or give its address with --nats / --etcd")
    try:
        workers = members.ask_etcd(ref, members.workers, wait_s=2.0)
    except PullfillError as exc:
        yield Finding(FAIL, f"the registry cannot be read: {exc}", "see etcd above")
        return
    seen = Seen(ref, workers, no_nats, statuses(ref, workers))
    for check in (fit, stock, lengths, pairs, prefixes, compared, keys, frontends, jobs):
        yield from check(seen)


def statuses(ref: ClusterRef, workers: Iterable[WorkerRecord]) -> dict[str, dict[str, Any]]:
    """Return what each frontend answers to /pullfill/status, by its id."""
    found = {}
    for frontend in (w for w in workers if w.role == "frontend" and w.http):
        with suppress(UnavailableError):
            _, status = members.ask_frontend(ref, frontend.http, "/pullfill/status")
            if isinstance(status, dict):
                found[frontend.instance_id] = status
    return found


def _serves(row: dict[str, Any]) -> bool:
    return bool(row["state"] == "ready")


def stock(seen: Seen) -> Iterator[Finding]:
    """Tell which stock vLLM servers take requests, and why others do not."""
    for role in ("prefill", "decode"):
        if count := sum(row["role"] == role and _serves(row) for row in seen.stock):
            yield Finding(OK, f"{count} stock {role} server(s) ready")
    for row in seen.stock:
        who = f"stock {row['role']} server {row['url']} is {row['state']}"
        if row["state"] == "refused":
            what, _, advice = str(row["why"]).rpartition(": ")
            yield Finding(WARN, f"{who}: {what}", advice)
        elif not _serves(row):
            yield Finding(WARN, f"{who}: {row['why']}", "look whether it runs, and at its log")


def fit(seen: Seen) -> Iterator[Finding]:
    """Check that there are decode and prefill workers, and that they can exchange KV.

    Where stock vLLM servers decode, there need be no workers."""
    by_stock = any(row["role"] == "decode" and _serves(row) for row in seen.stock)
    decode, prefill = seen.of("decode"), seen.of("prefill")
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


def lengths(seen: Seen) -> Iterator[Finding]:
    """Tell which prefill workers take shorter prompts than some decode worker."""
    longest = max((w.max_model_len for w in seen.of("decode")), default=0)
    for worker in seen.of("prefill"):
        if 0 < worker.max_model_len < longest:
            yield Finding(
                WARN,
                f"{worker.instance_id} takes prompts of up to {worker.max_model_len} tokens, and "
                f"decode workers take up to {longest}",
                "longer ones go to other prefill workers or stay local: --max-model-len",
            )


def pairs(seen: Seen) -> Iterator[Finding]:
    """Tell for each pair of workers which transport it uses, and why no better one."""
    shown = 0
    for writer in seen.of("prefill"):
        if not writer.http or (report := members.ask_worker(writer)) is None:
            continue
        for reader in seen.of("decode"):
            shown += 1
            if shown > _PAIRS:
                yield Finding(OK, "... and more pairs of workers")
                return
            route = report.routes.get(reader.instance_id)
            names = writer.instance_id, reader.instance_id
            if route is None:
                yield Finding(OK, "{} has written nothing to {} yet".format(*names))
                continue
            why = "; ".join(f"not {reason}" for reason in route.get("why_not_better", ()))
            what = "{} writes to {} over {}".format(*names, route.get("transport"))
            yield Finding(OK, what, why)


def prefixes(seen: Seen) -> Iterator[Finding]:
    """Tell which frontends do not know the cached blocks of which decode workers."""
    known = set[str]()
    for frontend, status in seen.statuses.items():
        for row in status.get("workers", ()):
            prefix = row.get("routing", {}).get("prefix", {})
            if prefix.get("state") == "warm":
                known.add(row["instance_id"])
            if trouble := prefix.get("trouble"):
                what = f"{frontend} does not know what {row['instance_id']} has cached"
                yield Finding(WARN, what, trouble)
    if known:
        yield Finding(OK, f"frontends know the cached blocks of {len(known)} decode worker(s)")


def compared(seen: Seen) -> Iterator[Finding]:
    """Tell which self-checks have failed. If none has, say how many pairs have passed."""
    try:
        results = members.ask_etcd(seen.ref, self_checks.kept, wait_s=2.0).values()
    except PullfillError as exc:
        yield Finding(WARN, f"self-checks cannot be read: {exc}", "see etcd above")
        return
    failed = [result for result in results if not result.passed]
    for result in failed:
        what, _, advice = result.advice().partition(". ")
        yield Finding(FAIL, what, advice)
    if results and not failed:
        yield Finding(OK, f"self-check passed for {len(results)} kind(s) of worker pairs")


def keys(seen: Seen) -> Iterator[Finding]:
    """Tell the cluster key, and which workers have refused somebody with another."""
    key = seen.ref.security.cluster.load()
    if key is not None:
        yield Finding(OK, f"cluster key {key.fingerprint}")
    for worker in (w for w in seen.workers if w.http and w.role != "frontend"):
        with suppress(UnavailableError):
            text = members.http_get(f"{worker.http}/metrics", 2.0)[1].decode("utf-8", "replace")
            values = re.findall(r"^pullfill_auth_refused_total\{.*\} ([0-9.e+]+)$", text, re.M)
            if count := int(sum(map(float, values))):
                yield Finding(
                    WARN,
                    f"{worker.instance_id} met {count} time(s) a peer with another cluster key",
                    "compare the fingerprints in both logs, and [cluster] key_file on both",
                )


def frontends(seen: Seen) -> Iterator[Finding]:
    """Check that clients can ask somebody."""
    if not seen.of("frontend") and not members.local_urls(seen.ref):
        yield Finding(WARN, "no frontend", "start one: pullfill frontend")


def jobs(seen: Seen) -> Iterator[Finding]:
    """Check that NATS takes the jobs of long prompts. Count the jobs that nobody may try again."""
    if seen.no_nats is not None:
        return
    try:
        max_payload, found = asyncio.run(ask_nats(seen.ref))
    except Exception as exc:
        yield Finding(WARN, f"dead letters cannot be counted: {exc}", "see NATS above")
        return
    yield from payload(max_payload, seen)
    for stream, count in found.items():
        if count:
            yield Finding(
                WARN,
                f"{count} dead letter(s) in stream {stream}: their requests were served locally",
                f"`nats stream view {stream}` says why; the oldest go by themselves",
            )
    if not any(found.values()):
        yield Finding(OK, "no dead letters")


def payload(max_payload: int, seen: Seen) -> Iterator[Finding]:
    """Check that a job of the longest prompt is no larger than NATS takes."""
    from pullfill.queue.nats_connection import RAISE_PAYLOAD

    longest = max((w.max_model_len for w in seen.of("decode")), default=0)
    # 4 bytes for each token and for each block (of 16 tokens, as a rule), 12 KiB for the rest.
    most = (max_payload - (12 << 10)) * 4 // 17
    if most < longest:
        yield Finding(
            WARN,
            f"NATS takes messages of {max_payload} bytes: prompts of more than about {most} tokens "
            f"stay local (job_too_large), and decode workers take up to {longest}",
            RAISE_PAYLOAD,
        )


async def ask_nats(ref: ClusterRef) -> tuple[int, dict[str, int]]:
    """Return max_payload, and the number of dead letters by stream.

    Raises what the client of NATS raises."""
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
        max_payload = client.max_payload
        streams = await client.jetstream(timeout=2).streams_info()
    finally:
        await client.close()
    ours = re.compile(rf"PULLFILL-{re.escape(ref.namespace)}-.*-dead")
    counts = {str(stream.config.name): stream.state.messages for stream in streams}
    return max_payload, {name: count for name, count in counts.items() if ours.fullmatch(name)}
