"""HTTP requests of tests and benchmarks, by one client for all of them.

`httpx.get` makes a client for each request, and each client reads all certificates of the machine:
39 ms of CPU, where the request itself takes 3. A test that asks every 50 ms whether a worker is
ready would keep a core busy that the worker needs to start.
"""

from __future__ import annotations

from typing import Any

import httpx

_client = httpx.Client(
    verify=False,  # only servers of our own are asked
    trust_env=False,
    timeout=60.0,  # a busy machine may stop a process for as long as httpx waits by itself
    limits=httpx.Limits(max_keepalive_connections=0),  # these servers are killed and started again
)
get = _client.get
post = _client.post
request = _client.request


def ready(url: str) -> dict[str, Any]:
    """What /ready of a frontend says. Empty: it is not ready, or nobody answers."""
    try:
        answer = get(f"{url}/ready")
    except httpx.HTTPError:
        return {}
    body: dict[str, Any] = answer.json()
    return body if answer.status_code == 200 else {}
