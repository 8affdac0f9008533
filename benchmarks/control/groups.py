"""What several KV cache groups cost a remote prefill: CPU, and the time of its stages.

vLLM gives each KV cache group a block table of its own, so a job of a model with full attention and
sliding windows lists the blocks of several tables. Three models have four layers and the same KV:

    one         one group, blocks of 16 tokens
    four        four groups, blocks of 64 tokens: a prompt has as many blocks as in `one`
    four of 16  four groups, blocks of 16 tokens: a prompt has four times as many blocks

The windows are longer than any prompt, so jobs list the blocks of all groups from the first on.
Each model has one worker of each kind. All are up at the same time, and take the load in turns.

A round has two windows for each model, in the order 1 2 3 3 2 1. So a machine that gets slower
during a round slows all models alike. A row has the median of the ratio over the rounds, and
another row has the 95 % interval of this median.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import product

from benchmarks import machine
from benchmarks.control.plant import Fleet, Plant, mock_flags
from benchmarks.control.scale import PACED_PER_S
from benchmarks.report import Row, median, row

ONE, FOUR, FOUR_OF_16 = "one", "four", "four of 16"
LAYERS, WINDOW = 4, 4000
GROUPED = {"windows": LAYERS - 1, "window": WINDOW}
TURN = 512
"""Tokens of the first prompt of a conversation. The second prompt has twice as many."""
PER_LOOP, AT_ONCE = 100, 16
"""Conversations of a closed loop: in all, and at the same time."""
PER_PACED = 30
MORE_ROUNDS = 4
"""How many times more rounds this part has than the other parts. Two windows of the same model
differ by as much as TARGET allows. So only the median of many rounds is precise enough."""
TARGET = 1.05
STAGES = ("queue", "claim", "prefix_read", "kv_write", "commit")
UNITS = {"CPU beside engines": "ms", "the same at a fixed rate": "ms", "time of all stages": "ms"}

Found = dict[str, dict[str, list[float]]]
"""Maps a figure, and then a model, to the measured values: one per round."""


def flags() -> dict[str, list[str]]:
    """Return the flags of the workers of each model."""
    grouped = mock_flags(layers=LAYERS, **GROUPED)
    return {
        ONE: mock_flags(layers=LAYERS),
        FOUR: [*grouped, "--block-size=64"],
        FOUR_OF_16: grouped,
    }


def run(plant: Plant, rounds: int, quiet: machine.OtherLoad) -> list[Row]:
    """Measure all models, and return the rows. Raises BenchError."""
    found: Found = {figure: defaultdict(list) for figure in UNITS}
    failed = local = 0
    with ExitStack() as stack:
        fleets: dict[str, Fleet] = {}
        for name, own in flags().items():
            namespace = "groups-" + name.replace(" ", "-")
            fleet = Fleet(plant, namespace, 1, 1, decode_flags=own, prefill_flags=own, router={})
            fleets[name] = stack.enter_context(closing(fleet))
        everybody = [pid for f in fleets.values() for pid in (f.front, *f.decode, *f.prefill)]
        for number in range(-1, MORE_ROUNDS * rounds):  # the first round warms up
            values: Found = {figure: defaultdict(list) for figure in UNITS}
            for turn, name in enumerate([*fleets, *reversed(fleets)]):
                with quiet.window([*everybody, *plant.servers]):
                    figures, done = _window(fleets[name], 2 * number + turn // len(fleets))
                if number < 0:
                    continue
                failed += int(done["failed"])
                local += int(done["requests"] - done["remote"])
                for figure, value in figures.items():
                    values[figure][name].append(value)
            if number >= 0:
                for figure, name in product(UNITS, fleets):
                    found[figure][name].append(sum(values[figure][name]) / 2)
    rows = [
        row("KV cache groups: requests failed", failed, "", 0),
        row("KV cache groups: requests prefilled locally", local, "", 0),
        *rows_of(found),
    ]
    for one in rows:
        print(f"  {one.metric:<66} {one.value:>9} {one.unit} {one.peer} {one.ratio or ''}")
    return rows


def _window(fleet: Fleet, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Load one model twice: as a closed loop, then at a fixed rate.

    Returns its figures, and the sums of both loads' counts of requests.

    seed: of the prompts. Each window of a model needs another seed, because the same prompts would
    be prefix hits."""
    with fleet.window() as used:
        loop = fleet.driver.do(
            "load", conversations=PER_LOOP, at_once=AT_ONCE, turn=TURN, seed=1000 + seed
        )
    with fleet.window() as slowly:
        paced = fleet.driver.do(
            "load", conversations=PER_PACED, at_once=10_000, rate=PACED_PER_S, turn=TURN,
            seed=2000 + seed,
        )  # fmt: skip
    values = (
        sum(use.ours for use in used.values()) / loop["requests"] * 1e3,
        sum(use.ours for use in slowly.values()) / paced["requests"] * 1e3,
        sum(median(paced["stages"].get(stage, [0.0])) for stage in STAGES),
    )
    both = {name: loop[name] + paced[name] for name in ("failed", "requests", "remote")}
    return dict(zip(UNITS, values, strict=True)), both


def rows_of(found: Found) -> list[Row]:
    """Compare both models of four groups with ONE. Only `FOUR` has a target.

    Returns two rows for each figure: the ratio, and its interval."""
    rows = []
    for name in (FOUR, FOUR_OF_16):
        for figure, unit in UNITS.items():
            one, several = found[figure][ONE], found[figure][name]
            ratios = [b / a for a, b in zip(one, several, strict=True)]
            blocks = "as many blocks" if name == FOUR else "four times as many blocks"
            metric = f"4 KV cache groups, {blocks}: {figure}"
            limit = TARGET if name == FOUR else None
            held = row("", median(ratios), "", limit)
            rows += [
                Row(
                    metric=metric,
                    value=row("", median(several), "").value, unit=unit, peer="1 group",
                    peer_value=row("", median(one), "").value, ratio=held.value,
                    target=held.target and f"ratio {held.target}", ok=held.ok,
                ),
                row(f"{metric}, 95 % interval of the ratio, +-", interval_of(ratios), ""),
            ]  # fmt: skip
    return rows


def interval_of(values: Sequence[float]) -> float:
    """Half the width of the interval that holds the true median with a probability of 95 %.

    By the ranks of the values, so that outliers do not widen it."""
    ordered = sorted(values)
    # The rank of the median of n values is binomial: its deviation is sqrt(n) / 2.
    low = max(0, math.floor((len(ordered) - 1) / 2 - 0.98 * math.sqrt(len(ordered))))
    return (ordered[-1 - low] - ordered[low]) / 2
