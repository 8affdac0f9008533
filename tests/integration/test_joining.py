"""Workers come by being launched and leave by being drained, under load and without a failure.
Those that do not fit, or find no servers, say why in one line and exit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pullfill.engine.compat import model_fingerprint
from tests.support.checkpoint import scaled_checkpoint
from tests.support.cluster import Cluster, Worker, pullfill, until
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.prompts import ask, assert_right, random_prompt
from tests.support.zoo import NO_FP8, ZOO

pytestmark = pytest.mark.engine

ROUNDED = 2e-2
"""Of log probabilities. Of 8 bits, a number that rounding moves over the border of two codes
changes by 6 %."""


@pytest.mark.essential
def test_second_prefill_joins_by_hand_and_leaves_by_lease_revocation(
    cluster: Cluster, oracle: Oracle
) -> None:
    with Load(cluster, seed=1000) as load:
        second = cluster.add("prefill")
        until(lambda: second.instance_id in load.seen("prefill_instance"), 30, "it takes work")
        done_before = len(load.done)
        cluster.revoke_lease(second)
        assert second.wait(30) == 0
        until(lambda: len(load.done) > done_before + 6, 30, "load goes on")
    load.check(oracle)
    given_up = [told for told in load.told() if told["fallback"]]
    assert all("NATS" in (told["outage"] or "") for told in given_up), given_up[:5]


@pytest.mark.essential
def test_second_decode_joins_by_hand_and_is_drained_by_command(
    cluster: Cluster, oracle: Oracle
) -> None:
    with Load(cluster, seed=2000) as load:
        second = cluster.add("decode")
        until(lambda: second.instance_id in load.seen("decode_instance"), 30, "it takes work")
        drained = pullfill(cluster, "drain", second.instance_id, "--wait", "--timeout", "30")
        assert drained.returncode == 0, drained.stdout + drained.stderr
        assert second.wait(10) == 0
        done_before = len(load.done)
        until(lambda: len(load.done) > done_before + 3, 30, "load goes on")
    load.check(oracle)


def last_error(worker: Worker, within_s: float = 90.0) -> str:
    """Waits for the process to end with a failure; its one `error:` line."""
    code = worker.wait(within_s)
    lines = [x for x in worker.log.read_text().splitlines() if x.startswith("error: ")]
    assert code in (1, 2), worker.tail()
    assert len(lines) == 1, worker.tail()
    assert "Traceback" not in worker.log.read_text()
    return lines[0]


@pytest.mark.essential
def test_a_worker_that_does_not_fit_names_the_field(cluster: Cluster) -> None:
    misfits = {
        "block_size": cluster.launch("prefill", "--block-size=64"),
        "dtype": cluster.launch("decode", "--dtype=bfloat16"),
        "model": cluster.launch("prefill", "--served-model-name=another"),
    }
    for field, worker in misfits.items():
        said = last_error(worker)
        assert f"its {field} is" in said, said
        assert re.search(r"(decode|prefill)-[0-9a-f]{8}", said), "names whom it disagrees with"


@pytest.mark.long
def test_the_model_is_the_same_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """Also where vLLM's code of the model changes the model's config while it loads. With one rank
    it does so in the worker's own process, with two in others."""
    model = ZOO["Falcon-H1 (Mamba-2)"]
    if model.missing:
        pytest.skip(model.missing)
    with Cluster(tmp_path, model.checkpoint(), lease_ttl_s=10) as cluster:
        cluster.start(("decode", *model.flags), ("frontend", *model.flags))
        said = last_error(cluster.launch("prefill", *model.flags, "--tensor-parallel-size=2"))
        # States are moved between workers with one rank only. Others have their memory as it is.
        assert "its num_layers is" in said


@pytest.mark.essential
def test_unreachable_servers_are_retried_and_then_named(cluster: Cluster) -> None:
    nowhere = "127.0.0.1:9"
    no_etcd = cluster.launch("decode", "--etcd", f"http://{nowhere}", "--connect-timeout", "2")
    no_nats = cluster.launch("prefill", "--nats", f"nats://{nowhere}", "--connect-timeout", "2")
    said = last_error(no_etcd)
    assert "etcd" in said
    assert nowhere in said
    said = last_error(no_nats)
    assert "NATS" in said
    assert nowhere in said


@pytest.mark.long
@pytest.mark.essential
@pytest.mark.skipif(bool(NO_FP8), reason=NO_FP8)
def test_other_scales_are_refused_by_name_and_prompts_stay_local(tmp_path: Path) -> None:
    model, other = scaled_checkpoint(0.05), scaled_checkpoint(0.01)
    assert model_fingerprint(str(model)) == model_fingerprint(str(other)), "it misses the scales"
    with Oracle(model) as oracle, Cluster(tmp_path, model, lease_ttl_s=10) as cluster:
        cluster.start("decode", "frontend", policy="always_remote")
        misfit = cluster.launch("prefill", "--model", str(other))
        assert "its kv_scales is" in last_error(misfit)
        cluster.workers.remove(misfit)
        prompts = [random_prompt(length, seed=71) for length in (33, 300, 1100)]
        _prefilled(cluster, oracle, prompts, ("local", "no_prefill_worker"))

        cluster.launch("prefill")
        cluster.wait_ready(*cluster.workers)
        for record in cluster.records("prefill").values():
            assert record.compat.kv_cache_dtype.startswith("fp8")
            assert record.compat.kv_scales != "1"
        prompts = [prompt + random_prompt(200, seed=72) for prompt in prompts]
        _prefilled(cluster, oracle, prompts, ("remote", "policy_always_remote"))
        cluster.assert_clean()


def _prefilled(
    cluster: Cluster, oracle: Oracle, prompts: list[list[int]], how: tuple[str, str]
) -> None:
    answers = [ask(cluster, prompt) for prompt in prompts]
    assert_right(oracle, prompts, answers, 6, ROUNDED)
    for answer in answers:
        told = cluster.explain(answer.request_id)
        assert (told["path"], told["reason"]) == how
