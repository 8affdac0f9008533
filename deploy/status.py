"""`pullfill status`: the workers and the job queue, as a frontend tells them, else as etcd does.

On the machine of `pullfill up` also which of its processes run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy import operate
from pullfill.deploy.members import (
    AsJson,
    OneUrl,
    ask_etcd,
    ask_frontend,
    ask_worker,
    frontend_urls,
    workers,
)
from pullfill.deploy.state import StateDir, full_disk, is_alive
from pullfill.deploy.view import plain
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.registry import suspect_records
from pullfill.snapshot import Cluster, WorkerRow, cluster_of
from pullfill.wire import ServerStatus

_IN_COLUMNS = ("kv_blocks", "kv_free_blocks", "running", "waiting", "jobs", "unclaimed")
_STATE_STYLES = {"ready": "green", "draining": "yellow", "lost": "red"}


def status(ref: ClusterRef, url: OneUrl = None, as_json: AsJson = False) -> int:
    """Print the cluster's state. Raises UnavailableError when nobody can tell it.

    url: of the only frontend to ask. It may be of another cluster than the state directory. None:
    ask all, then etcd."""
    told = _from(ref, url) if url else _from_frontends(ref)
    cluster = told or from_registry(ref)
    here: dict[str, Any] = {}
    with suppress(ConfigError):
        here = {} if url else processes(ref)
    if as_json:
        print(json.dumps(msgspec.to_builtins(cluster) | here))
        return 0
    console = Console()
    if models := {row.model for row in cluster.workers}:
        console.print(Text(f"model {', '.join(sorted(models))}"))
    console.print(workers_table(cluster.workers))
    for text in (*load_lines(cluster.workers), *state_lines(cluster)):
        console.print(text, highlight=False, soft_wrap=True)
    full = not url and ref.state_dir and full_disk(ref.state_dir)
    for line in [*process_lines(here), *filter(None, [full])]:
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if cluster.stock:
        console.print(stock_table(cluster.stock))
    if cluster.suspects:
        console.print(operate.suspects_table(cluster.suspects))
    if told is None:
        why = "no frontend answers" if next(frontend_urls(ref), None) else "there is no frontend"
        console.print(f"as etcd and the workers tell: {why}", style="yellow")
    return 0


def ask(ref: ClusterRef) -> Cluster:
    """Return what `GET /pullfill/status` tells. Raises UnavailableError if nobody can tell."""
    return _from_frontends(ref) or from_registry(ref)


def _from_frontends(ref: ClusterRef) -> Cluster | None:
    for url in frontend_urls(ref):
        with suppress(UnavailableError):
            return _from(ref, url)
    return None


def _from(ref: ClusterRef, url: str) -> Cluster:
    """Return what one frontend tells. Raises UnavailableError if it tells nothing."""
    code, body = ask_frontend(ref, url, "/pullfill/status")
    if code == 200 and isinstance(body, dict) and "workers" in body:
        with suppress(msgspec.ValidationError):
            return msgspec.convert(body, Cluster)
    then = "give the URL of a frontend"
    if code == 401:
        then = "name the --security file that has its key as [frontend] api_key_file"
    raise UnavailableError(f"{url.rstrip('/')}/pullfill/status answers {code}: {then}")


def from_registry(ref: ClusterRef) -> Cluster:
    """Return what etcd and the workers tell. Raises UnavailableError if etcd tells nothing."""
    try:
        records = [r for r in ask_etcd(ref, workers, wait_s=1.0) if r.role != "frontend"]
    except PullfillError as exc:
        raise UnavailableError(
            f"neither a frontend nor etcd answers ({exc}), so the members of the cluster are "
            "unknown: name its state directory with --state-dir, or try `pullfill doctor`"
        ) from exc
    reports = [(record, ask_worker(record)) for record in records]
    cluster = cluster_of(reports, ServerStatus(up=True, since_s=0.0))
    return msgspec.structs.replace(cluster, suspects=ask_etcd(ref, suspect_records.posted))


def workers_table(rows: Sequence[WorkerRow]) -> Table:
    """Return a table with a row for each worker. Instance ids are never shortened.

    Those of stock vLLM are long: where the terminal is narrow, the last columns are cut off."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(
        "instance", no_wrap=True, min_width=max((len(r.instance_id) for r in rows), default=0)
    )
    for column in ("role", "state"):
        longest = max((len(getattr(row, column)) for row in rows), default=0)
        table.add_column(column, no_wrap=True, min_width=longest)
    for column in ("KV", "running", "waiting"):
        table.add_column(column, justify="right", no_wrap=True, min_width=max(5, len(column)))
    table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=15)
    table.add_column("pid", justify="right", no_wrap=True)
    for row in rows:
        state = Text(row.state, style=_STATE_STYLES.get(row.state, ""))
        kv = "" if row.kv is None else f"{100 * row.kv:.0f} %"
        work = ("" if jobs is None else str(jobs) for jobs in (row.running, row.waiting))
        name, host = Text(plain(row.instance_id)), Text(plain(row.host))
        table.add_row(name, row.role, state, kv, *work, host, str(row.pid))
    if not rows:
        table.add_row("(no workers)")
    return table


