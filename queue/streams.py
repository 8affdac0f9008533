"""The streams and the consumer of one queue: made by whoever comes first, checked by everyone.

Creating is idempotent, so each connection does it; a server that came back empty is repaired by
the first worker that reconnects. Limits (max_jobs, ack_wait, …) of an existing queue are updated
to ours: the last worker to connect sets them. What cannot change (storage, retention) must match.
"""

from __future__ import annotations

from typing import Any

from pullfill import log
from pullfill.errors import ConfigError
from pullfill.queue.connection import ApiError, Link
from pullfill.queue.contract import QueueConfig
from pullfill.queue.names import CONSUMER, Names

logger = log.get("queue")

DUPLICATE_WINDOW_S = 120.0
DEAD_MAX = 1000
DEAD_MAX_BYTES = 256 << 20
DEAD_MAX_AGE_S = 7 * 86400.0

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
FULL = frozenset({10077, 10047, 10023, 10028, 10002})
"""max_msgs reached (discard new), and the server out of storage or over an account limit."""
_EXISTS_DIFFERENTLY = 10058


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def job_stream(names: Names, config: QueueConfig) -> dict[str, Any]:
    """Work-queue retention, file storage, refuse new jobs when full."""
    return {
        "name": names.stream,
        "description": "pullfill prefill jobs",
        "subjects": [names.jobs, names.void],
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "max_msgs": config.max_jobs,
        "max_bytes": -1,
        "max_age": _ns(config.max_age_s),
        "max_consumers": -1,
        "max_msg_size": -1,
        "num_replicas": config.replicas,
        "duplicate_window": _ns(min(DUPLICATE_WINDOW_S, config.max_age_s)),
    }


def dead_stream(names: Names, config: QueueConfig) -> dict[str, Any]:
    """The last dead letters, for people; bounded in number, bytes and age."""
    return {
        "name": names.dead_stream,
        "description": "pullfill jobs that nobody may try again",
        "subjects": [names.dead],
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_msgs": DEAD_MAX,
        "max_bytes": DEAD_MAX_BYTES,
        "max_age": _ns(DEAD_MAX_AGE_S),
        "max_consumers": -1,
        "max_msg_size": -1,
        "num_replicas": config.replicas,
        "duplicate_window": _ns(DUPLICATE_WINDOW_S),
    }


def consumer(names: Names, config: QueueConfig) -> dict[str, Any]:
    """One durable pull consumer for all prefill workers."""
    return {
        "stream_name": names.stream,
        "config": {
            "durable_name": CONSUMER,
            "name": CONSUMER,
            "description": "all prefill workers",
            "filter_subject": names.jobs,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": _ns(config.ack_wait_s),
            "max_deliver": config.max_deliver,
            "max_ack_pending": config.max_in_flight,
            "max_waiting": 2048,
            "replay_policy": "instant",
        },
    }


async def ensure(link: Link, names: Names, config: QueueConfig) -> str:
    """Make or check streams and consumer. Raises ConfigError, QueueUnavailable.

    Returns the job stream's identity: the time of its creation as the server writes it. It is only
    compared for equality. After the server lost its data it is another one.
    """
    info = await _ensure_stream(link, job_stream(names, config))
    await _ensure_stream(link, dead_stream(names, config))
    create = f"CONSUMER.CREATE.{names.stream}.{CONSUMER}.{names.jobs}"
    try:
        await link.api(create, consumer(names, config))
    except ApiError as exc:
        if exc.code == 503 or exc.err_code == STREAM_NOT_FOUND:
            raise
        raise ConfigError(
            f"the NATS consumer {CONSUMER} of stream {names.stream} cannot be used: "
            f"{exc.description}. Delete it (`nats consumer rm {names.stream} {CONSUMER}`) and "
            "start again"
        ) from exc
    return str(info["created"])


async def _ensure_stream(link: Link, wanted: dict[str, Any]) -> dict[str, Any]:
    name = wanted["name"]
    try:
        return await link.api(f"STREAM.CREATE.{name}", wanted)
    except ApiError as exc:
        if exc.err_code != _EXISTS_DIFFERENTLY:
            raise
    try:
        answer = await link.api(f"STREAM.UPDATE.{name}", wanted)
    except ApiError as exc:
        if exc.code == 503:
            raise
        raise ConfigError(
            f"NATS stream {name} exists with settings that cannot be changed "
            f"({exc.description}). Use another --namespace, or delete it (`nats stream rm {name}`)"
        ) from exc
    logger.info("updated the limits of NATS stream %s", name)
    return answer
