"""How many connections a KV port accepts: limited by open files, and few that sent no hello."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pullfill.errors import PeerUnavailable
from pullfill.runtime import metrics
from pullfill.transfer.stream import server
from tests.contract.test_transfer_stream import Make, dial
from tests.contract.test_transfer_stream import make as make
from tests.support.stream_held import wait_for
from tests.support.transfer_rigs import DENSE


class Silent:
    """Stands for a connection that says nothing."""

    inside = None


def refused(why: str) -> float:
    return metrics.KV_REFUSED.labels(why)._value.get()


def test_connections_are_bounded_by_open_files(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.machine, "open_files", lambda: server.FILES_SPARED + 4)
    before, connected = refused("open_files"), metrics.KV_CONNECTIONS._value.get()
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    sessions = [rig.connect(mine, region) for _ in range(2)]
    assert metrics.KV_CONNECTIONS._value.get() - connected == 2
    with pytest.raises(PeerUnavailable):
        rig.connect(mine, region)
    assert refused("open_files") - before == 1
    assert "ulimit -n" in caplog.text
    sessions.pop().close()
    wait_for(lambda: region.owner.connections == 1)  # type: ignore[attr-defined]
    sessions.append(rig.connect(mine, region))
    for session in sessions:
        session.close()
    wait_for(lambda: metrics.KV_CONNECTIONS._value.get() == connected)


def test_a_large_fleet_does_not_fill_the_port(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """256 prefill workers with 8 ranks each. None of theirs is warned of when it leaves."""
    monkeypatch.setattr(server.machine, "open_files", lambda: 1 << 16)
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    held = region.owner._server._peers  # type: ignore[attr-defined]
    others = {Silent() for _ in range(256 * 8)}
    held.update(others)
    session = rig.connect(mine, region)
    session.close()
    wait_for(lambda: held == others)
    held.clear()
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_a_fleet_that_connects_at_once_is_served_in_turn(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 1)
    monkeypatch.setattr(server, "STRANGERS_S", 10.0)
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    silent = dial(region)
    wait_for(lambda: len(region.owner._server._strangers) == 1)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(rig.connect, mine, region)
        time.sleep(0.05)
        assert not waiting.done()
        silent.close()
        waiting.result(10).close()


def test_strangers_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 1)
    monkeypatch.setattr(server, "STRANGERS_S", 0.02)
    before = refused("strangers")
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    with dial(region):
        wait_for(lambda: len(region.owner._server._strangers) == 1)  # type: ignore[attr-defined]
        with pytest.raises(PeerUnavailable):
            rig.connect(mine, region)
    assert refused("strangers") - before == 1
    wait_for(lambda: not region.owner._server._strangers)  # type: ignore[attr-defined]
    rig.connect(mine, region).close()


def test_a_worker_raises_its_limit_of_open_files() -> None:
    """Of its own process: it is started with the 1024 that distributions give."""
    script = (
        "import resource; from pullfill.net import this_host;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); this_host.allow_open_files();"
        "print(this_host.open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["300", "300"], done.stderr
