"""Core: errors, identifiers, clock, log, host, failpoints, and the cluster reference."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from pullfill import clock, errors, ids
from pullfill.config import (
    CLUSTER_FILE,
    ClusterFile,
    ClusterRef,
    ProcessEntry,
    read_cluster_file,
)
from pullfill.engine import entry
from pullfill.errors import ConfigError
from pullfill.net import this_host
from pullfill.runtime import failpoints, log
from tests.support.fakes import FakeClock


def _subclasses(kind: type[BaseException]) -> set[type[BaseException]]:
    return {kind}.union(*(_subclasses(child) for child in kind.__subclasses__()))


class TestErrors:
    def test_what_can_help_to_retry(self) -> None:
        retryable = {
            name
            for name, kind in vars(errors).items()
            if isinstance(kind, type) and getattr(kind, "retryable", False) is True
        }
        assert retryable == {
            "UnavailableError", "QueueUnavailable", "RegistryUnavailable", "PeerUnavailable",
            "OverloadedError", "QueueFull", "TransferFailed",
        }  # fmt: skip

    def test_the_docstring_draws_the_whole_tree(self) -> None:
        assert errors.__doc__
        for kind in _subclasses(errors.PullfillError):
            if kind.__module__ == errors.__name__:
                assert kind.__name__ in errors.__doc__

    def test_a_refused_claim_is_retryable_only_with_a_time(self) -> None:
        assert errors.ClaimRefused("x", reason="held", retry_after_s=0.1).retryable
        assert not errors.ClaimRefused("x", reason="closed").retryable

    def test_incompatible_names_the_field(self) -> None:
        assert errors.IncompatibleError("x", field="dtype").field == "dtype"


class TestIds:
    def test_new_ones_differ_and_are_names(self) -> None:
        made = {ids.new_instance_id("decode") for _ in range(50)}
        made |= {ids.new_incarnation() for _ in range(50)} | {ids.new_job_id() for _ in range(50)}
        assert len(made) == 150
        assert all(ids.is_name(name) for name in made)

    @pytest.mark.parametrize("name", ["a", "default", "a-b_c9", "a" * 63])
    def test_names(self, name: str) -> None:
        assert ids.is_name(name)

    @pytest.mark.parametrize("name", ["", "A", "a.b", "a/b", "-a", "a b", "a\n", "a" * 64, "é"])
    def test_not_names(self, name: str) -> None:
        assert not ids.is_name(name)


class TestSmallThings:
    def test_the_clock_goes_on(self) -> None:
        first = clock.SYSTEM_CLOCK.monotonic()
        assert clock.SYSTEM_CLOCK.monotonic() >= first

    def test_host_id_is_the_same_in_another_process(self) -> None:
        code = "from pullfill.net.this_host import host_id; print(host_id())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == this_host.host_id()
        assert ids.is_name(this_host.host_id())

    def test_log_writes_one_line_and_setup_is_idempotent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        logger = logging.getLogger("pullfill")
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        level = logger.level
        try:
            log.setup("decode", "INFO")
            log.setup("decode", "INFO")
            log.get("room.part").info("hello %d", 1)
            log.get("room.part").debug("not shown")
        finally:
            logger.setLevel(level)
        lines = stream.getvalue().splitlines()
        assert len(lines) == 1
        assert "I decode pullfill.room.part: hello 1" in lines[0]

    def test_a_level_that_there_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(log.LEVEL_ENV, "verbose")
        with pytest.raises(ConfigError, match=r"PULLFILL_LOG_LEVEL='verbose'.*DEBUG, INFO"):
            log.setup("decode")

    @pytest.mark.parametrize("debug", ["", "1"])
    def test_an_error_is_one_line_unless_more_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], debug: str
    ) -> None:
        monkeypatch.setenv(log.DEBUG_ENV, debug)
        try:
            raise ConfigError("no good")
        except ConfigError as exc:
            log.complain(exc)
        told = capsys.readouterr().err
        assert told.endswith("error: no good\n")
        assert ("Traceback" in told) == bool(debug)

    @pytest.mark.parametrize("debug", ["", "1"])
    async def test_a_worker_that_ends_shows_where_if_asked(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], debug: str
    ) -> None:
        async def serve() -> int:
            raise ConfigError("no good")

        codes: list[int] = []
        monkeypatch.setenv(log.DEBUG_ENV, debug)
        monkeypatch.setattr(entry, "leave", codes.append)
        monkeypatch.setattr(entry.check, "require_version", lambda: "")
        await entry._serve("decode", serve)
        told = capsys.readouterr().err
        assert codes == [2]
        assert told.endswith("error: no good\n")
        assert ("in serve" in told) == bool(debug)

    def test_who_shares_another_directory_shares_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = this_host.host_id.__wrapped__()
        monkeypatch.setenv(this_host.SHM_DIR_ENV, "/dev/shm")
        assert this_host.host_id.__wrapped__() == here
        monkeypatch.setenv(this_host.SHM_DIR_ENV, "/proc")
        assert this_host.host_id.__wrapped__() != here


class TestFailpoints:
    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(failpoints, "_active", {})

    def _arm(self, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
        monkeypatch.setattr(failpoints, "_active", failpoints.parse(spec))

    def test_off_by_default(self) -> None:
        failpoints.hit("anything")

    def test_error_on_the_nth_hit_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._arm(monkeypatch, "a.b=error:boom@2; c=sleep:0")
        failpoints.hit("a.b")
        with pytest.raises(failpoints.FailpointError, match="boom"):
            failpoints.hit("a.b")
        failpoints.hit("a.b")
        failpoints.hit("c")
        failpoints.hit("unknown")

    def test_sleep_sleeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._arm(monkeypatch, "a=sleep:0.05")
        began = time.monotonic()
        failpoints.hit("a")
        assert time.monotonic() - began >= 0.05

    @pytest.mark.parametrize("spec", ["a=explode", "a", "a=kill@x", "=kill@1.5"])
    def test_bad_specs_are_refused(self, spec: str) -> None:
        with pytest.raises(ConfigError, match="PULLFILL_FAILPOINTS"):
            failpoints.parse(spec)

    def test_a_file_is_read_again_when_it_is_replaced(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "points"
        monkeypatch.setattr(failpoints, "_file", failpoints._File(str(path)))
        failpoints.hit("a")
        for _ in range(2):  # the second time the hits are counted from the start
            other = tmp_path / "new"
            other.write_text("a=error:boom@2")
            other.replace(path)
            failpoints.hit("a")
            with pytest.raises(failpoints.FailpointError, match="boom"):
                failpoints.hit("a")
        path.unlink()
        failpoints.hit("a")
        failpoints.hit("a")

    def test_hold_waits_until_the_file_says_otherwise(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "points"
        path.write_text("a=hold@1")
        monkeypatch.setattr(failpoints, "_file", failpoints._File(str(path)))
        held = threading.Thread(target=failpoints.hit, args=("a",))
        held.start()
        held.join(0.1)
        assert held.is_alive()
        path.write_text("b=hold")
        held.join(10)
        assert not held.is_alive()

    def test_kill_ends_the_process(self) -> None:
        code = "from pullfill.runtime import failpoints; failpoints.hit('x'); print('alive')"
        env = {**os.environ, failpoints.ENV: "x=kill"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
        assert done.returncode == -signal.SIGKILL
        assert done.stdout == b""


def _write(directory: Path, **changes: str) -> ClusterFile:
    fields = {
        "namespace": "blue",
        "nats_url": "nats://127.0.0.1:1",
        "etcd_url": "http://127.0.0.1:2",
        "frontend_url": "http://127.0.0.1:3",
    }
    cluster = ClusterFile(**{**fields, **changes})
    directory.mkdir(exist_ok=True)
    (directory / CLUSTER_FILE).write_bytes(msgspec.json.encode(cluster))
    return cluster


class TestClusterRef:
    def test_from_a_state_directory(self, tmp_path: Path) -> None:
        _write(tmp_path)
        ref = ClusterRef.resolve(state_dir=tmp_path)
        assert ref == ClusterRef("blue", "http://127.0.0.1:2", "nats://127.0.0.1:1", tmp_path)

    def test_urls_win_over_the_file(self, tmp_path: Path) -> None:
        _write(tmp_path)
        ref = ClusterRef.resolve(state_dir=tmp_path, etcd="http://h:9", namespace="green")
        assert (ref.namespace, ref.etcd_url, ref.nats_url) == (
            "green", "http://h:9", "nats://127.0.0.1:1",
        )  # fmt: skip

    def test_both_urls_need_no_file(self, tmp_path: Path) -> None:
        gone = tmp_path / "gone"
        ref = ClusterRef.resolve(state_dir=gone, etcd="http://h:9", nats="nats://h:8")
        assert ref == ClusterRef("default", "http://h:9", "nats://h:8", gone)

    def test_the_environment_names_the_directory(self, state_dir: Path) -> None:
        _write(state_dir)
        assert ClusterRef.resolve().state_dir == state_dir

    def test_nothing_there_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"pullfill up.*--state-dir"):
            ClusterRef.resolve(state_dir=tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"namespace": 1}', b"\xff"])
    def test_a_damaged_file_says_what_to_do(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / CLUSTER_FILE).write_bytes(content)
        with pytest.raises(ConfigError, match="pullfill down"):
            read_cluster_file(tmp_path)

    def test_a_bad_namespace_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="namespace"):
            ClusterRef.resolve(etcd="http://h:9", nats="nats://h:8", namespace="A/b")

    def test_cluster_json_has_the_promised_shape(self, tmp_path: Path) -> None:
        entry = ProcessEntry(name="etcd", role="etcd", instance_id=None, pid=7, log="/x")
        shape = msgspec.to_builtins(
            ClusterFile(
                namespace="n", nats_url="a", etcd_url="b", frontend_url="c", processes=[entry]
            )
        )
        assert set(shape) == {"namespace", "nats_url", "etcd_url", "frontend_url", "processes"}
        assert {"name", "role", "instance_id", "pid", "log"} <= set(shape["processes"][0])


def test_what_others_make_us_log_is_logged_seldom_and_counted() -> None:
    seldom, now = log.Seldom(60.0, clock := FakeClock()), []
    for _ in range(130):
        now.append(seldom.due("a"))
        clock.advance(1.0)
    assert {i: said for i, said in enumerate(now) if said is not None} == {
        0: "", 60: " (59 more since the last such line)", 120: " (59 more since the last such line)"
    }  # fmt: skip
    assert seldom.due("b") == "", "each key has its own time"
    for number in range(10_000):
        assert seldom.due(f"port {number}") == ""
    assert len(seldom._seen) <= 256
