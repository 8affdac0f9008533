"""Workers on hosts of their own, with wires between them that fail.

In every test a request may take longer, and may be prefilled locally; none fails, and every token
is that of one plain engine.
"""

from __future__ import annotations

import itertools
import time

import pytest

from tests.support.checked import DEADLINE_S
from tests.support.cluster import until
from tests.support.hosts import SpreadCluster
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.prompts import ask, assert_right, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SILENT_FOR_S = 7.0
"""How long a wire is cut: longer than any silence that a worker takes for a loss (5 s), and than
the lease of a worker (2 s)."""
PAIRS = {
    "frontend-decode": ("front", "decode0"),
    "frontend-servers": ("front", "servers"),
    "decode-prefill": ("decode0", "prefill0"),
    "decode-servers": ("decode0", "servers"),
    "prefill-servers": ("prefill0", "servers"),
}
ANSWERS = {
    ("decode0", "prefill0"),
    ("servers", "front"),
    ("servers", "decode0"),
    ("servers", "prefill0"),
}
"""Directions in which a host only answers. It may be silent if the other direction is cut too."""
QUICK = {("decode-prefill", "there"), ("frontend-decode", "both")}
"""Cuts that the ordinary run tries; the others take minutes and are `long`."""
CUTS = [
    pytest.param(pair, way, marks=() if (pair, way) in QUICK else pytest.mark.long)
    for pair in PAIRS
    for way in ("both", "there", "back")
]


def checked_load(cluster: SpreadCluster, oracle: Oracle, load: Load) -> None:
    load.check(oracle)
    assert load.slowest_s < DEADLINE_S
    until(lambda: remote_again(cluster, oracle), 60, "remote prefills again")


_seeds = iter(range(40_000, 50_000))


def remote_again(cluster: SpreadCluster, oracle: Oracle) -> bool:
    prompt = random_prompt(700, seed=next(_seeds))
    answer = ask(cluster, prompt)
    assert_right(oracle, [prompt], [answer])
    return bool(cluster.explain(answer.request_id)["path"] == "remote")


@pytest.mark.parametrize(("pair", "way"), CUTS)
@pytest.mark.essential
def test_a_cut_wire_fails_no_request(
    pair: str, way: str, cluster: SpreadCluster, oracle: Oracle
) -> None:
    here, there = PAIRS[pair]
    forth, back = (here, there), (there, here)
    ways = {"both": [forth, back], "there": [forth], "back": [back]}
    with Load(cluster, threads=3, lengths=(40, 700, 1400), seed=next(_seeds)) as load:
        load.more(3)
        cut = {hosts: cluster.hosts.wire(*hosts) for hosts in ways[way]}
        for wire in cut.values():
            wire.cut = True
        time.sleep(SILENT_FOR_S)
        used = {hosts for hosts, wire in cut.items() if wire.stopped}
        cluster.hosts.wires.heal()
        assert used >= (cut.keys() - ANSWERS if way == "both" else cut.keys())
        answered = len(load.done)
        until(lambda: len(load.done) >= answered + 3, 60, "load after the cut")
    checked_load(cluster, oracle, load)


@pytest.mark.parametrize(
    ("fault", "value"),
    [
        pytest.param("loss", 0.05, id="loss-5%", marks=pytest.mark.long),
        pytest.param("delay_s", 0.05, id="delay-50ms", marks=pytest.mark.long),
        pytest.param("rate", 20e6, id="rate-20MB/s"),
    ],
)
@pytest.mark.essential
def test_poor_wires_fail_no_request(
    fault: str, value: float, cluster: SpreadCluster, oracle: Oracle
) -> None:
    names = ("servers", "front", "decode0", "decode1", "prefill0", "prefill1")
    wires = [cluster.hosts.wire(*hosts) for hosts in itertools.permutations(names, 2)]
    for wire in wires:
        setattr(wire, fault, value)
    with Load(cluster, threads=3, lengths=(40, 700, 1400), seed=next(_seeds)) as load:
        load.more(20, 120)
    assert sum(wire.stopped + wire.delayed for wire in wires) > 0, "the wires did nothing"
    assert "remote" in load.seen("path")
    assert cluster.counter("pullfill_kv_write_bytes_total", transport="tcp") > 0
    checked_load(cluster, oracle, load)
