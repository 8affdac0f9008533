"""Places prompts: what is known of the workers, the choice, and what follows from it.

`choose` decides, `send` counts the request at its worker. All state of the decision is here,
without I/O and without a clock, so the simulator (`benchmarks/sim/`) runs the same object.

What the workers hold is handed in (`stored`). Here it is joined with what they will hold once they
have computed what this frontend sent to them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from pullfill.frontend.decode_choice import HOLDERS, Ask, Candidates, Choice, Chooser, Held
from pullfill.frontend.fleet import Fleet, Share
from pullfill.prefix.chain import HashArray
from pullfill.prefix.predicted import Predicted
from pullfill.wire import DecodePolicy

PREDICTED_S = 30.0
"""How long blocks count as held that a worker was sent, but has not reported as stored."""
PREDICTED_BLOCKS = 1 << 18


class Placement:
    """The state of one frontend's choices. Single event loop.

    rng: see `Chooser`.
    predicted_s: see PREDICTED_S."""

    def __init__(self, rng: random.Random, predicted_s: float = PREDICTED_S) -> None:
        self.fleet = Fleet()
        self.chooser = Chooser(rng)
        self._predicted = Predicted(PREDICTED_BLOCKS, predicted_s)
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = itertools.count()

    def candidates(self, instance_ids: Sequence[str]) -> Candidates:
        """The views of these workers, which join if they are new. To be kept while they stay."""
        return Candidates.of([self.fleet.join(name) for name in instance_ids])

    def drop(self, instance_id: str) -> None:
        """Forget a worker."""
        self.fleet.drop(instance_id)
        number = self._numbers.pop(instance_id, None)
        if number is not None:
            del self._names[number]
            self._predicted.forget(number)

    def choose(
        self,
        policy: DecodePolicy,
        tokens: int,
        among: Candidates,
        now: float,
        *,
        block: int = 0,
        hashes: HashArray | None = None,
        stored: Held | None = None,
        warm: bool = True,
    ) -> Choice:
        """Choose a worker for a prompt of `tokens` tokens.

        block, hashes: tokens per block and the chain hashes of the prompt's blocks.
        stored: what the workers hold of it. warm: whether that can be relied on.
        now: monotonic seconds."""
        if hashes is None or not len(hashes) or not block:
            return self.chooser.choose(policy, Ask(tokens, block), among)
        held = stored if stored is not None else Held({})
        known = held.blocks
        most = max(known.values(), default=0)
        # A hash names all blocks before it, too. So it is enough to look at what comes after those
        # that are stored; and at the last of them, while few workers hold it.
        few = list(known.values()).count(most) < HOLDERS
        begin = max(0, most - few)
        for number, blocks in self._predicted.match(hashes[begin:], now).items():
            name = self._names[number]
            known[name] = max(begin + blocks, known.get(name, 0))
        ask = Ask(tokens, block, hashes, known, most, warm, held.more)
        return self.chooser.choose(policy, ask, among)

    def send(
        self,
        choice: Choice,
        tokens: int,
        now: float,
        *,
        block: int = 0,
        hashes: HashArray | None = None,
    ) -> Share:
        """Count a request that goes to the chosen worker. Returns its share of the load."""
        view = choice.view
        if hashes is not None and len(hashes):
            number = self._numbers.get(view.instance_id)
            if number is None:
                number = self._numbers[view.instance_id] = next(self._next)
                self._names[number] = view.instance_id
            self._predicted.add(number, hashes, now)
        blocks = -(-tokens // block) if block else 0
        return self.fleet.send(view, max(0, tokens - choice.matched_tokens), blocks)
