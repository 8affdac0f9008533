"""Who is in the cluster, as etcd and the frontends tell it. Read-only.

Lifecycle: `async with Members(ref)` holds one etcd client. HTTP questions go to loopback or to
addresses the cluster itself published, never through a proxy.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any, Self

from pullfill.cluster_status import Report, read_report
from pullfill.config import ClusterRef
from pullfill.errors import UnavailableError
from pullfill.registry.client import EtcdClient
from pullfill.registry.orders import LiveWorker, live_workers
from pullfill.wire import WorkerRecord, WorkerState


class Members:
    """The worker keys of one namespace."""

    def __init__(self, ref: ClusterRef, wait_s: float = 3.0) -> None:
        self._ref = ref
        self._wait_s = wait_s
        self._client: EtcdClient | None = None

    async def __aenter__(self) -> Self:
        self._client = await EtcdClient.connect(
            self._ref.etcd_url, wait_s=self._wait_s, security=self._ref.security.etcd
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def client(self) -> EtcdClient:
        assert self._client is not None, "use as a context manager"
        return self._client

    async def all(self) -> list[LiveWorker]:
        """Return the record of every worker, sorted by role and id. Raises RegistryUnavailable."""
        found = await live_workers(self.client, self._ref.namespace)
        return sorted(found, key=lambda worker: (worker.record.role, worker.record.instance_id))

    async def find(self, instance_id: str) -> LiveWorker | None:
        """Return the worker with that id. None: there is none."""
        return next((w for w in await self.all() if w.record.instance_id == instance_id), None)

    async def ready_instances(self) -> set[str]:
        """Return the ids of the workers that are ready."""
        return {
            worker.record.instance_id
            for worker in await self.all()
            if worker.record.state is WorkerState.READY
        }


# --------------------------------------------------------------------------- HTTP

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def http_get(url: str, timeout_s: float = 3.0, key: str = "") -> tuple[int, bytes]:
    """Return the HTTP status and the body. Raises UnavailableError when nothing answers.

    key: the API key to send. Empty: none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with _opener.open(request, timeout=timeout_s) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read()
    except (OSError, ValueError) as exc:
        raise UnavailableError(f"{url}: {getattr(exc, 'reason', None) or exc}") from None


def http_json(url: str, timeout_s: float = 3.0, key: str = "") -> tuple[int, Any]:
    """As `http_get`, with the body decoded. None: it is not JSON."""
    status, body = http_get(url, timeout_s, key)
    try:
        return status, json.loads(body)
    except ValueError:
        return status, None


def ask_worker(record: WorkerRecord) -> Report | None:
    """Return a worker's report, its answer to `/status`. None: it gives none."""
    try:
        code, body = http_get(f"{record.http}/status", 2.0)
    except UnavailableError:
        return None
    return read_report(body) if code == 200 else None


def frontend_ready(url: str) -> bool:
    """Return whether the frontend can serve now."""
    try:
        return http_get(f"{url}/ready", 2.0)[0] == 200
    except UnavailableError:
        return False
