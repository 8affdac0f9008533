"""The streams and consumers of one job queue on NATS: their names, and who makes and checks them.

    stream            PULLFILL-{namespace}-{compat_hash}
    job subject       pullfill.{namespace}.{compat_hash}.job.{urgency}.{tokens, rounded up}
    dead stream       {stream}-dead, subject pullfill.{namespace}.{compat_hash}.dead
    consumers         prefill-{urgency} (durable, shared by all prefill workers)

What is missing is made over each new connection. Of an existing stream or consumer only the fields
that `queue.*` sets are changed, so an operator's changes with NATS's own tools last. Storage and
retention cannot be changed, and must match.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pullfill.errors import BadMessage, ConfigError, QueueUnavailable
from pullfill.queue.contract import Urgency
from pullfill.queue.nats_connection import ApiError, NatsConnection
from pullfill.runtime import log
from pullfill.runtime.lifecycle import end
from pullfill.wire import QueueSettings

logger = log.get("queue")

MSG_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
JOB_ID = "Pullfill-Job"
REASON = "Pullfill-Reason"
DELIVERIES = "Pullfill-Deliveries"


def round_up_tokens(tokens: int) -> int:
    """The next number with at most 5 significant bits: exact to 31, then at most 1/16 above."""
    # This bounds the number of subjects: 464 up to 2**32 tokens.
    shift = max(0, tokens.bit_length() - 5)
    return -(-tokens >> shift) << shift


class Names:
    """All names of one queue. compat_hash: the compatibility hash, which covers the model.

    root: the common part of its subjects. all_jobs: wildcard over the subjects of jobs."""

    def __init__(self, namespace: str, compat_hash: str) -> None:
        root = f"pullfill.{namespace}.{compat_hash}"
        self.stream = f"PULLFILL-{namespace}-{compat_hash}"
        self.dead_stream = f"{self.stream}-dead"
        self.root = root
        self.all_jobs = f"{root}.job.*.*"
        self.dead = f"{root}.dead"

    def job(self, tokens: int, urgency: Urgency = Urgency.NORMAL) -> str:
        """Subject of a job with so many tokens."""
        # The token count is the last subject token because the server then counts jobs per token
        # count for us. One STREAM.INFO tells the depth in tokens, right after any restart and with
        # any number of publishers.
        return f"{self.root}.job.{urgency}.{round_up_tokens(max(0, tokens))}"

    def jobs_of(self, urgency: Urgency) -> str:
        """Wildcard over the subjects of jobs of this urgency."""
        return f"{self.root}.job.{urgency}.*"


def consumer_of(urgency: Urgency) -> str:
    """Name of the consumer of the jobs of this urgency."""
    return f"prefill-{urgency}"


_URGENCY_OF = {consumer_of(urgency): urgency for urgency in Urgency}


@dataclass(frozen=True, slots=True)
class AckInfo:
    """The fields of a delivery's ack subject, which the server wrote."""

    stream: str
    urgency: Urgency
    number: int
    seq: int


def parse_ack(subject: str) -> AckInfo:
    """Read `$JS.ACK.…` (9 tokens, or 11 and more with domain and account). Raises BadMessage."""
    parts = subject.split(".")
    if subject.isprintable() and " " not in subject and parts[:2] == ["$JS", "ACK"]:
        fields = parts[2:] if len(parts) == 9 else parts[4:] if len(parts) >= 11 else []
        if fields and subject.isascii() and all(map(str.isdigit, fields[2:7])):
            if (urgency := _URGENCY_OF.get(fields[1])) is not None:
                return AckInfo(fields[0], urgency, int(fields[2]), int(fields[3]))
    raise BadMessage(f"not an ack subject: {subject[:200]!r}")


def subject_tokens(subject: str) -> int:
    """Token count of a job subject. 0 if its last token is not a number."""
    last = subject.rsplit(".", 1)[-1]
    return int(last) if last.isascii() and last.isdigit() and len(last) < 12 else 0


# --------------------------------------------------------------------------- making them

ACK_WAIT_S, PUBLISH_TIMEOUT_S = 5.0, 0.5
# What holds where `queue.*` is not set: for a new stream or consumer, and for a producer.
DEFAULTS = QueueSettings(
    replicas=1, max_bytes=-1, max_jobs=10_000, max_deliver=5, ack_wait_s=ACK_WAIT_S,
    publish_timeout_s=PUBLISH_TIMEOUT_S,
)  # fmt: skip
DEAD_MAX_BYTES = 256 << 20
STREAM_NOT_FOUND = 10059
# Error codes of NATS.
_NOT_FOUND = frozenset({STREAM_NOT_FOUND, 10014})
_EXISTS = frozenset({10058, 10013, 10105, 10148})
_CONFLICTS = frozenset({10065, 10099, 10100, 10101})  # another stream or consumer has its subjects

