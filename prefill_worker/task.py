"""One granted prefill on this worker, from claim to commit.

Shared by three threads: asyncio (owner, creates and ends it), engine (schedules blocks), transfer
worker (copies them). Fields say who writes them; `lock` guards the counters two threads touch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pullfill.wire import FenceToken, KvMode


@dataclass(slots=True, eq=False)
class PrefillTask:
    """remote_blocks: decode-side block of each block of the prompt, hit blocks first.

    first_target: index of the first block to be written (everything before is the decode worker's
    own prefix hit). checked: decode-side blocks whose digest goes with the commit; digests: those
    made so far (a block written again after a preemption gets a new one). on_done: called once,
    from any thread, with None when all blocks are written (or kept, in pull mode), else with the
    failure; well: it was None. kept: in pull mode, our block for each target block, and their
    bytes; they stay ours to read until `TransferWorker.let_go`, which calls on_let_go.
    """

    request_id: str
    job_id: str
    attempt: int
    token_ids: list[int]
    block_size: int
    hit_tokens: int
    remote_blocks: list[int]
    fence: FenceToken
    cache_salt: str | None
    priority: int
    transfer_worker: Any
    on_done: Callable[[BaseException | None], None]
    checked: frozenset[int] = frozenset()
    mode: KvMode = KvMode.PUSH_ASYNC
    lock: threading.Lock = field(default_factory=threading.Lock)
    # transfer worker, under lock; not to be confused with outstanding, which counts planned and
    # kept ones too
    submitted: int = 0
    on_quiet: list[Callable[[], object]] = field(default_factory=list)
    quiet: threading.Condition | None = None
    # engine thread
    request: Any = None
    scheduled_blocks: int = 0
    read_asked: bool = False
    freed_by_report: bool = False
    parts: int = 0
    # engine and transfer worker threads, under lock
    outstanding: int = 0
    cancelled: bool = False
    ended: bool = False
    well: bool = False
    written_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    digests: dict[int, bytes] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    kept_bytes: int = 0
    on_let_go: Callable[[PrefillTask, BaseException | None], None] | None = None
    # timing, monotonic seconds
    started: float = field(default_factory=time.monotonic)
    first_step: float = 0.0
    last_compute: float = 0.0

    def __post_init__(self) -> None:
        self.scheduled_blocks = self.first_target

    @property
    def first_target(self) -> int:
        return self.hit_tokens // self.block_size

    @property
    def total_blocks(self) -> int:
        return -(-len(self.token_ids) // self.block_size)

    @property
    def digest(self) -> bytes | None:
        """Of the checked blocks in the order of the prompt, once all are written."""
        if not self.checked:
            return None
        targets = self.remote_blocks[self.first_target :]
        return b"".join(self.digests[block] for block in targets if block in self.checked)

    @property
    def kept_blocks(self) -> list[int]:
        """Ours, one for each target block, in the order of the prompt, once all are kept."""
        return [self.kept[block] for block in self.remote_blocks[self.first_target :]]

    def submit(self) -> None:
        """The transfer worker has one more operation of this task."""
        with self.lock:
            self.submitted += 1

    def submitted_over(self) -> None:
        """One of them is over, its callback included. Runs what waits for the last one."""
        with self.lock:
            self.submitted -= 1
            calls: list[Callable[[], object]] = []
            if self.submitted == 0:
                calls, self.on_quiet = self.on_quiet, calls
                if self.quiet is not None:
                    self.quiet.notify_all()
        for call in calls:
            call()

    def wait_quiet(self, timeout_s: float) -> bool:
        """Block until no submitted operation touches the task's blocks; at once if there is none,
        whatever the transfer worker does for others. False: not in time."""
        with self.lock:
            if self.submitted == 0:
                return True
            quiet = self.quiet = self.quiet or threading.Condition(self.lock)
            return quiet.wait_for(lambda: self.submitted == 0, timeout_s)

    def when_quiet(self, call: Callable[[], object]) -> None:
        """Have `call` run once that is so: now, or later on the transfer worker's thread. Must not
        raise."""
        with self.lock:
            if self.submitted:
                self.on_quiet.append(call)
                return
        call()

    def end(self, failure: BaseException | None) -> None:
        """Report the end once; later calls do nothing."""
        with self.lock:
            if self.ended:
                return
            self.ended, self.well = True, failure is None
        self.on_done(failure)

    def cancel(self) -> None:
        """Queued copies of this task become no-ops; a running batch ends by itself."""
        with self.lock:
            self.cancelled = True