def load_lines(rows: Sequence[WorkerRow]) -> Iterator[Text]:
    """Yield for each worker what else is not 0 in its load."""
    # The rows of both sides of a worker say the same.
    for row in {row.instance_id: row for row in rows}.values():
        more = [
            f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in [("restarts", row.restarts), *row.load.items()]
            if isinstance(value, int | float | str) and value and name not in _IN_COLUMNS
        ]
        if more:
            yield Text(f"{row.instance_id}: {' '.join(more)}")


def stock_table(rows: list[dict[str, Any]]) -> Group:
    """Return a table with a row for each stock vLLM server, then why some take no requests."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("stock server", overflow="fold")
    for column in ("role", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("running", "waiting"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        state = Text(row["state"], style=_STATE_STYLES.get(row["state"], "red"))
        work = (f"{row[name]:g}" if name in row else "" for name in ("running", "waiting"))
        table.add_row(Text(row["url"]), row["role"], state, *work)
    return Group(table, *(Text(f"{r['url']}: {r['why']}") for r in rows if r.get("why")))


def state_lines(cluster: Cluster) -> Iterator[Text]:
    """Yield lines about servers, the queue, and workers in trouble."""
    outages, etcd = cluster.outages(), cluster.servers.get("etcd")
    for outage in outages:
        yield Text(outage, style="bold red")
    if etcd is not None and not etcd.up:
        yield Text(f"the list of workers is {cluster.workers_age_s:.0f} s old", style="red")
    if cluster.servers and all(server.up for server in cluster.servers.values()):
        yield Text("NATS and etcd answer")
    queue = cluster.queue
    yield Text("queue: unknown" if queue is None else (
        f"queue: {queue.depth_jobs} jobs ({queue.depth_tokens} tokens), "
        f"{queue.in_flight} in flight, oldest {queue.oldest_age_s:.1f} s "
        f"(counted {queue.age_s:.1f} s ago)"
    ))  # fmt: skip
    troubles = [f"{row.instance_id}: {why}" for row in cluster.workers for why in row.troubles]
    for told in dict.fromkeys(troubles):
        yield Text(told, style="yellow")


def processes(ref: ClusterRef) -> dict[str, Any]:
    """Return `processes` and `supervisor` of `status --json`. {}: `up` has not started it here.

    Raises ConfigError if the record is damaged, or of another host."""
    if ref.state_dir is None:
        return {}
    state = StateDir(ref.state_dir)
    state.refuse_foreign()
    cluster = state.cluster()
    if cluster is None or cluster.etcd_url != ref.etcd_url:
        return {}
    rows = [
        {
            "name": entry.name,
            "role": entry.role,  # of its command line. `workers` has the role that it has now
            "instance_id": entry.instance_id,
            "pid": entry.pid,
            "alive": (alive := is_alive(entry)),
            "drained": not alive and state.leaves(entry),
            "restarts": entry.restarts,
            "gave_up": entry.gave_up or None,
        }
        for entry in cluster.processes
    ]
    up = cluster.supervisor
    supervisor = {"pid": up.pid, "alive": is_alive(up), "restart": cluster.restart}
    return {"processes": rows, "supervisor": supervisor}


def process_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines for people: what has ended, what was restarted, and whether restarts are on."""
    for row in found.get("processes", ()):
        if row["gave_up"]:
            yield f"{row['name']}: " + row["gave_up"].replace("\n", "\n    ")
        elif row["drained"]:
            again = "docs/operations.md, Restarts and upgrades"
            yield f"{row['name']} was drained. To start another: {again}"
        elif not row["alive"]:
            yield (
                f"{row['name']} (pid {row['pid']}) does not run, restarts: {row['restarts']}: see "
                f"`pullfill logs {row['name']}`"
            )
        elif row["restarts"]:
            yield f"{row['name']} (pid {row['pid']}) runs, restarts: {row['restarts']}"
    supervisor = found.get("supervisor", {"alive": True, "restart": True})
    if not supervisor["restart"]:
        yield "processes that die are not started again (--no-restart)"
    elif not supervisor["alive"]:
        yield (
            f"processes that die are not started again: the supervisor (pid {supervisor['pid']}) "
            "is gone. To have one, use `pullfill down`, then `pullfill up`"
        )