Config = dict[str, Any]
"""The configuration of a stream or a consumer, or JetStream's answer about it."""


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


_STREAM: Config = {
    "storage": "file",
    "max_consumers": -1,
    "max_msg_size": -1,
    "num_replicas": DEFAULTS.replicas,
    "duplicate_window": _ns(120.0),
}


def job_stream(names: Names) -> Config:
    """Work-queue retention, file storage, refuse new jobs when full."""
    return _STREAM | {
        "name": names.stream,
        "description": "pullfill prefill jobs",
        "subjects": [names.all_jobs],
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": DEFAULTS.max_jobs,
        "max_bytes": DEFAULTS.max_bytes,
        "max_age": _ns(3600.0),  # by then nobody waits for the job
    }


def dead_stream(names: Names) -> Config:
    """The last dead letters, for people. Bounded in number, bytes and age."""
    return _STREAM | {
        "name": names.dead_stream,
        "description": "pullfill jobs that nobody may try again",
        "subjects": [names.dead],
        "retention": "limits",
        "discard": "old",
        "max_msgs": 1000,
        "max_bytes": DEAD_MAX_BYTES,
        "max_age": _ns(7 * 86400.0),
    }


def consumer(names: Names, urgency: Urgency) -> Config:
    """The durable pull consumer of the jobs of one urgency, for all prefill workers."""
    name = consumer_of(urgency)
    return {
        "durable_name": name,
        "name": name,
        "description": "all prefill workers",
        "filter_subject": names.jobs_of(urgency),
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": _ns(ACK_WAIT_S),
        "max_deliver": DEFAULTS.max_deliver,
        # Of all workers. NATS answers no pull at this limit, so it is far above the number of jobs.
        "max_ack_pending": 1_000_000,
        "max_waiting": 2048,
        "replay_policy": "instant",
    }


