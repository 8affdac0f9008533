"""What `HandoffModel` keeps of each job and each grant, and the size of its world."""

from __future__ import annotations

from dataclasses import dataclass, field

from pullfill.decode_worker.context import OpenedJob
from pullfill.wire import FenceToken
from tests.support.fakes import FakeRequest

BLOCK = 4
NUM_BLOCKS = 40
TIMEOUT_S = 30.0
CLAIM_S = 10.0
PREFIX = (0, 1)
"""Blocks that some other request keeps in the prefix cache; shared hits point here."""


@dataclass(slots=True)
class Grant:
    job_id: str
    writer: str
    attempt: int
    incarnation: str
    token: FenceToken
    hits: frozenset[int]
    targets: frozenset[int]
    in_batch: bool = False
    reads: bool = False
    """What the batch does: reads the hits, or writes the targets."""


@dataclass(slots=True)
class Job:
    job: OpenedJob
    request: FakeRequest
    blocks: list[int]
    deadline: float
    stored: bool = False
    cancelled_in_queue: bool = False
    publish_over: bool = False
    aborted: bool = False
    committed: bool = False
    reports: list[bool] = field(default_factory=list)
    freed: bool = False

    @property
    def hits(self) -> int:
        return self.job.hit_tokens // BLOCK

    @property
    def targets(self) -> int:
        return len(self.job.blocks) - self.hits
