"""Limits the KV that is computed for a decode worker but not in its memory yet.

Each decode worker has an account, which its transfer worker uses. A write is charged when it is
submitted to the transfer worker, and refunded when it finishes or fails. In pull mode blocks are
charged while they are kept for the decode worker.

While an account has reached the limit, the puller pulls no jobs at all: it cannot choose for which
decode worker a job is. Jobs that were pulled before are computed all the same. So an account may
exceed the limit by the prefill budget.

Thread-safe: transfer workers charge and refund on their threads, the puller waits on the asyncio
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pullfill.runtime import metrics


class Account:
    """The account of one decode worker. After `close` charges and refunds have no effect."""

    def __init__(self, credits: Credits, peer: str) -> None:
        self._credits = credits
        self.peer = peer
        self.used = 0

    def charge(self, nbytes: int) -> None:
        self._credits._move(self, nbytes)

    def refund(self, nbytes: int) -> None:
        self._credits._move(self, -nbytes)

    def close(self) -> None:
        """Refund everything that is still charged, and end the account. Idempotent."""
        self._credits._close(self)


class Credits:
    """All accounts of a prefill worker.

    limit_bytes: for each decode worker.
    on_room: called when no account is at its limit any more. Any thread, no lock held."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        on_room: Callable[[], object] = lambda: None,
    ) -> None:
        self.limit = limit_bytes
        self._on_room = on_room
        self._lock = threading.Lock()
        self._accounts: list[Account] = []
        self._full: set[Account] = set()

    def open(self, peer: str) -> Account:
        """Open an account. A peer that has reconnected has two until the old one is closed."""
        account = Account(self, peer)
        with self._lock:
            self._accounts.append(account)
        return account

    @property
    def gone(self) -> list[str]:
        """Names of the decode workers that have no credit left."""
        with self._lock:
            return sorted({account.peer for account in self._full})

    @property
    def used(self) -> dict[str, int]:
        """Bytes by decode worker."""
        with self._lock:
            return {
                peer: sum(a.used for a in self._accounts if a.peer == peer)
                for peer in sorted({a.peer for a in self._accounts})
            }

    def describe(self) -> dict[str, Any]:
        """For /status."""
        return {"limit_bytes": self.limit, "used_bytes": self.used, "gone": self.gone}

    def refresh_metrics(self) -> None:
        """Set the gauges. Called before a scrape."""
        used = list(self.used.values())
        for what, value in (
            ("limit", self.limit), ("most", max(used, default=0)), ("all", sum(used)),
        ):  # fmt: skip
            metrics.KV_CREDITS.labels(what).set(value)

    def _move(self, account: Account, nbytes: int) -> None:
        with self._lock:
            if account not in self._accounts:
                return
            account.used += nbytes
            room = self._judge(account)
        if room:
            self._on_room()

    def _close(self, account: Account) -> None:
        with self._lock:
            if account not in self._accounts:
                return
            self._accounts.remove(account)
            account.used = 0
            room = self._judge(account)
        if room:
            self._on_room()

    def _judge(self, account: Account) -> bool:
        """Update whether an account is at the limit. Returns whether there is room again.

        The caller holds the lock."""
        was_full = bool(self._full)
        (self._full.add if account.used >= self.limit else self._full.discard)(account)
        return was_full and not self._full
