"""The error tree. Each class says whether trying again can help."""

from __future__ import annotations

import enum

# PullfillError
# ├── ConfigError            bad flag, setting or file: fix it, then start again
# │   └── NotNow             what the flags ask for cannot be had now        (retryable)
# ├── IncompatibleError      peers disagree (model, dtype, layout, vLLM): names the field
# ├── UnavailableError       a server or peer cannot be reached now      (retryable)
# │   ├── QueueUnavailable   NATS down, slow, or no stream
# │   ├── RegistryUnavailable etcd down or slow
# │   └── PeerUnavailable    a worker cannot be reached
# ├── EngineStuck            the engine takes no step any more: its worker leaves
# ├── OverloadedError        a bounded thing is full                     (retryable)
# │   └── QueueFull          the job stream refused the publish
# ├── HandoffError           one prefill job cannot go on
# │   ├── ClaimRefused       the decode worker does not grant it (carries the reason)
# │   ├── Fenced             a one-sided access was refused: the grant was revoked
# │   └── TransferFailed     bytes could not be moved                    (retryable)
# ├── AuthFailed             a peer does not hold the cluster key, or a seal is wrong
# └── BadMessage             bytes from a wire that are not what they must be
#     └── OtherVersion       of a process that speaks another wire version


class PullfillError(Exception):
    """Base of everything pullfill raises on purpose. `retryable`: can a retry help?"""

    retryable: bool = False


class ConfigError(PullfillError):
    """A flag, setting or file is wrong. The message says what to change."""


class NotNow(ConfigError):
    """Memory, a port, a file, a certificate or a login cannot be had now. A later start may have
    it, with the same flags."""

    retryable = True


class IncompatibleError(PullfillError):
    """Two peers cannot exchange KV. `field` is the name of what differs."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class UnavailableError(PullfillError):
    """Something we depend on does not answer now."""

    retryable = True


class QueueUnavailable(UnavailableError):
    """NATS JetStream does not answer, or its stream is missing."""


class RegistryUnavailable(UnavailableError):
    """etcd does not answer."""


class PeerUnavailable(UnavailableError):
    """A worker does not answer."""


class OverloadedError(PullfillError):
    """A bound was reached; less load or a later try can help."""

    retryable = True


class QueueFull(OverloadedError):
    """The job stream holds its maximum and refused the publish."""


class HandoffError(PullfillError):
    """One prefill job cannot go on."""


class ClaimRefused(HandoffError):
    """The decode worker granted nothing. `reason` is a `wire.RefuseReason` value."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.retryable = retry_after_s is not None


class Fenced(HandoffError):
    """The grant behind a one-sided read or write is no longer valid. Nothing was moved."""


class TransferFailed(HandoffError):
    """Bytes could not be moved; a new attempt may succeed."""

    retryable = True


class AuthFailed(PullfillError):
    """A peer could not prove that it holds the cluster key, or forged a frame."""


class EngineStuck(PullfillError):
    """The engine's thread took no step for so long that it is given up."""


class BadMessage(PullfillError):
    """Network bytes failed strict decoding or a range check. Never retry them."""


class OtherVersion(BadMessage):
    """A message of another wire version. Processes of that version can read it."""


def exit_code(error: PullfillError) -> int:
    """Return the exit code of a process that ends with `error`.

    2 means that a new start with the same flags fails again, so systemd does not try. 1: it may
    succeed."""
    final = isinstance(error, ConfigError | IncompatibleError) and not error.retryable
    return 2 if final else 1


class Outcome(enum.StrEnum):
    """How one prefill job ended. Low cardinality: used as a metric label and in logs."""

    COMMITTED = "committed"
    CANCELLED = "cancelled"
    PUBLISH_FAILED = "publish_failed"
    QUEUE_FULL = "queue_full"
    CLAIM_TIMEOUT = "claim_timeout"
    CLAIMS_STALLED = "claims_stalled"
    TIMEOUT = "timeout"
    PREFILL_LOST = "prefill_lost"
    PREFILL_FAILED = "prefill_failed"
    QUARANTINED = "quarantined"
    REJECTED = "rejected"
    ENGINE_STUCK = "engine_stuck"
    OWN_JOB = "own_job"
    JOB_GONE = "job_gone"
