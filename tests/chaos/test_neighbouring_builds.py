"""Processes of two builds in one cluster, as during every rolling upgrade."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.checked import checked
from tests.support.cluster import Cluster, until
from tests.support.load import Load
from tests.support.old_build import first_build, old_build
from tests.support.oracle import Oracle

SLOW_S = 20.0
"""A job that its reader cannot use would wait for the claim timeout, here 30 s."""


def pairs(load: Load) -> set[tuple[str, str]]:
    """Which decode worker had which prefill worker compute for it."""
    return {(t["decode_instance"], t["prefill_instance"]) for t in load.told()}


@pytest.mark.long
@pytest.mark.essential
def test_row_22_two_builds_work_together_in_every_pair(
    paired: Cluster, oracle: Oracle, tmp_path: Path
) -> None:
    program = old_build(first_build(), tmp_path)
    new_url = paired.frontend_url
    olds = [paired.launch(role, program=program) for role in ("decode", "prefill", "frontend")]
    old_url, paired.frontend_url = paired.frontend_url, new_url
    everybody = [w for role in ("decode", "prefill", "frontend") for w in paired.of(role)]
    paired.wait_ready(*everybody)
    decodes, prefills = ({w.instance_id for w in paired.of(r)} for r in ("decode", "prefill"))
    every = set(itertools.product(decodes, prefills))
    assert len(every) == 4
    for paired.frontend_url in (old_url, new_url):
        paired.wait_ready(*everybody)
        with checked(paired, oracle) as check, check.load(threads=3, seed=15_000) as load:
            until(lambda: every <= pairs(load), 60, "each prefill worker served each decode worker")
        assert load.paths() == {"remote"}
        assert load.slowest_s < SLOW_S
    with checked(paired, oracle) as check, check.load(threads=3, seed=16_000) as load:
        for old in olds:
            assert old.stop(60.0) == 0
            done = len(load.done)
            until(lambda: len(load.done) > done + 3, 60, "load goes on")  # noqa: B023
    assert load.slowest_s < SLOW_S
