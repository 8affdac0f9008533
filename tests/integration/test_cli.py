"""`pullfill up` and `down` over real servers: what they start, refuse, stop and leave behind.

Workers have tests of their own; here `up` starts the servers, and a role that fails on purpose.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill import wire
from pullfill.deploy import local_servers
from pullfill.deploy.state import is_alive, tagged
from pullfill.net.this_host import host_id
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from tests.support.command_line import SERVERS_ONLY, cluster, detached, foreground, run
from tests.support.waiting import until
from tests.support.workers import record


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directory of a cluster of servers that runs."""
    directory = tmp_path_factory.mktemp("servers") / "state"
    with detached(directory, *SERVERS_ONLY):
        yield directory


@pytest.mark.essential
def test_up_detached_then_down(state: Path) -> None:
    up = run(state, "up", "--detach", *SERVERS_ONLY)
    assert up.returncode == 0, up.stderr
    assert "nats" in up.stdout
    found = cluster(state)
    assert found.namespace == "default"
    assert sorted(entry.role for entry in found.processes) == ["etcd", "nats"]
    assert local_servers.nats_ready(found.nats_url) is None
    assert local_servers.etcd_ready(found.etcd_url) is None
    assert all(is_alive(process) for process in found.processes)

    for entry in found.processes:
        # The process is the server itself, not something that started it.
        name = Path(os.readlink(f"/proc/{entry.pid}/exe")).name
        assert name == {"nats": "nats-server", "etcd": "etcd"}[entry.role]
        assert Path(entry.log).is_file()

    asyncio.run(_register(found.etcd_url, os.getpid()))
    down = run(state, "down")
    assert down.returncode == 0, down.stderr
    assert "stopped 2 of 2" in down.stdout
    by_hand = f"prefill-hand (pid {os.getpid()}) was started by hand"
    assert by_hand in " ".join(down.stdout.split()), "it is left alone"
    assert not any(is_alive(process) for process in found.processes)
    assert not (state / "cluster.json").exists()
    again = run(state, "down")
    assert (again.returncode, "nothing runs" in again.stdout) == (0, True)


@pytest.mark.essential
def test_a_second_up_is_refused_and_harms_nothing(servers: Path) -> None:
    running = cluster(servers).processes
    second = run(servers, "up", "--detach", *SERVERS_ONLY)
    assert second.returncode == 2
    assert len(second.stderr.strip().splitlines()) == 1
    assert all(f"pid {process.pid}" in second.stderr for process in running)
    assert cluster(servers).processes == running
    assert all(is_alive(process) for process in running)


@pytest.mark.essential
def test_down_after_up_was_killed(state: Path) -> None:
    with foreground(state, *SERVERS_ONLY, ready="ready (no frontend)"):
        running = cluster(state).processes
    assert all(is_alive(process) for process in running)
    down = run(state, "down")
    assert down.returncode == 0, down.stderr
    assert not any(is_alive(process) for process in running)
    # Nothing is in the way of the next one, which Ctrl-C ends in order.
    with foreground(state, *SERVERS_ONLY, ready="ready (no frontend)") as up:
        running = cluster(state).processes
        up.send_signal(signal.SIGINT)
        output, _ = up.communicate(timeout=30)
    assert (up.returncode, output.rstrip().endswith("stopped")) == (0, True), output
    assert not any(is_alive(process) for process in running)
    assert not (state / "cluster.json").exists()


async def _register(etcd_url: str, pid: int) -> None:
    made = record("prefill-hand", host_id=host_id(), pid=pid)
    client = await EtcdClient.connect(etcd_url)
    await client.put(keys.worker("default", "prefill", "prefill-hand"), wire.encode(made))
    await client.close()


@pytest.mark.essential
def test_a_child_that_dies_while_starting_takes_nothing_with_it(
    state: Path, tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a torch that loads, the worker dies: say which, show its log, leave nothing."""
    (tmp_path / "torch.py").write_text("raise ImportError('a broken torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = ("--decode", "1", "--prefill", "0", "--frontends", "0")
    with foreground(state, "--model", str(model_path), *one) as up:
        until((state / "cluster.json").exists, 20, "up did not begin")
        launch = cluster(state)
        output, _ = up.communicate(timeout=180)
    assert up.returncode == 1
    assert "error: decode-0 died while starting" in output
    assert "a broken torch" in output
    assert str(state / "logs" / "decode-0.log") in output
    assert tagged(launch.cluster_id) == []
    assert not (state / "cluster.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/does/not/exist"), "no model at /does/not/exist"),
        (("stray",), "unexpected argument 'stray'"),
        (("--etcd", "http://127.0.0.1:1"), "etcd at http://127.0.0.1:1 did not answer"),
    ],
)
@pytest.mark.essential
def test_what_cannot_work_is_one_line_before_anything_starts(
    state: Path, arguments: tuple[str, ...], message: str
) -> None:
    up = run(state, "up", "--port", "0", *arguments)
    assert up.returncode == 2
    assert message in up.stderr
    assert len(up.stderr.strip().splitlines()) == 1
    assert not (state / "cluster.json").exists()
    assert not (state / "logs").exists()


@pytest.mark.essential
def test_commands_that_ask_a_running_cluster(servers: Path) -> None:
    status = run(servers, "status", "--json")
    assert json.loads(status.stdout)["workers"] == []
    assert run(servers, "config", "get", "router.policy").stdout == "cost\n"
    changed = run(servers, "config", "set", "router.max_local_prefill_length", "7")
    assert changed.returncode == 0, changed.stderr
    refused = run(servers, "config", "set", "router.policy", "sometimes")
    assert refused.returncode == 2
    assert "always_local" in refused.stderr
    everything = run(servers, "config", "get").stdout.splitlines()
    assert {"router.max_local_prefill_length 7", "router.policy cost"} <= set(everything)
    drained = run(servers, "drain", "decode-00000000", "--wait")
    assert drained.returncode == 2
    assert "there are: none" in drained.stderr
    assert run(servers, "explain", "cmpl-1").returncode == 1
    assert "no request is refused" in run(servers, "suspects").stdout
    doctor = run(servers, "doctor")
    assert doctor.returncode == 1
    assert "NATS answers" in doctor.stdout
    assert "no decode worker" in doctor.stdout
    by_url = run(Path("/nowhere"), "status", "--json", "--etcd", cluster(servers).etcd_url)
    assert by_url.returncode == 0, by_url.stderr


@pytest.mark.essential
def test_other_peoples_servers_are_used_and_left_alone(servers: Path, state: Path) -> None:
    urls = cluster(servers)
    given = ("--etcd", urls.etcd_url, "--nats", urls.nats_url, "--namespace", "blue")
    assert run(state, "up", "--detach", *SERVERS_ONLY, *given).returncode == 0
    assert cluster(state).processes == []
    assert run(state, "down").returncode == 0
    assert local_servers.etcd_ready(urls.etcd_url) is None
    assert local_servers.nats_ready(urls.nats_url) is None
