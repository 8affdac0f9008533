"""The list of refused requests of a frontend that has no etcd."""

from __future__ import annotations

from collections.abc import Callable


class Alone:
    """A `SuspectBoard` of one frontend. refused: number of deaths, by fingerprint."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self._on_refused: Callable[[str], None]

    def start(self, on_refused: Callable[[str], None]) -> None:
        self._on_refused = on_refused

    def __len__(self) -> int:
        return len(self.refused)

    def left_s(self, fingerprint: str) -> float:
        return 600.0 if fingerprint in self.refused else 0.0

    def post(self, fingerprint: str, deaths: int, prompt_tokens: int, ttl_s: float) -> None:
        self.refused[fingerprint] = deaths
        self._on_refused(fingerprint)
