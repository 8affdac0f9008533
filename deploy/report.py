"""`pullfill status` and `pullfill explain`: what the frontends know, for people and as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pullfill import cluster_status
from pullfill.config import ClusterRef, read_cluster_file
from pullfill.deploy import local, suspects
from pullfill.deploy.members import Members, ask_worker, http_json
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.registry.orders import LiveWorker
from pullfill.runtime.health import outage_of
from pullfill.wire import Expected, ExplainRecord, ServerStatus

_STATE_STYLES = {"ready": "green", "draining": "yellow", "lost": "red"}
_BAR = 40
_CERTIFICATE = (
    "name your own authority with SSL_CERT_FILE=ca.pem, and start the frontend with --advertise "
    "https://NAME, a name that its certificate has"
)


def frontend_urls(ref: ClusterRef) -> Iterator[str]:
    """Yield the URLs of frontends: first those of the state directory, then those in etcd.

    etcd is asked only when the caller has tried all of the first."""
    urls: list[str] = []
    if ref.state_dir is not None:
        try:
            cluster = read_cluster_file(ref.state_dir)
            urls += [cluster.frontend_url, *(entry.url for entry in cluster.processes)]
        except ConfigError:
            pass
    told = dict.fromkeys(filter(None, urls))
    yield from told
    try:
        workers = asyncio.run(_workers(ref))
    except PullfillError:
        return
    for worker in workers:
        if worker.record.role == "frontend" and worker.record.http not in told:
            yield worker.record.http


def _ask_frontend(ref: ClusterRef, url: str) -> tuple[int, Any]:
    """Return the HTTP status and the JSON that a frontend answers."""
    # Whoever may write to etcd can announce a frontend. So the API key goes only to one that asks
    # for it. The administrator's key never goes out: none of these routes needs it.
    code, body = http_json(url, 5.0)
    keys = ref.security.frontend.api_keys()
    return http_json(url, 5.0, keys[0]) if code == 401 and keys else (code, body)


async def _workers(ref: ClusterRef) -> list[LiveWorker]:
    async with Members(ref, wait_s=1.0) as members:
        return await members.all()


# --------------------------------------------------------------------------- status


def status(ref: ClusterRef, as_json: bool) -> int:
    """Print the cluster's state. Raises UnavailableError when nobody can tell it."""
    state = _from_frontends(ref)
    source = "frontend"
    if state is None:
        state, source = _from_registry(ref), "etcd (no frontend answers)"
        state["suspects"] = suspects.posted(ref)
    here = local.processes(ref)
    if as_json:
        print(json.dumps(state | here))
        return 0
    console = Console()
    console.print(_workers_table(state["workers"]))
    for text in _state_lines(state):
        console.print(text, highlight=False, soft_wrap=True)
    for line in local.lines(here):
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if rows := state.get("suspects"):
        console.print(suspects.table(rows))
    if source != "frontend":
        console.print(f"as told by {source}", style="yellow")
    return 0


def _from_frontends(ref: ClusterRef) -> dict[str, Any] | None:
    for url in frontend_urls(ref):
        try:
            code, body = _ask_frontend(ref, f"{url}/pullfill/status")
        except UnavailableError:
            continue
        if code == 200 and isinstance(body, dict) and "workers" in body:
            return body
    return None


def _from_registry(ref: ClusterRef) -> dict[str, Any]:
    try:
        workers = asyncio.run(_workers(ref))
    except PullfillError as exc:
        raise UnavailableError(
            f"neither a frontend nor etcd answers ({exc}), so the members of the cluster are "
            "unknown: name its state directory with --state-dir, or try `pullfill doctor`"
        ) from exc
    records = [worker.record for worker in workers if worker.record.role != "frontend"]
    reports = [(record, ask_worker(record)) for record in records]
    return cluster_status.status_of(reports, ServerStatus(up=True, since_s=0.0), 0.0)


def _workers_table(rows: list[dict[str, Any]]) -> Group:
    """Return a table with a row for each worker, and a line with its load below the row."""
    table, loads = Table(box=None, padding=(0, 2, 0, 0)), list[Text]()
    for column in ("instance", "role", "state", "model", "host", "pid", "restarts"):
        table.add_column(column)
    for row in rows:
        load = row.get("load") or {}
        table.add_row(
            row["instance_id"],
            row["role"],
            Text(row["state"], style=_STATE_STYLES.get(row["state"], "")),
            row["model"],
            row["host"],
            str(row["pid"]),
            str(row.get("restarts", 0)),
        )
        numbers = [f"{k}={_short(v)}" for k, v in load.items() if isinstance(v, int | float | str)]
        if numbers:
            loads.append(Text(f"{row['instance_id']}: {' '.join(numbers)}"))
    if not rows:
        table.add_row("(no workers)")
    return Group(table, *loads)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _state_lines(state: dict[str, Any]) -> Iterator[Text]:
    """Yield lines about servers, the queue, and workers in trouble."""
    servers = {
        name: msgspec.convert(server, ServerStatus)
        for name, server in state.get("servers", {}).items()
    }
    for name, server in servers.items():
        if not server.up:
            yield Text(outage_of(name, server), style="bold red")
    etcd = servers.get("etcd")
    if etcd is not None and not etcd.up:
        age = state.get("workers_age_s", 0.0)
        yield Text(f"the list of workers is {age:.0f} s old", style="red")
    if servers and all(server.up for server in servers.values()):
        yield Text("NATS and etcd answer")
    yield Text(_queue_line(state.get("queue")))
    for row in state["workers"]:
        for trouble in row.get("troubles", ()):
            yield Text(f"{row['instance_id']}: {trouble}", style="yellow")