class QueueEnd(ABC):
    """What producer and consumer share: a connection to NATS, the streams and the consumers of one
    queue. Works once the connection has started. The producer and the consumer of one worker may
    use the same one.

    settings: the values of `queue.*`. Call `configure` when they change.
    ack_wait_s: seconds without a heartbeat after which a job is delivered again.
    max_deliver: how often that happens before it is a dead letter."""

    # As the consumer of normal jobs has them on the server. The others follow it.
    ack_wait_s: float
    max_deliver: int

    def __init__(self, connection: NatsConnection, names: Names, settings: QueueSettings) -> None:
        connection.use(self._connected, self._on_down)
        self.connection = connection
        self.health = connection.health
        self.names = names
        # When the job stream was made, as the server writes it. A stream that is made again after a
        # loss of data has another one. Empty: not known.
        self.stream_id = ""
        self._settings = settings
        self._applying: asyncio.Task[None] | None = None

    @abstractmethod
    async def _connected(self) -> None:
        """A connection was made. What fails over the first one ends its `start`."""

    def _on_down(self) -> None:
        """A connection was lost."""
        self.stream_id = ""

    async def close(self) -> None:
        """Use the connection no more. It stays open."""
        await end(self._applying)

    @property
    def publish_timeout_s(self) -> float:
        """How long a producer waits for an answer."""
        return self._settings.publish_timeout_s or PUBLISH_TIMEOUT_S

    def configure(self, settings: QueueSettings) -> None:
        """Apply these settings now, or over the next connection. Returns at once."""
        self._settings = settings
        if self.connection.up and not self.busy:
            self._applying = asyncio.create_task(self._apply(), name="queue-settings")

    @property
    def busy(self) -> bool:
        """Whether settings are being applied now."""
        return self._applying is not None and not self._applying.done()

    async def _apply(self) -> None:
        """Apply the settings, again if they changed meanwhile. After a failure the next connection
        applies them."""
        applied = None
        try:
            while applied != self._settings:
                applied = self._settings
                await self.ensure()
        except (QueueUnavailable, ConfigError) as exc:
            logger.warning("the queue settings are not applied yet: %s", exc)

    async def ensure(self) -> None:
        """Make the streams and the consumers if missing.

        Else change the fields that `queue.*` sets. Raises ConfigError, QueueUnavailable.
        """
        settings = self._settings
        owned = _set_fields(num_replicas=settings.replicas)
        own_jobs = owned | _set_fields(max_msgs=settings.max_jobs, max_bytes=settings.max_bytes)
        ack_wait = None if settings.ack_wait_s is None else _ns(settings.ack_wait_s)
        own_terms = _set_fields(ack_wait=ack_wait, max_deliver=settings.max_deliver)
        try:
            jobs = await self._ensure_stream(job_stream(self.names), own_jobs)
            normal = await self._ensure_consumer(Urgency.NORMAL, own_terms)
        except (ConfigError, QueueUnavailable):
            self.stream_id = ""
            raise
        terms = normal["config"]
        self.ack_wait_s, self.max_deliver = terms["ack_wait"] / 1e9, terms["max_deliver"]
        self.stream_id = str(jobs["created"])
        # What follows may have leaders of its own. Normal jobs do not wait for them.
        same = {"ack_wait": _ns(self.ack_wait_s), "max_deliver": self.max_deliver}
        await asyncio.gather(
            *(self._ensure_consumer(one, same) for one in Urgency if one is not Urgency.NORMAL)
        )
        await self._ensure_stream(dead_stream(self.names), owned)

    async def _ensure_stream(self, new: Config, owned: Config) -> Config:
        name = new["name"]
        return await self._ensure(
            f"NATS stream {name}", f"STREAM.INFO.{name}", f"STREAM.CREATE.{name}",
            f"STREAM.UPDATE.{name}", new, owned, ("retention", "storage"),
            f"Use another --namespace, or delete it (`nats stream rm {name}`)",
        )  # fmt: skip

    async def _ensure_consumer(self, urgency: Urgency, owned: Config) -> Config:
        stream, name = self.names.stream, consumer_of(urgency)
        create = f"CONSUMER.CREATE.{stream}.{name}.{self.names.jobs_of(urgency)}"
        return await self._ensure(
            f"NATS consumer {name} of stream {stream}", f"CONSUMER.INFO.{stream}.{name}", create,
            create, consumer(self.names, urgency), owned,
            ("filter_subject", "ack_policy"),
            f"Delete it (`nats consumer rm {stream} {name}`) and start again",
            lambda config: {"stream_name": stream, "config": config},
        )  # fmt: skip

    async def _ensure(
        self,
        what: str,
        about: str,
        create: str,
        update: str,
        new: Config,
        owned: Config,
        fixed: Sequence[str],
        advice: str,
        ask: Callable[[Config], Config] = lambda config: config,
    ) -> Config:
        """Make a stream or a consumer if it is missing. Returns JetStream's answer about it.

        about, create, update: the operations of JetStream's API.
        new: its configuration if it must be made. owned: the fields to change if it exists.
        fixed: fields that cannot be changed, and must be as in `new`.
        ask: makes the body of a request from a configuration."""
        api = self.connection.api
        try:
            info = await api(about)
        except ApiError as exc:
            if exc.err_code not in _NOT_FOUND:
                raise
            try:
                return await api(create, ask(new | owned))
            except ApiError as refused:
                if refused.err_code in _CONFLICTS:
                    why = refused.description
                    raise ConfigError(f"{what} cannot be made: {why}. {advice}") from None
                if refused.err_code not in _EXISTS:
                    raise
            info = await api(about)  # another worker was faster
        has = info["config"]
        for field in fixed:
            if has.get(field) != new[field]:
                raise ConfigError(
                    f"{what} exists with {field} {has.get(field)!r}, which must be "
                    f"{new[field]!r} and cannot be changed. {advice}"
                )
        if "discard" in new:
            # Not settings: without these values jobs would not be stored, or push out others.
            subjects = has.get("subjects") or []
            more = [one for one in new["subjects"] if one not in subjects]
            owned = owned | {"discard": new["discard"], "subjects": [*subjects, *more]}
        changed = {name: value for name, value in owned.items() if has.get(name) != value}
        if not changed:
            return info
        try:
            info = await api(update, ask(has | changed))
        except ApiError as exc:
            if exc.code == 503 or "subjects" in changed:
                raise
            logger.error(
                "NATS refuses %s for %s, so the old value stays: %s. Set another one with "
                "`pullfill config set queue.KEY VALUE`",
                changed, what, exc.description,
            )  # fmt: skip
        else:
            logger.info("changed %s: %s", what, changed)
        return info


def _set_fields(**fields: int | None) -> Config:
    """Return the fields that are set."""
    return {name: value for name, value in fields.items() if value is not None}
