"""What real processes tell of a remote prefill. Everything but the model is real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import MOCK, MODEL, Cluster
from tests.support.otlp import Receiver
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.engine

SLOW = '--additional-config={"mock": {"step_s": 0.002}}'


@pytest.mark.long
def test_a_remote_prefill_in_traces_and_logs(tmp_path: Path, model_path: Path) -> None:
    with Cluster(tmp_path / "mock", model_path) as cluster, Receiver() as receiver:
        cluster.start_servers()
        traces = f"--otlp-traces-endpoint={receiver.url}"
        both = (traces, "--log-format=json")
        soon = {"OTEL_BSP_SCHEDULE_DELAY": "200"}
        cluster.launch("decode", *MOCK, traces, env=soon)
        cluster.launch("prefill", *MOCK, SLOW, "--concurrency=2", *both, env=soon)
        cluster.launch("frontend", *both, env=soon)
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote")
        kinds = {one.compat.isa for one in cluster.records("prefill").values() if one.compat}
        assert kinds == {"mock"}, "no worker with a model exchanges KV with it"
        check_trace(cluster, receiver)
        check_logs(cluster)
        cluster.assert_clean()


def check_trace(cluster: Cluster, receiver: Receiver) -> None:
    """A client's trace goes through all processes, and vLLM's own span is part of it."""
    client, trace = "00f067aa0ba902b7", "4bf92f3577b34da6a3ce929d0e0e4736"
    cluster.client().completions.create(
        model=MODEL,
        prompt=random_prompt(900, seed=3),
        max_tokens=3,
        extra_headers={"traceparent": f"00-{trace}-{client}-01"},
        extra_body={"ignore_eos": True},
    )
    parents = {
        "frontend.request": None,
        "frontend.dispatch": "frontend.request",
        "llm_request": "frontend.dispatch",
        "decode.request": "frontend.dispatch",
        "decode.remote_prefill": "decode.request",
        "queue.wait": "decode.remote_prefill",
        "decode.commit": "decode.remote_prefill",
        "prefill.attempt": "decode.remote_prefill",
        "prefill.claim": "prefill.attempt",
        "prefill.compute": "prefill.attempt",
        "transfer.write": "prefill.attempt",
    }
    receiver.wait_for(*parents, trace=trace)
    spans = {span.name: span for span in receiver.spans if span.trace == trace}
    assert set(spans) == set(parents)
    for name, parent in parents.items():
        assert spans[name].parent == (spans[parent].id if parent else client), name
        assert not spans[name].error
    where = {n: s.resource.get("service.instance.id") for n, s in spans.items()}
    names = {w.role: w.instance_id for w in cluster.workers}
    assert where["decode.request"] == names["decode"]
    assert where["transfer.write"] == names["prefill"]


def check_logs(cluster: Cluster) -> None:
    """Each line is an object that says who wrote it: ours, vLLM's, uvicorn's."""
    loggers = set()
    for worker in (*cluster.of("prefill"), *cluster.of("frontend")):
        lines = [json.loads(line) for line in worker.log.read_text().splitlines()]
        assert {line["role"] for line in lines} == {worker.role}
        assert lines[-1]["instance_id"].startswith(worker.role)
        loggers |= {line["logger"].partition(".")[0] for line in lines}
    assert {"pullfill", "vllm", "uvicorn"} <= loggers
