"""Hosts whose clocks nobody synchronises: each process is 90 s away from the next."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import web
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask, random_prompt, truth
from tests.support.zygote import CLOCK

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

KEY = secrets.token_hex(16)


@pytest.fixture
def apart(model_path: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Two frontends with one key, and workers that serve by priority."""
    cluster = Cluster(tmp_path, model_path, api_key=KEY)
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "security.toml").write_text('[frontend]\napi_key_file = "key"\n')
    security = {"PULLFILL_SECURITY": str(tmp_path / "security.toml")}
    shifts = {"decode": (0, 90), "prefill": (-90,), "frontend": (-90, 0)}
    try:
        cluster.start_servers()
        for role, seconds in shifts.items():
            for shift in seconds:
                cluster.launch(role, env={**security, CLOCK: str(shift)})
        cluster.set_router(policy="always_remote")
        cluster.wait_ready(*cluster.workers)
        yield cluster
    finally:
        cluster.stop()


def test_clocks_90_s_apart_disturb_nothing(apart: Cluster, oracle: Oracle) -> None:
    late = apart.frontend_url
    prompts = [random_prompt(n, seed=35_000) for n in (40, 700, 701, 1400)]
    answers = [ask(apart, prompt) for prompt in prompts]
    assert [a.tokens for a in answers] == [t for t, _ in truth(oracle, prompts, 6)]
    told = [apart.explain(a.request_id) for a in answers]
    assert {t["path"] for t in told} == {"remote"}
    assert {t["decode_instance"] for t in told} == {w.instance_id for w in apart.of("decode")}
    assert all(0 <= ms < 60_000 for t in told for ms in t["timings_ms"].values() if ms is not None)
    # The other frontend asks the one that served them, with a proof of the key.
    other = next(r.http for r in apart.records("frontend").values() if r.http != late)
    headers = {"Authorization": f"Bearer {KEY}"}
    found = web.get(f"{other}/pullfill/requests/{answers[1].request_id}", headers=headers)
    assert found.status_code == 200, found.text
    assert {w["state"] for w in apart.status()["workers"]} == {"ready"}
    apart.assert_clean()