def _queue_line(queue: dict[str, Any] | None) -> str:
    if not queue:
        return "queue: unknown"
    return (
        f"queue: {queue['depth_jobs']} jobs ({queue['depth_tokens']} tokens), "
        f"{queue['in_flight']} in flight, oldest {queue['oldest_age_s']:.1f} s "
        f"(counted {queue['age_s']:.1f} s ago)"
    )


# --------------------------------------------------------------------------- explain


def explain(ref: ClusterRef, request_id: str, as_json: bool) -> int:
    """Print how a request was served. Raises ConfigError when no frontend knows it,
    UnavailableError when none answers."""
    answered = 0
    why_not: list[str] = []
    for url in frontend_urls(ref):
        try:
            where = f"{url}/pullfill/requests/{quote(request_id, safe='')}"
            code, body = _ask_frontend(ref, where)
        except UnavailableError as exc:
            why_not.append(str(exc))
            continue
        if code == 401:
            raise ConfigError(
                f"the frontend at {url} wants an API key: name the --security file that has it as "
                "[frontend] api_key_file"
            )
        answered += 1
        if code == 200 and body is not None:
            if as_json:
                print(json.dumps(body))
            else:
                record = msgspec.convert(body, type=ExplainRecord)
                Console().print(trace(record), soft_wrap=True, highlight=False)
            return 0
    if not answered:
        raise UnavailableError(
            f"no frontend answers ({'; '.join(why_not) or 'none is known'}): "
            + (_CERTIFICATE if "CERTIFICATE" in "".join(why_not) else "try `pullfill doctor`")
        )
    raise ConfigError(
        f"no frontend knows request {request_id!r}: use the `id` of a finished response; only the "
        "latest are kept, and not across a restart of the frontend"
    )


def trace(record: ExplainRecord) -> Group:
    """Return what happened to one request in words, and a bar for each stage."""
    lines: list[Text | Table] = [
        Text(f"request {record.request_id}", style="bold"),
        Text(f"  {_what_happened(record)}"),
        Text(
            f"  prompt: {record.prompt_tokens} tokens = {record.prefix_hit_tokens} cached"
            f" + {record.remote_tokens} prefilled remotely"
            f" + {_local_tokens(record)} locally"
        ),
        Text(f"  decode worker: {record.decode_instance}"),
    ]
    if record.expected_s is not None:
        lines.append(Text(f"  expected: {_expected(record.expected_s)}"))
    if record.outage:
        lines.append(Text(f"  at that time: {record.outage}", style="red"))
    if record.migrated_from:
        out = f", from {record.migrated_tokens} tokens on" if record.migrated_tokens else ""
        lines.append(Text(f"  continued after: {', '.join(record.migrated_from)}{out}"))
    if record.prefill_instance:
        plural = "" if record.attempts == 1 else "s"
        lines.append(
            Text(f"  prefill worker: {record.prefill_instance} ({record.attempts} attempt{plural})")
        )
    if record.kv_bytes:
        over = f" over {record.transport}" if record.transport else ""
        lines.append(Text(f"  KV written into decode memory: {_size(record.kv_bytes)}{over}"))
        lines += [Text(f"    not over {reason}", style="dim") for reason in record.why_not_better]
    lines.append(_bars(record))
    return Group(*lines)


def _local_tokens(record: ExplainRecord) -> int:
    return max(0, record.prompt_tokens - record.prefix_hit_tokens - record.remote_tokens)


def _what_happened(record: ExplainRecord) -> str:
    if record.path == "remote":
        return f"prefilled by a prefill worker (reason: {record.reason})"
    if record.fallback:
        return f"sent to be prefilled remotely, then done locally: {record.fallback}"
    return f"prefilled by the decode worker itself (reason: {record.reason})"


def _expected(told: Expected) -> str:
    """Return the expected times in words."""
    parts = (
        ("in the queue", told.queue),
        ("to compute", told.prefill),
        ("to write the KV", told.kv_write),
    )
    said = [f"{s:.2f} s {what}" if s is not None else f"not known {what}" for what, s in parts]
    return f"{', '.join(said)}; time limit {told.timeout:.0f} s"


def _bars(record: ExplainRecord) -> Table:
    timings = record.timings_ms
    stages = {name: getattr(timings, name) for name in timings.__struct_fields__}
    known = {name: ms for name, ms in stages.items() if ms is not None}
    longest = max(known.values(), default=0.0) or 1.0
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, ms in known.items():
        style = "bold" if name == "first_token" else "cyan"
        bar = Text("█" * max(1, round(_BAR * ms / longest)) if ms > 0 else "", style=style)
        table.add_row(f"  {name}", f"{ms:.1f} ms", bar)
    return table


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "bytes" else f"{nbytes} bytes"
        value /= 1024
    return f"{value:.2f} GiB"
