"""Which frontend is asked, and what it is shown."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import members
from pullfill.errors import RegistryUnavailable
from pullfill.net import http_proof
from pullfill.net.security import FrontendSecurity, Security
from pullfill.registry.client import EtcdClient
from tests.support.http_stub import serving


def test_the_frontend_of_the_state_directory_is_asked_before_etcd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With etcd away it knows more than etcd."""
    cluster = {"namespace": "n", "nats_url": "nats://h", "etcd_url": "http://h", "processes": []}
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(cluster | {"frontend_url": "f"}))
    asked: list[object] = []

    async def connect(url: str, **_: object) -> None:
        asked.append(url)
        raise RegistryUnavailable("away")

    monkeypatch.setattr(EtcdClient, "connect", connect)
    urls = members.frontend_urls(ClusterRef("n", "http://h", "nats://h", tmp_path))
    assert (next(urls), asked) == ("f", [])
    assert list(urls) == []
    assert asked == ["http://h"]
    for namespace, etcd in (("n", "http://other"), ("other", "http://h")):
        ref = ClusterRef(namespace, etcd, "nats://h", tmp_path)
        assert list(members.frontend_urls(ref)) == [], "the directory is of another cluster"


@pytest.mark.parametrize(
    ("api_key_file", "answer", "shown", "told"),
    [("api", 200, [False], 200), ("api", 401, [False, True], 200), (None, 401, [False], 401)],
    ids=["open", "locked", "without"],
)
def test_a_frontend_is_shown_the_proof_of_an_api_key_when_it_asks_and_never_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    api_key_file: str | None,
    answer: int,
    shown: list[bool],
    told: int,
) -> None:
    """Its address comes from etcd: it may be anybody's."""
    proofs: list[bool] = []
    path, known = "/pullfill/requests/cmpl-ä", [http_proof.digest(b"api-key-0123456789")]

    def locked(asked: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        assert (unquote(asked), "-key-" in str(headers)) == (path, False)
        shown = headers.get(http_proof.HEADER, "").encode()
        proofs.append(http_proof.proven(shown, path, known, time.time()))
        return (200 if proofs[-1] else answer), {"workers": []}

    monkeypatch.chdir(tmp_path)
    for name in ("api", "admin"):
        Path(name).write_text(f"{name}-key-0123456789\nanother-{name}-key-01234\n")
        Path(name).chmod(0o600)
    frontend = FrontendSecurity(api_key_file=api_key_file, admin_key_file="admin")
    ref = ClusterRef("ns", "http://etcd", "nats://nats", security=Security(frontend=frontend))
    with serving(locked) as url:
        assert members.ask_frontend(ref, url, quote(path))[0] == told
    assert proofs == shown


def test_why_a_frontend_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    no = (503, b'{"reasons": ["why"]}')
    answers = [no, no, (200, b"{}"), (503, b"no JSON")]
    monkeypatch.setattr(members, "http_get", lambda url, _: answers.pop(0))
    assert members.why_not_ready("http://f", 0.0) == ["why"]
    assert members.why_not_ready("http://f", 20.0) == []
    assert len(members.why_not_ready("http://f", 0.0)) == 1
