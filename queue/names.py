"""Names of one job queue on NATS, and what is encoded in them.

    stream            PULLFILL-{namespace}-{compat_hash}
    job subject       pullfill.{namespace}.{compat_hash}.job.{tokens, rounded up}
    of a lane         pullfill.{namespace}.{compat_hash}.job.{lane}.{tokens, rounded up}
    void subject      pullfill.{namespace}.{compat_hash}.void
    depth subjects    pullfill.{namespace}.{compat_hash}.depth.{want, report} (depth.py)
    notices           pullfill.{namespace}.{compat_hash}.depth.waiting (lanes.py)
    direct subject    pullfill.{namespace}.{compat_hash}.direct (in no stream)
    dead stream       {stream}-dead, subject pullfill.{namespace}.{compat_hash}.dead
    consumers         prefill, prefill-{lane} (durable, shared by all prefill workers)

A lane is `tight-0`, `normal-3` and so on (urgency.py). A job that finds the queue empty goes to no
lane, and so all workers that are free need only wait at the consumer `prefill`.

The token count is the last subject token because the server then counts jobs per token count for
us. One STREAM.INFO tells the depth in tokens, right after any restart and with any number of
publishers. `round_up_tokens` bounds the number of subjects: 464 up to 2**32 tokens. So the depth is
overstated by at most 1/16. The exact count is in a header.

The void subject is for jobs whose publish got no answer. No consumer reads it. A publish there with
the job's `Nats-Msg-Id` has one of two results. The job is stored: then this is a duplicate, and the
answer carries the job's sequence number. Or the job is not stored: then this message takes its id,
and the job is refused as a duplicate if it arrives later. In both cases the message can be deleted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from pullfill.errors import BadMessage, ConfigError
from pullfill.ids import is_name
from pullfill.queue.urgency import Lane, parse_lane

CONSUMER = "prefill"
"""The consumer of the jobs that are in no lane."""

MSG_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
TOKENS = "Pullfill-Tokens"
URGENCY = "Pullfill-Urgency"
JOB_ID = "Pullfill-Job"
REASON = "Pullfill-Reason"
TAKEN, BUSY = b"+OK", b"busy"
"""The answer of a prefill worker, on the direct subject, that takes the job or would take one."""
DELIVERIES = "Pullfill-Deliveries"


def round_up_tokens(tokens: int) -> int:
    """The next number with at most 5 significant bits: exact to 31, then at most 1/16 above."""
    shift = max(0, tokens.bit_length() - 5)
    return -(-tokens >> shift) << shift


class Names:
    """All names of one queue.

    jobs: wildcard over the subjects of jobs that are in no lane. lanes: of those that are in one.
    all_jobs: wildcard over both.
    direct: prefill workers that wait for a job listen here, in the queue group `pullfill`.
    depth: the common part of both depth subjects, without the last word.

    Raises ConfigError on a namespace or hash that cannot be a name."""

    def __init__(self, namespace: str, compat_hash: str) -> None:
        for what, text in (("namespace", namespace), ("hash", compat_hash)):
            if not is_name(text):
                raise ConfigError(
                    f"queue {what} {text!r} is not usable: lower-case letters, digits, '-', '_'"
                )
        root = f"pullfill.{namespace}.{compat_hash}"
        self.stream = f"PULLFILL-{namespace}-{compat_hash}"
        self.dead_stream = f"{self.stream}-dead"
        self.jobs = f"{root}.job.*"
        self.lanes = f"{root}.job.*.*"
        self.all_jobs = f"{root}.job.>"
        self.void = f"{root}.void"
        self.direct = f"{root}.direct"
        self.dead = f"{root}.dead"
        self.depth = f"{root}.depth"
        self.notices = f"{root}.depth.waiting"

    def job(self, tokens: int, lane: Lane | None = None) -> str:
        """Subject of a job with so many tokens. lane: None if it is in none."""
        of_lane = f"{lane.label}." if lane else ""
        return f"{self.jobs[:-1]}{of_lane}{round_up_tokens(max(0, tokens))}"

    def jobs_of(self, lane: Lane | None) -> str:
        """Wildcard over the job subjects of one lane. None: of no lane."""
        return f"{self.jobs[:-1]}{lane.label}.*" if lane else self.jobs


def consumer_of(lane: Lane | None) -> str:
    """Name of the consumer of a lane. None: of the jobs that are in none."""
    return f"{CONSUMER}-{lane.label}" if lane else CONSUMER


def consumer_lane(consumer: str) -> Lane | None:
    """The lane of a consumer. None: of the jobs that are in none. Raises BadMessage."""
    if consumer == CONSUMER:
        return None
    return parse_lane(consumer.removeprefix(f"{CONSUMER}-"))


def subject_lane(subject: str) -> Lane | None:
    """The lane of a job subject. None: it is in none, or the subject is no job's."""
    with contextlib.suppress(BadMessage, IndexError):
        return parse_lane(subject.rsplit(".", 2)[-2])
    return None


@dataclass(frozen=True, slots=True)
class AckInfo:
    """The fields of a delivery's ack subject, which the server wrote."""

    stream: str
    consumer: str
    number: int
    seq: int
    pending: int
    """Jobs of this consumer that were not delivered yet."""


def parse_ack(subject: str) -> AckInfo:
    """Read `$JS.ACK.…` (9 tokens, or 11 and more with domain and account). Raises BadMessage."""
    parts = subject.split(".")
    if subject.isprintable() and " " not in subject and parts[:2] == ["$JS", "ACK"]:
        fields = parts[2:] if len(parts) == 9 else parts[4:] if len(parts) >= 11 else []
        if fields and subject.isascii() and all(map(str.isdigit, fields[2:7])):
            number, seq, pending = int(fields[2]), int(fields[3]), int(fields[6])
            return AckInfo(fields[0], fields[1], number, seq, pending)
    raise BadMessage(f"not an ack subject: {subject[:200]!r}")


def subject_tokens(subject: str) -> int:
    """Token count of a job subject. 0 if its last token is not a number."""
    last = subject.rsplit(".", 1)[-1]
    return int(last) if last.isascii() and last.isdigit() and len(last) < 12 else 0
