"""Workers that do not fit, or find no servers, say why in one line and exit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Worker
from tests.support.zoo import ZOO

pytestmark = pytest.mark.engine


def last_error(worker: Worker, within_s: float = 90.0) -> str:
    """Waits for the process to end with a failure; its one `error:` line."""
    code = worker.process.wait(within_s)
    lines = [x for x in worker.log.read_text().splitlines() if x.startswith("error: ")]
    assert code in (1, 2), worker.tail()
    assert len(lines) == 1, worker.tail()
    assert "Traceback" not in worker.log.read_text()
    return lines[0]


@pytest.mark.essential
def test_a_worker_that_does_not_fit_names_the_field(cluster: Cluster) -> None:
    misfits = {
        "kv_cache_dtype": cluster.launch("prefill", "--kv-cache-dtype=fp8"),
        "dtype": cluster.launch("decode", "--dtype=bfloat16"),
    }
    for field, worker in misfits.items():
        said = last_error(worker)
        assert field in said, said
        assert re.search(r"(decode|prefill)-[0-9a-f]{8}", said), "names whom it disagrees with"
    another_model = cluster.launch("prefill", "--served-model-name=another")
    assert "model" in last_error(another_model)


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


def test_wrong_flags_and_paths_are_told_before_anything_is_loaded(cluster: Cluster) -> None:
    assert "no-such-flag" in last_error(cluster.launch("decode", "--no-such-flag=1"))
    wrong = cluster.launch("decode", "--model", "/does/not/exist")
    assert "/does/not/exist" in last_error(wrong)
    config = cluster.directory / "vllm.yaml"
    config.write_text("data-parallel-size: 2\n")
    assert "data_parallel_size" in last_error(cluster.launch("prefill", "--config", str(config)))
    config.write_text("tensor-parallel-size: 2\n")
    told = last_error(cluster.launch("prefill", "--config", str(config)))
    assert "as --tensor-parallel-size" in told
