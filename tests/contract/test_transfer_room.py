"""How many connections a KV port accepts, how few of them sent no hello, and who has a thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pullfill.errors import PeerUnavailable
from pullfill.runtime import metrics
from pullfill.transfer.stream import stream_server as server
from tests.contract.test_transfer_stream import Make, dial
from tests.contract.test_transfer_stream import make as make
from tests.support.stream_held import wait_for
from tests.support.transfer_rigs import DENSE


def served() -> int:
    """Connections that have a thread, also those that have not sent their hello."""
    return sum(thread.name.startswith("kv-127") for thread in threading.enumerate())


def refused(why: str) -> float:
    return metrics.KV_REFUSED.labels(why)._value.get()


@pytest.mark.essential
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


def test_only_strangers_are_few(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A large fleet does not fill the port. None of its workers is warned of when it leaves."""
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    fleet = [rig.connect(mine, region) for _ in range(server.MAX_STRANGERS + 16)]
    assert region.owner.connections == len(fleet)  # type: ignore[attr-defined]
    for session in fleet:
        session.close()
    wait_for(lambda: not served())
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_a_fleet_that_connects_at_once_is_served_in_turn(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 1)
    monkeypatch.setattr(server, "STRANGERS_S", 10.0)
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    silent = dial(region)
    wait_for(lambda: served() == 1)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(rig.connect, mine, region)
        time.sleep(0.05)
        assert not waiting.done()
        silent.close()
        waiting.result(10).close()


def test_idle_connections_keep_no_peer_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them, renewed every 5 s, closed the port to everybody."""
    monkeypatch.setattr(server, "STRANGERS_S", 0.02)
    before = refused("strangers")
    rig = make()
    region, mine = rig.region(DENSE), rig.local(DENSE)
    idle = [dial(region) for _ in range(server.MAX_STRANGERS)]
    wait_for(lambda: served() == server.MAX_STRANGERS)
    for ended in range(3):
        rig.connect(mine, region).close()
        assert refused("strangers") - before == ended + 1, "they are bounded"
        assert idle[ended].recv(1) == b"", "the oldest was ended"
        idle.append(dial(region))
        wait_for(lambda: served() == server.MAX_STRANGERS)
    for each in idle:
        each.close()
    wait_for(lambda: not served())


def test_a_worker_raises_its_limit_of_open_files() -> None:
    """Of its own process: it is started with the 1024 that distributions give."""
    script = (
        "import resource; from pullfill.net import this_host;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); this_host.allow_open_files();"
        "print(this_host.open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["300", "300"], done.stderr
