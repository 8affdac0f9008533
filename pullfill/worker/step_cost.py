"""How long a step of an engine takes. Pure; the step rule predicts with it.

A step takes a time of its own, and more for each stream, for the KV that streams attend to, for
each prompt token, and for what that attends to. Engine thread.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence

import msgspec

# What was learned is told again after so many steps.
EVERY = 16
# What is left of the weight of a step with each later one: half after 1,400 steps.
_KEEP = 0.9995
# One step counts as at most so many times as long as expected, so one pause of the machine does not
# spoil what was learned.
_CLIP = 3.0
# How many steps it takes to learn that the whole engine has become slower or faster.
_FACTOR_STEPS = 32.0
# The prior of each coefficient counts as much as one step that takes so long by that part alone.
_PRIOR_S = 0.002
# What never happened counts as this share of one step. See `Errors.beyond`.
_UNSEEN = 0.3
_ALL = 1 << 30


class StepCost(msgspec.Struct, frozen=True):
    """Seconds of a step: `base_s`, and so much for each stream, token of the streams' KV, prompt
    token, and pair of a prompt token and one before it."""

    base_s: float = 0.0
    stream_s: float = 0.0
    kv_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    def base(self, streams: float, kv_tokens: float) -> float:
        """Seconds of a step without prompts."""
        return self.base_s + self.stream_s * streams + self.kv_s * kv_tokens

    def work(self, at: int, tokens: int) -> float:
        """Seconds that `tokens` tokens of a prompt add that follow `at` others."""
        return tokens * (self.token_s + self.pair_s * (at + tokens / 2.0))

    def fill(self, at: int, room_s: float) -> int:
        """How many tokens of a prompt behind `at` others take `room_s`."""
        if room_s <= 0:
            return 0
        # pair/2 n^2 + each n = room, solved in the form that also holds without pairs.
        each = self.token_s + self.pair_s * at
        root = each + math.sqrt(each * each + 2.0 * self.pair_s * room_s)
        return int(min(2.0 * room_s / root, _ALL)) if root > 0 and room_s < math.inf else _ALL


class Fit:
    """Least squares with coefficients of at least 0, which forget slowly, times a factor that
    follows quickly.

    prior: the coefficients before anything is observed, all above 0. At first an error in a time is
    put down to the parts that take most of it by the prior. Later observations tell them apart."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        self._b = list(prior)
        self._xy = [_PRIOR_S / b for b in prior]
        self._xx = [
            [_PRIOR_S / b**2 * (i == j) for j in range(len(prior))] for i, b in enumerate(prior)
        ]
        self._factor = 1.0
        self._count = 0
        self._told = [False] * len(prior)  # whether a step has told of each since the last `_solve`

    def of(self, x: Sequence[float]) -> float:
        return self._factor * sum(b * v for b, v in zip(self._b, x, strict=True))

    def learned(self) -> list[float]:
        return [self._factor * b for b in self._b]

    def observe(self, x: Sequence[float], y: float) -> None:
        expected = self.of(x)
        self._count += 1
        if self._count > EVERY and expected > 0:
            y = min(y, _CLIP * expected)
            self._factor *= 1.0 + (y / expected - 1.0) / _FACTOR_STEPS
        # The error of a time grows with its length, so each weighs by its size.
        weight = 1.0 / sum(b * v for b, v in zip(self._prior, x, strict=True))
        for i, xi in enumerate(x):
            if xi:  # steps without prompts do not make it forget what those take
                self._told[i] = True
                self._xx[i] = [
                    _KEEP * r + weight * xi * xj for r, xj in zip(self._xx[i], x, strict=True)
                ]
                self._xy[i] = _KEEP * self._xy[i] + weight * xi * y
        if self._count < EVERY or self._count % EVERY == 0:
            self._solve(x)

    def _solve(self, x: Sequence[float]) -> None:
        before = self.of(x)
        for _ in range(8):  # one coordinate after the other, from where it was
            for i, row in enumerate(self._xx):
                rest = sum(r * b for r, b in zip(row, self._b, strict=True)) - row[i] * self._b[i]
                if self._told[i]:
                    self._b[i] = max(0.0, (self._xy[i] - rest) / row[i])
                else:
                    # If steps without prompts become longer, it is not because prompts took less
                    # than they seemed to.
                    self._xy[i] = rest + row[i] * self._b[i]
        self._told = [False] * len(self._b)
        # The engine has not changed by that. So what it takes now stays as it was told.
        if (after := self.of(x)) > 0 and self._count > EVERY:
            self._factor *= min(max(before / after, 0.5), 2.0)


class Errors:
    """How long steps with prompts and streams took lately, divided by what was predicted.

    keep: how many steps count. new: whether fewer were measured. Then steps without prompts are
    noted, too. Else a worker that has measured none could expect such steps to take too long,
    compute no prompts beside streams, and never measure one."""

    # Until they are measured: few take twice as long.
    _PRIOR = (1.0,) * 80 + (1.1,) * 10 + (1.25,) * 5 + (1.5,) * 3 + (2.0, 2.5)

    def __init__(self, keep: int = 400) -> None:
        self._recent = deque(self._PRIOR, maxlen=keep)
        self._ordered = sorted(self._recent)
        self._left = keep
        self._unsorted = 0

    @property
    def new(self) -> bool:
        return self._left > 0

    def stepped(self, predicted_s: float, took_s: float) -> None:
        """Note a step that has run."""
        if predicted_s <= 0:
            return
        self._recent.append(took_s / predicted_s)
        self._left -= 1
        self._unsorted += 1
        if self._unsorted >= EVERY:
            self._ordered, self._unsorted = sorted(self._recent), 0

    def beyond(self, times: float) -> float:
        """How likely a step takes more than `times` what is predicted, from 0 to 1."""
        ordered = self._ordered
        more = len(ordered) - bisect.bisect_right(ordered, times)
        # What was not seen may happen, the less likely the farther off it is.
        return min(1.0, (more + _UNSEEN / max(times, 0.1) ** 3) / (len(ordered) + _UNSEEN))
