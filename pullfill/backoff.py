"""Pauses between tries of what may fail again. Each pause is twice as long as the one before."""

from __future__ import annotations


class Backoff:
    """Owned by whoever tries again; not thread-safe.

    pause_s: the next pause, in seconds.
    longest_s: no pause is longer.
    """

    __slots__ = ("_first_s", "_longest_s", "pause_s")

    def __init__(self, first_s: float = 0.1, longest_s: float = 2.0) -> None:
        self._first_s = self.pause_s = first_s
        self._longest_s = max(first_s, longest_s)

    def next(self) -> float:
        """Return the pause after one more failure."""
        pause_s = self.pause_s
        self.pause_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin again with the first pause: a try has succeeded."""
        self.pause_s = self._first_s
