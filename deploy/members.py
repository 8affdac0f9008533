"""Asks a cluster: etcd for its members, workers and frontends for what they know. Read-only.

HTTP questions go to loopback or to addresses that the cluster itself published, never through a
proxy.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

from pullfill.config import ClusterRef, read_cluster_file
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.net import http_proof
from pullfill.options import Flag
from pullfill.registry.client import EtcdClient
from pullfill.registry.directory import live_workers
from pullfill.snapshot import Report, read_report
from pullfill.wire import WorkerRecord

T = TypeVar("T")

# Flags of several commands.
AsJson = Annotated[bool, Flag("Print JSON", name="--json")]
OneUrl = Annotated[
    str | None, Flag("Ask only the frontend at this URL", name="--url", metavar="URL")
]

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@asynccontextmanager
async def etcd_of(ref: ClusterRef, wait_s: float = 3.0) -> AsyncIterator[EtcdClient]:
    """Connect to the cluster's etcd. Raises RegistryUnavailable if it does not answer in time."""
    client = await EtcdClient.connect(ref.etcd_url, wait_s=wait_s, security=ref.security.etcd)
    try:
        yield client
    finally:
        await client.close()


def ask_etcd(
    ref: ClusterRef, question: Callable[[EtcdClient, str], Awaitable[T]], wait_s: float = 3.0
) -> T:
    """Return what `question` returns for etcd and the namespace. Raises RegistryUnavailable."""

    async def ask() -> T:
        async with etcd_of(ref, wait_s) as etcd:
            return await question(etcd, ref.namespace)

    return asyncio.run(ask())


async def workers(etcd: EtcdClient, namespace: str) -> list[WorkerRecord]:
    """Return the record of every worker and frontend, by role and id."""
    records = [record for record, _ in await live_workers(etcd, namespace)]
    return sorted(records, key=lambda record: (record.role, record.instance_id))


def http_get(
    url: str, timeout_s: float = 3.0, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Return the HTTP status and the body. Raises UnavailableError when nothing answers."""
    try:
        request = urllib.request.Request(url, headers=dict(headers or {}))
        with _opener.open(request, timeout=timeout_s) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read()
    except (OSError, HTTPException, ValueError) as exc:
        why = " ".join(str(getattr(exc, "reason", None) or exc).split())
        raise UnavailableError(f"{url}: {why}") from None


def ask_worker(record: WorkerRecord, query: str = "") -> Report | None:
    """Return a worker's report, its answer to `/status`. None: it gives none."""
    try:
        code, body = http_get(f"{record.http}/status{query}", 2.0)
    except UnavailableError:
        return None
    return read_report(body) if code == 200 else None


def ask_frontend(ref: ClusterRef, url: str, path: str) -> tuple[int, Any]:
    """Return the HTTP status, and the JSON that a frontend answers. None: it is not JSON.

    url: of the frontend. path: of the route, quoted.
    Raises UnavailableError when nothing answers."""
    where = url.rstrip("/") + path
    code, body = http_get(where, 5.0)
    # Whoever may write to etcd can announce a frontend. So none is shown a key.
    if code == 401 and (keys := ref.security.frontend.api_keys()):
        shown = http_proof.proof(keys[0].encode(), unquote(path), time.time())
        code, body = http_get(where, 5.0, {http_proof.HEADER: shown})
    try:
        return code, json.loads(body)
    except ValueError:
        return code, None


def why_not_ready(url: str, within_s: float = 0.0) -> list[str]:
    """Return why the frontend cannot serve. Empty: it can, within this time."""
    end = time.monotonic() + within_s
    while True:
        try:
            code, body = http_get(f"{url}/ready", 2.0)
            if code == 200 or time.monotonic() >= end:
                return [] if code == 200 else list(json.loads(body)["reasons"])
        except (UnavailableError, ValueError, KeyError) as exc:
            if time.monotonic() >= end:
                return [str(exc)]
        time.sleep(0.1)


def local_urls(ref: ClusterRef) -> dict[str, None]:
    """Return the URLs of frontends that the state directory names, if it is of this cluster."""
    with suppress(ConfigError):
        if ref.state_dir is not None:
            cluster = read_cluster_file(ref.state_dir)
            if (cluster.etcd_url, cluster.namespace) == (ref.etcd_url, ref.namespace):
                urls = (cluster.frontend_url, *(entry.url for entry in cluster.processes))
                return dict.fromkeys(filter(None, urls))
    return {}


def frontend_urls(ref: ClusterRef) -> Iterator[str]:
    """Yield the URLs of frontends: first those of the state directory, then those in etcd."""
    known = local_urls(ref)
    yield from known
    # etcd may be away. It is asked only when the caller has tried all of the first.
    with suppress(PullfillError):
        for record in ask_etcd(ref, workers, wait_s=1.0):
            if record.role == "frontend" and record.http not in known:
                yield record.http
