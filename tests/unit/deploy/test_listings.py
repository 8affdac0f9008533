"""`pullfill registry ls`. The queue's commands are in tests/contract/test_queue_browse.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pullfill.deploy import listings
from tests.support.workers import record

WHERE = ("--etcd", "http://h:1", "--namespace", "n")


def test_registry_ls(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here: list[Any] = [record("decode-1", http="http://h:2"), record("frontend-7")]
    monkeypatch.setattr(listings, "ask_etcd", lambda ref, question: here)
    assert main("registry", "ls", *WHERE) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["role", "instance_id", "state"]
    assert first.split()[:3] == ["decode", "decode-1", "ready"]
    assert second.split()[:2] == ["frontend", "frontend-7"]
    assert main("registry", "ls", "--json", *WHERE) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["instance_id"] for row in told] == ["decode-1", "frontend-7"]
    assert told[0]["http"] == "http://h:2"
    here.clear()
    assert main("registry", "ls", *WHERE) == 0
    assert capsys.readouterr().out == "no member is registered\n"


def test_what_others_have_named_moves_no_cursor(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here: list[Any] = [record("d-[red]-\x1b[2J-:boom:-\n-x", http="http://h:2")]
    monkeypatch.setattr(listings, "ask_etcd", lambda ref, question: here)
    assert main("registry", "ls", *WHERE) == 0
    assert "d-[red]-?[2J-:boom:-?-x" in capsys.readouterr().out
