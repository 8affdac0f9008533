"""What real processes tell of a remote prefill. Everything but the model is real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import MOCK, MODEL, Cluster
from tests.support.otlp import Receiver
from tests.support.prompts import random_prompt

CLIENT, TRACE = "00f067aa0ba902b7", "4bf92f3577b34da6a3ce929d0e0e4736"
PARENTS = {
    "frontend.dispatch": "frontend.request",
    "llm_request": "frontend.dispatch",
    "decode.request": "frontend.dispatch",
    "prefill.attempt": "decode.remote_prefill",
}
"""Of spans of another process, or of vLLM. The others: tests/contract/test_traces.py."""


@pytest.mark.engine
@pytest.mark.long
def test_a_remote_prefill_in_traces_and_logs(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    with Cluster(tmp_path / "mock", model_path) as cluster, Receiver() as receiver:
        flags = (f"--otlp-traces-endpoint={receiver.url}", "--log-format=json")
        workers = [(role, *MOCK, *flags) for role in ("decode", "prefill")]
        cluster.start(*workers, ("frontend", *flags), policy="always_remote")
        cluster.client().completions.create(
            model=MODEL, prompt=random_prompt(900, seed=3), max_tokens=3,
            extra_headers={"traceparent": f"00-{TRACE}-{CLIENT}-01"},
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        receiver.wait_for(
            "frontend.request", "decode.commit", "transfer.write", *PARENTS, trace=TRACE
        )
        spans = {span.name: span for span in receiver.spans if span.trace == TRACE}
        assert not any(span.error for span in spans.values())
        assert spans["frontend.request"].parent == CLIENT
        for name, parent in PARENTS.items():
            assert spans[name].parent == spans[parent].id, name
        where = {name: span.resource.get("service.instance.id") for name, span in spans.items()}
        names = {worker.role: worker.instance_id for worker in cluster.workers}
        assert where["decode.request"] == names["decode"]
        assert where["transfer.write"] == names["prefill"]
        cluster.assert_clean()

        loggers = set()  # each line is an object that says who wrote it: ours, vLLM's, uvicorn's
        for worker in cluster.workers:
            lines = [json.loads(line) for line in worker.log.read_text().splitlines()]
            assert {line["role"] for line in lines} == {worker.role}
            assert lines[-1]["instance_id"].startswith(worker.role)
            loggers |= {line["logger"].partition(".")[0] for line in lines}
        assert {"pullfill", "vllm", "uvicorn"} <= loggers
