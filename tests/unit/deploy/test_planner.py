"""What `pullfill plan` prints."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy import planner, scaling
from pullfill.deploy.scaling import Settings, State
from pullfill.errors import UnavailableError

REF = ClusterRef("default", "http://h:1", "nats://h:1")


def cluster(**demand: float) -> dict[str, Any]:
    rows = [{"instance_id": f"decode-{n}", "role": "decode", "state": "ready"} for n in (1, 2)]
    rows[0] |= {"load": {"requests": 4, "demand": demand}}  # type: ignore[dict-item]
    rows[1] |= {"load": {"requests": 1, "demand": {}}}  # type: ignore[dict-item]
    return {"workers": rows}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> scaling.Plan:
    told = cluster(prefill_demand=0.5, backlog_s=4.0, pressure=0.6, kv=0.6, prompts=8, missed=8)
    monkeypatch.setattr(planner, "ask", lambda _: told)
    return planner.look(REF, Settings(settle_s=0.0), State())


def test_json(found: scaling.Plan) -> None:
    told = planner.told(found)
    assert json.loads(json.dumps(told)) == told
    assert told["prefill"] == {
        "now": 0,
        "need": pytest.approx(0.714, abs=0.001),
        "right": 1,
        "why": "long prompts keep 0.5 busy, 70% use of each is right; 4.0 s of work wait; "
        "8 of 8 long prompts were computed by decode workers",
    }
    assert told["decode"]["right"] == 1
    assert told["decode"]["why"] == (
        "0.3 full on average, 0.8 is right; the fullest 0.6, by its KV cache"
    )
    assert (told["backlog_s"], told["missed"]) == (4.0, 1.0)
    assert told["moves"] == [{"instance_id": "decode-2", "from": "decode", "to": "prefill"}]


def test_a_line_for_each_role_and_what_to_do(found: scaling.Plan) -> None:
    stream = io.StringIO()
    Console(file=stream, width=200).print(planner.shown(found))
    head, prefill, decode, move = stream.getvalue().splitlines()
    assert head.split() == ["role", "now", "needed", "right", "why"]
    assert prefill.split()[:4] == ["prefill", "0", "0.71", "1"]
    assert decode.split()[:4] == ["decode", "2", "0.75", "1"]
    assert move.startswith("change of role: decode-2 to prefill: 0.71 prefill workers are needed")


def test_without_a_report_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "ask", lambda _: {"workers": []})
    with pytest.raises(UnavailableError, match="pullfill status"):
        planner.plan(REF, Settings())


def test_a_watch_settles_and_does_not_take_a_move_for_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100, 5))
    monkeypatch.setattr(planner.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(planner, "ask", lambda _: cluster(prefill_demand=0.5))

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        if len(looks()) == 5:
            raise KeyboardInterrupt

    printed: list[str] = []

    def looks() -> list[dict[str, Any]]:
        printed.extend(capsys.readouterr().out.splitlines())
        return [json.loads(line) for line in printed]

    monkeypatch.setattr(planner.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        planner.plan(REF, Settings(settle_s=10.0), as_json=True, watch_s=5.0)
    assert [len(one["moves"]) for one in looks()] == [0, 0, 1, 1, 1]
