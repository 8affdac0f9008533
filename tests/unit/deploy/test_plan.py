"""What `up` decides before anything runs: flags, placement, and refusals in one line."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import accelerator, plan
from pullfill.errors import ConfigError
from pullfill.options import WorkerOptions

REF = ClusterRef("blue", "http://127.0.0.1:2", "nats://127.0.0.1:1", Path("/state"))


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accelerator.DEVICE_ENV, "cpu")


def test_the_demo_leaves_room_for_the_others_of_its_gpu() -> None:
    """vLLM refuses to start where less than its share is free, however little it needs."""
    flags = plan.engine_flags("demo", gpus=1, workers=2)
    share = "--gpu-memory-utilization=0.440"
    assert flags[-2:] == [share, f"--kv-cache-memory-bytes={1 << 30}"]


@pytest.mark.parametrize(
    ("role", "given", "gpus", "small"),
    [("prefill", "--dtype", 0, True), ("prefill", "--max_num_batched_tokens=64", 0, False),
     ("prefill", "--no-enable-chunked-prefill", 0, False), ("prefill", "--dtype", 1, False),
     ("decode", "--dtype", 0, False), ("worker", "--dtype", 0, True)],
)  # fmt: skip
def test_prefill_workers_take_small_steps_unless_told(
    role: str, given: str, gpus: int, small: bool
) -> None:
    flags = plan.role_flags(role, [given], gpus=gpus)
    assert flags == ["--max-num-batched-tokens=1024"] * small


@pytest.mark.parametrize(
    ("model", "why"),
    [("/does/not/exist", "no model at"), ("./nope", "no model at"), ("nope", "no model at"),
     ("../a/b", "no model at"), ("a/b/c", "no model at"), ("", r"no config\.json"),
     ("file", "is a file")],
)  # fmt: skip
def test_a_wrong_model(model: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = str(tmp_path / model) if model in ("", "file") else model
    with pytest.raises(ConfigError, match=why):
        plan.check_model(given)


def test_a_demo_model_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"the reason is above\. Check the free space"):
        plan.make_demo_model()
    assert "cannot make the demo model" in capfd.readouterr().err


class TestCheck:
    def test_a_taken_port(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*--port"):
                plan.check(plan.UpOptions(port=port))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"decode": 0}, "--decode 1"),
            ({"namespace": "A"}, "namespace"),
            ({"settings": ["router.policy"]}, "give KEY=VALUE"),
            ({"settings": ["router.policy=never"]}, "is not allowed"),
            ({"frontends": 0, "nats_url": "nats://127.0.0.1:1"}, "no NATS server at"),
            ({"frontends": 0, "etcd_url": "http://127.0.0.1:1"}, "etcd at .* did not answer"),
            ({"vllm_args": ["--ssl_certfile=c"]}, "pullfill frontend --ssl-certfile"),
            (
                {"worker": 2, "role_args": {"prefill": ["--max-num-seqs=2"]}},
                "--prefill-args is for workers that only prefill",
            ),
        ],
    )
    def test_refusals(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            plan.check(plan.UpOptions(**changes))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "flags", "name"),
    [
        ("demo", [], "demo"),
        ("org/m", [], "org/m"),
        ("demo", ["--served-model-name", "a", "b"], "a"),
        ("org/m", ["--served_model_name=a", "--seed", "1", "--served-model-name=b"], "b"),
    ],
)
def test_the_name_that_clients_use(model: str, flags: list[str], name: str) -> None:
    assert plan.served_name(plan.UpOptions(model=model, vllm_args=flags)) == name


def test_every_process_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    options = plan.UpOptions(prefill=2, frontends=2, port=9000, vllm_args=["--api-key", "k"])
    specs = plan.worker_specs(options, REF)
    names = ["decode-0", "prefill-0", "prefill-1", "frontend-0", "frontend-1"]
    assert [s.name for s in specs] == names
    assert len({s.instance_id for s in specs}) == 5
    assert [s.url for s in specs[3:]] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    assert options.frontend_url == "http://127.0.0.1:9000"
    for spec in specs:
        assert spec.instance_id in spec.argv
        assert ("--api-key" in spec.argv) == (spec.role == "frontend")

    def values(flag: str) -> list[str]:
        return [s.argv[s.argv.index(flag) + 1] for s in specs if flag in s.argv]

    assert (values("--port"), values("--own-port")) == (["9000"] * 2, ["9001", "9002"])
    assert values("--cpu") == ["0", "1", "0"]


# ------------------------------------------------------------------ devices


TP_2 = {"prefill": ["-tp", "2"]}


@pytest.mark.parametrize(
    ("gpus", "cores", "given", "where", "free"),
    [
        (2, 8, {"decode": 2}, [(0,), (1,), (0,)], set()),
        (2, 2, {}, [(0,), (1,)], set()),
        (0, 8, {}, [(0, 1, 2, 3), (4, 5, 6, 7)], {0, 1, 2, 3}),
        (0, 2, {"decode": 2}, [(0,), (1,), (0,)], {0, 1}),
        (0, 6, {"role_args": TP_2}, [(0, 1), (2, 3, 4, 5)], {0, 1}),
        (0, 4, {"role_args": TP_2, "model": "demo"}, [(0,), (1, 2)], {3}),
        (0, 4, {"model": "demo", "prefill": 2}, [(0,), (1,), (2,)], {3}),
        (0, 2, {"pin": False}, [(), ()], set()),
        (0, 2, {"worker": 2}, [(0,), (1,)], {0}),
        (0, 4, {"worker": 3, "decode": 1}, [(0,), (1,), (2,), (3,)], {0, 1, 3}),
        (0, 3, {"worker": 1, "prefill": 2}, [(0,), (1,), (2,)], {0}),
    ],
)
def test_where_workers_run_and_frontends_beside_them(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    cores: int,
    given: dict[str, Any],
    where: list[tuple[int, ...]],
    free: set[int],
) -> None:
    """free: the cores of frontends. Those that no worker has, or else those that decode."""
    monkeypatch.setattr(accelerator, "gpu_count", lambda: gpus)
    monkeypatch.setattr(plan, "usable_cores", lambda: list(range(cores)))
    options = plan.UpOptions(**{"model": "org/m", **given})
    assert [place.gpus or place.cores for place in plan.placements(options)] == where
    assert plan.frontend_cores(options) == free


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ["decode-0", "prefill-0"]),
        ({"worker": 2}, ["worker-0", "worker-1"]),
        ({"worker": 1, "decode": 1}, ["worker-0", "decode-0"]),
        ({"worker": 1, "prefill": 1}, ["worker-0", "prefill-0"]),
        ({"decode": 2}, ["decode-0", "decode-1", "prefill-0"]),
    ],
)
def test_workers_with_both_sides_take_the_place_of_the_others(
    given: dict[str, int], names: list[str]
) -> None:
    options = plan.UpOptions(frontends=0, workers=WorkerOptions(concurrency=3), **given)  # type: ignore[arg-type]
    specs = plan.worker_specs(replace(options), REF)
    assert [spec.name for spec in specs] == names
    for spec in specs:
        assert spec.argv[4] == spec.role == str(spec.instance_id).partition("-")[0]
        assert ("--concurrency" in spec.argv) == (spec.role != "decode"), "of a side that it has"


# ------------------------------------------------------------------ several ranks


def devices(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.delenv(accelerator.DEVICE_ENV, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


ROLES = {"decode": ["--tensor-parallel-size=2"], "prefill": ["-tp", "4", "-pp", "2"]}


def test_each_rank_has_a_gpu_of_its_own_or_the_workers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two decode workers of TP 2, one prefill worker of TP 4 x PP 2: 12 ranks."""
    devices(monkeypatch, ",".join(map(str, range(20, 33))))
    options = plan.UpOptions(
        model="org/m", decode=2, vllm_args=["-tp", "8"], role_args=ROLES, frontends=0
    )
    plan.check(options)
    specs = plan.worker_specs(options, REF)
    assert [s.env["CUDA_VISIBLE_DEVICES"] for s in specs] == [
        "20,21", "22,23", "24,25,26,27,28,29,30,31",
    ]  # fmt: skip
    assert all("--gpu-memory-utilization=0.880" in s.argv for s in specs)
    devices(monkeypatch, ",".join(map(str, range(11))))
    why = r"need 12 GPUs \(TP x PP: 2 \+ 2 \+ 8\), but there are 11"
    with pytest.raises(ConfigError, match=why):
        plan.check(options)


@pytest.mark.parametrize(
    ("everyone", "prefill", "after"),
    [
        ([], [], ["", "decode-0"]),
        (["--kv-cache-memory-bytes", "9"], [], ["", ""]),
        ([], ["--kv_cache_memory_bytes=9"], ["", "decode-0"]),
    ],
)
def test_they_start_in_turn_unless_all_were_told_their_bytes(
    monkeypatch: pytest.MonkeyPatch, everyone: list[str], prefill: list[str], after: list[str]
) -> None:
    devices(monkeypatch, "5")
    options = plan.UpOptions(
        model="org/m", frontends=0, vllm_args=everyone, role_args={"prefill": prefill}
    )
    assert [spec.after for spec in plan.worker_specs(options, REF)] == after
