"""Names of one job queue on NATS, and what is encoded in them.

    stream            PULLFILL-{namespace}-{compat_hash}
    job subject       pullfill.{namespace}.{compat_hash}.job.{urgency}.{tokens, rounded up}
    dead stream       {stream}-dead, subject pullfill.{namespace}.{compat_hash}.dead
    consumers         prefill-{urgency} (durable, shared by all prefill workers)

The token count is the last subject token because the server then counts jobs per token count for
us. One STREAM.INFO tells the depth in tokens, right after any restart and with any number of
publishers. `round_up_tokens` bounds the number of subjects: 464 up to 2**32 tokens. So the depth is
overstated by at most 1/16. The exact count is in a header.
"""

from __future__ import annotations

from dataclasses import dataclass

from pullfill.errors import BadMessage, ConfigError
from pullfill.ids import is_name
from pullfill.queue.urgency import Urgency

MSG_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
TOKENS = "Pullfill-Tokens"
JOB_ID = "Pullfill-Job"
REASON = "Pullfill-Reason"
DELIVERIES = "Pullfill-Deliveries"


def round_up_tokens(tokens: int) -> int:
    """The next number with at most 5 significant bits: exact to 31, then at most 1/16 above."""
    shift = max(0, tokens.bit_length() - 5)
    return -(-tokens >> shift) << shift


class Names:
    """All names of one queue.

    root: the common part of its subjects. all_jobs: wildcard over the subjects of jobs.

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
        self.root = root
        self.all_jobs = f"{root}.job.*.*"
        self.dead = f"{root}.dead"

    def job(self, tokens: int, urgency: Urgency = Urgency.NORMAL) -> str:
        """Subject of a job with so many tokens."""
        return f"{self.root}.job.{urgency.label}.{round_up_tokens(max(0, tokens))}"

    def jobs_of(self, urgency: Urgency) -> str:
        """Wildcard over the subjects of jobs of this urgency."""
        return f"{self.root}.job.{urgency.label}.*"


def consumer_of(urgency: Urgency) -> str:
    """Name of the consumer of the jobs of this urgency."""
    return f"prefill-{urgency.label}"


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
