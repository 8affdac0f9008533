"""Workers with different block sizes hand prompts over, and answer as one plain engine does.

Decode workers with blocks of 32 and of 96 tokens share one prefill worker with blocks of 64. The
frontend alternates between them. So a prompt that is asked twice is computed for both of them. All
pieces of blocks have 32 tokens. The windows of the models have 96 tokens. No row has a model with
MLA: vLLM's CPU kernel for it has blocks of 16 tokens on both sides (test_mla.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.outages import by_outage
from tests.support.prompts import (
    ask,
    ask_all,
    forget_decode_prefixes,
    going_away,
    random_prompt,
    truth,
)
from tests.support.zoo import ZOO

pytestmark = pytest.mark.engine

STEPS = 6
TOLERANCE = 1e-4
LENGTHS = (2, 33, 65, 97, 128, 200, 700, 1500)

TCP, PULL = ("--transports=tcp",), ("--kv-mode=pull",)
TWO_RANKS = ("--tensor-parallel-size=2",)


@dataclass(frozen=True)
class Row:
    """model: of the zoo.
    sizes: tokens of a block of the two decode workers, and of the prefill worker.
    decode, prefill: more flags of the workers."""

    model: str = "Llama"
    sizes: tuple[int, int, int] = (32, 96, 64)
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()


SHORT = {"shm": Row()}
LONG = {
    "Gemma 3": Row("Gemma 3"),
    "tcp": Row(decode=TCP),
    "decode on two ranks": Row(decode=TWO_RANKS),
    "prefill on two ranks": Row(prefill=TWO_RANKS),
    # A prefill worker with another block size writes all the same.
    "pull": Row(decode=PULL),
    "Gemma 3, tcp, decode on two ranks": Row("Gemma 3", decode=(*TCP, *TWO_RANKS)),
    "Gemma 3, 128 tokens": Row("Gemma 3", (32, 64, 128)),
    "gpt-oss": Row("gpt-oss", (32, 128, 64)),
    "Mistral": Row("Mistral", (64, 128, 96)),
    "Phi-3": Row("Phi-3"),
}


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(row, id=name) for name, row in SHORT.items()),
        *(pytest.param(row, id=name, marks=pytest.mark.long) for name, row in LONG.items()),
    ],
)
def row(request: pytest.FixtureRequest) -> Row:
    found: Row = request.param
    return found


@pytest.fixture(scope="module")
def truth_of(row: Row) -> Iterator[Oracle]:
    with Oracle(ZOO[row.model].checkpoint()) as oracle:
        yield oracle


@pytest.fixture(scope="module")
def cluster(row: Row, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = ZOO[row.model]
    made = Cluster(tmp_path_factory.mktemp("sizes"), model.checkpoint(), kv_mib=192, lease_ttl_s=10)
    *for_decode, for_prefill = row.sizes
    try:
        made.start_servers()
        for size in for_decode:
            made.launch("decode", f"--block-size={size}", *row.decode)
        made.launch("prefill", f"--block-size={for_prefill}", *row.prefill)
        # The development routes, to empty a prefix cache.
        made.launch("frontend", *model.front, env={"VLLM_SERVER_DEV_MODE": "1"})
        made.wait_ready(*made.workers)
        made.set_router(policy="always_remote")
        yield made
        made.assert_clean()
        assert not made.log_errors()
    finally:
        made.stop()


def check(
    cluster: Cluster, oracle: Oracle, prompts: list[list[int]], remote: bool = True
) -> list[int]:
    """Ask each prompt until both decode workers have answered it. Returns how many tokens each
    had cached at its first answer."""
    found: list[dict[str, Any]] = []
    for prompt in prompts:
        [(tokens, logprobs)] = truth(oracle, [prompt], STEPS)
        told: dict[str, dict[str, Any]] = {}
        for _ in range(8):
            answer = ask(cluster, prompt, STEPS)
            assert answer.tokens == tokens, f"prompt of {len(prompt)} tokens"
            assert answer.logprobs == pytest.approx(logprobs, abs=TOLERANCE), len(prompt)
            one = cluster.explain(answer.request_id)
            told.setdefault(one["decode_instance"], one)
            if len(told) == 2:
                break
        assert len(told) == 2, "round robin reaches both workers"
        found += told.values()
    if remote:
        judged = [t for t in found if not by_outage(t)]
        assert {(t["path"], t["attempts"], t["fallback"]) for t in judged} == {("remote", 1, None)}
    return [t["prefix_hit_tokens"] for t in found]


def test_answers_are_those_of_one_engine(row: Row, cluster: Cluster, truth_of: Oracle) -> None:
    for record in [*cluster.records("decode").values(), *cluster.records("prefill").values()]:
        assert record.compat is not None
        assert record.compat.block_size == 1, "tokens of a page are apart"
    # The second decode worker gets what the prefill worker has cached by now.
    cold = [random_prompt(length, seed=61) for length in LENGTHS]
    assert set(check(cluster, truth_of, cold)) == {0}
    longer = [prompt + random_prompt(130, seed=62) for prompt in cold]
    assert max(check(cluster, truth_of, longer)) > 1000  # a hit on both sides
    forget_decode_prefixes(cluster)
    longest = [prompt + random_prompt(60, seed=63) for prompt in longer]
    assert set(check(cluster, truth_of, longest)) == {0}  # a hit on the prefill side only

    cluster.set_router(policy="always_local")
    heads = [random_prompt(length, seed=64) for length in (40, 104, 330, 1000)]
    check(cluster, truth_of, heads, remote=False)
    cluster.set_router(policy="always_remote")
    read = cluster.counter("pullfill_kv_read_bytes_total")
    tails = [head + random_prompt(150, seed=65) for head in heads]
    hits = check(cluster, truth_of, tails)  # a hit on the decode side only
    expected_hits = {len(head) // size * size for head in heads for size in row.sizes[:2]}
    assert set(hits) == expected_hits, "also hits that end inside a block of the prefill worker"
    assert cluster.counter("pullfill_kv_read_bytes_total") > read

    many = [random_prompt(length, seed=66) for length in range(90, 1300, 100)]
    answers = ask_all(cluster, many, STEPS)
    expected = truth(truth_of, many, STEPS)
    assert [answer.tokens for answer in answers] == [tokens for tokens, _ in expected]
    with going_away(cluster, random_prompt(1800, seed=67)):
        pass
    cluster.of("prefill")[0].arm("prefill.before_commit=kill@1")
    last = random_prompt(500, seed=68)
    answers = [ask(cluster, last, STEPS) for _ in range(2)]  # computed by the decode workers
    assert [answer.tokens for answer in answers] == [truth(truth_of, [last], STEPS)[0][0]] * 2
    assert cluster.of("prefill") == []
