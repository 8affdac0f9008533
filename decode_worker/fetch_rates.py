"""Says whether reading a prefix from another decode worker is cheaper than computing it.

The time of a read is learned for each holder: a part that does not depend on the length, and a part
for each byte. A holder counts as cheap until SURE reads were measured, and again when none was for
FORGET_S. So a few slow reads do not keep prompts away from it for long. Engine thread.
"""

from __future__ import annotations

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.decode_worker.forecast import ASSUMED_TOKENS_PER_S
from pullfill.rate import Rate

_MIB = float(1 << 20)
_MOST = 4096
"""When so many holders are remembered, all are forgotten."""
SURE = 8
"""Reads of a holder after which its measured time counts."""


class FetchRates:
    """Learns how long reads from each holder take."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._holders: dict[str, Rate] = {}

    def expected_s(self, instance_id: str, kv_bytes: float) -> float:
        """Expected seconds of a read. 0: unknown."""
        fit = self._holders.get(instance_id)
        if fit is None or fit.count < SURE or not fit.fresh(self._clock.monotonic()):
            return 0.0
        return fit.of(1.0, kv_bytes / _MIB)

    def worth(self, instance_id: str, kv_bytes: float, compute_s: float) -> bool:
        """Whether a read is expected to take less time than the computation."""
        return self.expected_s(instance_id, kv_bytes) < compute_s

    def observe(self, instance_id: str, kv_bytes: float, seconds: float) -> None:
        """Learn from one read.

        seconds: from the question for a lease until the lease is given back. Connecting to the
        holder and opening its memory are not part of it."""
        if len(self._holders) >= _MOST:
            self._holders = {}
        fit = self._holders.setdefault(instance_id, Rate())
        fit.observe(1.0, kv_bytes / _MIB, seconds, self._clock.monotonic())


def computed_s(measured_s: float, tokens: int) -> float:
    """Return how many seconds it takes to compute `tokens` here.

    measured_s: what the measured rates say. 0: nothing is measured, so a rate is assumed."""
    return measured_s or tokens / ASSUMED_TOKENS_PER_S
