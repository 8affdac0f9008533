"""Identifiers. All are lower-case, safe in a NATS subject, an etcd key and a file name."""

from __future__ import annotations

import hashlib
import re
import secrets

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62})\Z")


def new_instance_id(role: str) -> str:
    """Return `role-xxxxxxxx`, a new one for every process."""
    return f"{role}-{secrets.token_hex(4)}"


def new_incarnation() -> str:
    """128 random bits; changes at each start and each re-registration."""
    return secrets.token_hex(16)


def new_job_id() -> str:
    """128 random bits: unguessable, so that a job cannot be claimed by guessing."""
    return secrets.token_hex(16)


def is_name(text: str) -> bool:
    """Whether `text` can be a namespace or instance id."""
    return _NAME.match(text) is not None


def job_digest(body: bytes) -> bytes:
    """Return a digest of a job's body: 16 bytes.

    The grant carries it. So a prefill worker knows whether the job that it pulled is the one that
    the decode worker has published."""
    return hashlib.blake2b(body, digest_size=16).digest()
