"""How a granted job's KV arrives: written and committed, or ready to be read; verified or not.

The ledger's moves out of GRANTED that end well (ledger.py has the picture). Each takes the one lock
for microseconds and may be called from the asyncio thread; nothing here does I/O.
"""

from __future__ import annotations

from pullfill.decode_worker.book import Book
from pullfill.decode_worker.entry import JobState
from pullfill.decode_worker.moves import Read, Verify
from pullfill.errors import Outcome


class Arrivals(Book):
    """The part of `Ledger` that prefill workers end an attempt with."""

    def progress(
        self, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int = 0
    ) -> None:
        """Note that the current attempt has made progress. Its job gets `stall_s` from now.

        So a deadline that was estimated too short does not end an attempt that makes progress.

        blocks: number of blocks written since the last report.
        """
        with self._lock:
            entry = self._current(job_id, attempt, incarnation, writer)
            if entry is not None and entry.state in (JobState.GRANTED, JobState.READING):
                entry.written += blocks
                entry.deadline = max(entry.deadline, self._clock.monotonic() + entry.stall_s)

    def commit(
        self,
        job_id: str,
        attempt: int,
        incarnation: str,
        writer: str,
        blocks: int,
        digest: bytes | None = None,
    ) -> Verify | str | None:
        """Accept the bytes of the current attempt. None: accepted, the request is settled as
        loaded. Verify: check them first and call `verified`. Else why not (stale attempt, wrong
        count): nothing changes for a stale one."""
        try:
            with self._lock:
                entry = self._current(job_id, attempt, incarnation, writer)
                if entry is None or entry.state is not JobState.GRANTED:
                    return "stale"
                return self._take_over(entry, blocks) or self._arrived(entry, digest)
        finally:
            self._wake()

    def ready(
        self, job_id: str, attempt: int, incarnation: str, writer: str, blocks: int
    ) -> Read | str:
        """The writer has computed the current attempt and lets us read it. Read: do so, and call
        `read_over` in any case. Else why not, as in `commit`."""
        try:
            with self._lock:
                entry = self._current(job_id, attempt, incarnation, writer)
                if entry is None or entry.state is not JobState.GRANTED:
                    return "stale"
                if (why := self._take_over(entry, blocks)) is not None:
                    return why
                entry.state, entry.reading = JobState.READING, True
                return Read(job_id, attempt, entry.blocks[entry.first_target :])
        finally:
            self._wake()

    def read_over(
        self, job_id: str, attempt: int, *, good: bool, digest: bytes | None = None
    ) -> Verify | str | None:
        """Our reader is done with the blocks of a `Read`, well or not; it never touches them again.
        Answers as `commit` does. Bytes that could not be read are computed here: of those that
        could be, another prefill worker has none."""
        try:
            with self._lock:
                entry = self._jobs.get(job_id)
                assert entry is not None, "a job that is read stays open"
                assert entry.reading, "read twice"
                assert entry.attempt == attempt, "nobody can claim a job that is read"
                entry.reading = False
                if entry.state is JobState.QUARANTINED:  # it ended meanwhile
                    self._ask_proof(entry)
                    return "stale"
                if good:
                    return self._arrived(entry, digest)
                self._give_up(entry, Outcome.PREFILL_FAILED)
                return "read_failed"
        finally:
            self._wake()

    def verified(self, job_id: str, attempt: int, *, good: bool) -> str | None:
        """The bytes of a commit were compared with its digest. None: the request is settled as
        loaded. Else why not: they differ, or the job ended meanwhile and nothing changes."""
        try:
            with self._lock:
                entry = self._jobs.get(job_id)
                if entry is None or entry.state is not JobState.VERIFYING:
                    return "stale"
                assert entry.attempt == attempt, "nobody can claim a job that is verified"
                if not good:
                    self._give_up(entry, Outcome.DIGEST_MISMATCH)
                    return Outcome.DIGEST_MISMATCH.value
                self._settle(entry, Outcome.COMMITTED, loaded=True)
                self._end(entry, JobState.COMMITTED)
                return None
        finally:
            self._wake()
