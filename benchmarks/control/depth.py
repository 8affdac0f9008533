"""Does a decision cost more when ten thousand jobs wait? Two clusters side by side, one with ten
jobs in its queue and one with nearly as many as the stream holds, asked in turns. Their prefill
workers take hours for a job, so nothing moves. All jobs are of the one decode worker that decides:
the worst case.
"""

from __future__ import annotations

import time

from benchmarks import machine
from benchmarks.control.plant import Fleet, Plant, Use, mock_flags
from benchmarks.report import Row, median, row, versus

FEW, MANY = 10, 9_900
"""The stream holds 10,000 (QueueConfig.max_jobs); what is opened on top must fit."""
BURST, BATCH = 40, 250
KV_BYTES = 96 << 20
SETTLE_S = 0.7
LIMIT = 1.2
_HOURS = {"claim_timeout_s": 3600, "remote_timeout_s": 3600}


def _fleet(plant: Plant, name: str) -> Fleet:
    return Fleet(
        plant, name, 1, 1,
        decode_flags=mock_flags(KV_BYTES), prefill_flags=mock_flags(prefill_tokens_per_s=0.5),
        router=_HOURS,
    )  # fmt: skip


def _fill(fleet: Fleet, depth: int) -> float:
    begin = time.monotonic()
    for start in range(0, depth, BATCH):
        fleet.driver.do("open", count=min(BATCH, depth - start))
        time.sleep(0.2)
    return time.monotonic() - begin


def _burst(fleet: Fleet) -> Use:
    """Open some more, see what that cost, and take them back."""
    with fleet.window() as used:
        fleet.driver.do("open", count=BURST)
        time.sleep(SETTLE_S)
    fleet.driver.do("abort", newest=BURST)
    time.sleep(SETTLE_S)
    return used["decode"]


def run(plant: Plant, rounds: int, quiet: machine.Quiet, many: int = MANY) -> list[Row]:
    """Rows with the ratio of both depths. Raises BenchError."""
    shallow, deep = _fleet(plant, "shallow"), _fleet(plant, "deep")
    try:
        _fill(shallow, FEW)
        took = _fill(deep, many)
        uses: dict[str, list[Use]] = {"shallow": [], "deep": []}
        everybody = [
            *plant.servers,
            *(pid for f in (shallow, deep) for pid in (f.front, *f.decode, *f.prefill)),
        ]
        with quiet.window(everybody):
            for _ in range(rounds):
                uses["shallow"].append(_burst(shallow))
                uses["deep"].append(_burst(deep))
    finally:
        shallow.close()
        deep.close()
    few, more = uses["shallow"], uses["deep"]
    peer = f"at depth {FEW}"
    decisions = [[1e6 * s for use in side for s in use.decisions] for side in (few, more)]
    rows = [
        versus(
            f"a decision at depth {many}", median(decisions[1]), "us", peer,
            median(decisions[0]), at_most=LIMIT,
        ),
        versus(
            f"CPU beside the engine of a job, from decision to stored, at depth {many}",
            median([1e6 * u.ours / BURST for u in more]), "us", peer,
            median([1e6 * u.ours / BURST for u in few]), at_most=LIMIT,
        ),
        versus(
            f"vLLM's scheduler for that job at depth {many} (not ours)",
            median([1e6 * u.engine / BURST for u in more]), "us", peer,
            median([1e6 * u.engine / BURST for u in few]),
        ),
        row(f"{many} jobs queued after", took, "s"),
    ]  # fmt: skip
    for one in rows:
        print(f"  {one.metric:<70} {one.value:>9} {one.unit} {one.peer} {one.peer_value}")
    return rows
