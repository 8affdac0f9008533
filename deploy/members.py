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

from pullfill.config import ClusterRef
from pullfill.errors import UnavailableError
from pullfill.registry.client import EtcdClient
from pullfill.registry.orders import LiveWorker, live_workers
from pullfill.wire import WorkerState


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
        """Every readable worker record, by role and id. Raises RegistryUnavailable."""
        found = await live_workers(self.client, self._ref.namespace)
        return sorted(found, key=lambda worker: (worker.record.role, worker.record.instance_id))

    async def find(self, instance_id: str) -> LiveWorker | None:
        """The worker of that id, or None."""
        return next((w for w in await self.all() if w.record.instance_id == instance_id), None)

    async def ready_instances(self) -> set[str]:
        """Instance ids whose record says ready."""
        return {
            worker.record.instance_id
            for worker in await self.all()
            if worker.record.state is WorkerState.READY
        }


# --------------------------------------------------------------------------- HTTP

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def http_get(url: str, timeout_s: float = 3.0, key: str = "") -> tuple[int, bytes]:
    """Status and body; `key` is shown as bearer. Raises UnavailableError when nothing answers."""
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
    """Status and decoded JSON body (None if it is not JSON). Raises UnavailableError."""
    status, body = http_get(url, timeout_s, key)
    try:
        return status, json.loads(body)
    except ValueError:
        return status, None


def frontend_ready(url: str) -> bool:
    """Whether a frontend can serve now."""
    try:
        return http_get(f"{url}/ready", 2.0)[0] == 200
    except UnavailableError:
        return False
