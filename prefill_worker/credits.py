"""How much KV may be computed for a decode worker and not be in its memory yet.

Each decode worker has an account (its mover's). A write is charged when the mover gets it, or, in
pull mode, blocks when they are kept, and given back when that ended, however. Once an account
holds the limit the puller takes no more jobs: it cannot choose for whom they are. What was pulled
before, or comes with a pull under way, is computed all the same, so an account may go beyond the
limit by the prefill budget.

Thread-safe: movers charge and give back, the puller (asyncio) waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pullfill import metrics


class Account:
    """One decode worker's share. Ends with `close`; what is given back later counts nowhere."""

    def __init__(self, credits: Credits, peer: str) -> None:
        self._credits = credits
        self.peer = peer
        self.used = 0

    def charge(self, nbytes: int) -> None:
        self._credits._move(self, nbytes)

    def give_back(self, nbytes: int) -> None:
        self._credits._move(self, -nbytes)

    def close(self) -> None:
        """Write off what is still charged. Idempotent."""
        self._credits._close(self)


class Credits:
    """`limit_bytes` for each decode worker. on_room: called on any thread, under no lock, when the
    last account that had none left has some again."""

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
        """A new account. A peer that is connected anew has two until the old one is closed."""
        account = Account(self, peer)
        with self._lock:
            self._accounts.append(account)
        return account

    @property
    def gone(self) -> list[str]:
        """Decode workers without credit, by name."""
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
        """Before a scrape."""
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
        """Whether this made room; with the lock held."""
        was_full = bool(self._full)
        (self._full.add if account.used >= self.limit else self._full.discard)(account)
        return was_full and not self._full
