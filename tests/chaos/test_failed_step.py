"""A step of a real engine fails. Requests that were not in it are no suspects."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.answers import ask_for
from tests.support.cluster import MODEL, Cluster, until

pytestmark = pytest.mark.engine

KILLER = [251, 20, 21]
FAILS = "decode.prompt.251=error:killed by 251;engine.step=sleep:0.05"
WAITING = [[30 + n, 40, 41 + n] for n in range(4)]
ONE_AT_A_TIME = ("--max-num-seqs", "1")


@pytest.mark.essential
def test_who_waits_in_the_queue_of_a_failed_engine_goes_on_elsewhere(
    tmp_path: Path, model_path: Path
) -> None:
    """One request runs. The one that kills the engine waits for a slot, and others wait behind
    it."""
    with Cluster(tmp_path / "cluster", model_path) as cluster:
        cluster.start_servers()
        first = cluster.launch("decode", *ONE_AT_A_TIME, failpoints=FAILS)
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        body = {
            "model": MODEL, "prompt": [10, 11], "max_tokens": 3500, "stream": True,
            "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        url = f"{cluster.frontend_url}/v1/completions"
        with httpx.Client(verify=False) as http, http.stream("POST", url, json=body) as running:
            assert running.status_code == 200
            lines = running.iter_lines()  # kept: its end would end the request
            assert next(lines).startswith("data: {")
            killer = ask_for(cluster, KILLER, 8)
            until(lambda: cluster.load_of(first).get("waiting") == 1, 10, "the killer waits")
            asked = [ask_for(cluster, prompt, 8) for prompt in WAITING]
            until(lambda: cluster.load_of(first).get("waiting") == 5, 10, "all wait")
            second = cluster.launch("decode", *ONE_AT_A_TIME)
            until(lambda: cluster.seen([second]), 60, "the second worker is ready")
            assert cluster.load_of(first)["waiting"] == 5
        until(lambda: not first.alive, 20, "the first worker is gone")
        for heard in (killer, *asked):
            assert heard.done.wait(60), "it does not end"
            assert (heard.error, len(heard.tokens)) == ("", 8)
        assert "killed by 251" in first.log.read_text()
        assert cluster.counter("pullfill_suspect_total", result="suspected") == 1
        again = [ask_for(cluster, prompt, 8) for prompt in WAITING]
        for heard, right in zip(asked, again, strict=True):
            assert right.done.wait(60)
            assert heard.tokens == right.tokens
