"""A decode worker in stock `vllm serve`: one flag, in one cluster with workers of our own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from pullfill.errors import ConfigError
from pullfill.ids import is_name
from pullfill.net.this_host import SHM_DIR_ENV
from pullfill.transfer.shm.files import shm_dir
from pullfill.wire import KvMode, WorkerRecord
from tests.support import web
from tests.support.answers import ask_for
from tests.support.cluster import (
    FLAGS,
    Cluster,
    StockWorker,
    Worker,
    command,
    pullfill,
    stock_vllm,
    until,
)
from tests.support.oracle import Oracle
from tests.support.prompts import Answer, ask, assert_right, random_prompt, truth

pytestmark = pytest.mark.engine

STEPS = 6
LENGTHS = [1, 2, 31, 32, 33, 64, 65, 200, 511, 512, 513, 700, 1023, 1025, 1999]
DECIDED = "pullfill_decision_total"


class Stock:
    """One server that is ready, as clients and the cluster see it."""

    def __init__(self, cluster: Cluster, worker: Worker) -> None:
        assert isinstance(worker, StockWorker)
        self.cluster, self.worker, self.instance_id = cluster, worker, worker.instance_id
        # vLLM's server closes a connection that is idle for 5 s, and so the client must earlier.
        limits = httpx.Limits(keepalive_expiry=1.0)
        self.client = openai.OpenAI(
            base_url=f"{worker.url}/v1", api_key="none", timeout=60.0,
            max_retries=0, http_client=openai.DefaultHttpxClient(limits=limits),
        )  # fmt: skip

    @property
    def record(self) -> WorkerRecord | None:
        """Its record in etcd."""
        return self.cluster.records("decode").get(self.instance_id)

    def ask(self, prompt: list[int]) -> Answer:
        return ask(self.cluster, prompt, STEPS, self.client)

    def ask_all(self, prompts: list[list[int]]) -> list[Answer]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self.ask, prompts))

    def remote(self) -> float:
        """How many prompts it has sent to prefill workers."""
        return self.cluster.counter(DECIDED, path="remote", instance_id=self.instance_id)


@contextmanager
def stock_decode(cluster: Cluster, *flags: str) -> Iterator[Stock]:
    """One more decode worker of the cluster, in stock vLLM."""
    usual, cluster.stock = cluster.stock, frozenset({"decode"})
    worker = cluster.launch("decode", *flags)
    cluster.stock = usual
    try:
        cluster.wait_ready(worker)
        made = Stock(cluster, worker)
        with closing(made.client):
            yield made
        worker.kill()
        until(lambda: made.record is None, 20, "its lease is over")
    finally:
        worker.kill()
        cluster.workers.remove(worker)


@pytest.fixture(scope="module")
def shared_stock(shared_cluster: Cluster) -> Iterator[Stock]:
    with stock_decode(shared_cluster) as made:
        yield made


@pytest.fixture
def stock(shared_stock: Stock, cluster: Cluster) -> Stock:
    """With the shared cluster, where everything is prefilled remotely."""
    return shared_stock


@pytest.mark.essential
def test_a_remote_prefill_gives_the_tokens_of_one_engine(stock: Stock, oracle: Oracle) -> None:
    before = stock.remote()
    prompts = [random_prompt(length, seed=50) for length in LENGTHS]
    assert_right(oracle, prompts, [stock.ask(prompt) for prompt in prompts], STEPS, 1e-5)
    assert stock.remote() - before == len(LENGTHS) - 1, "one token is computed where it is sampled"
    # Its own prefix cache is a hit, and a prefill worker reads it.
    longer = [prompt + random_prompt(300, seed=51) for prompt in prompts]
    answers = stock.ask_all(longer)
    assert_right(oracle, longer, answers, STEPS, 1e-5)
    assert stock.remote() - before == 2 * len(LENGTHS) - 1
    # Its clients know an answer by its id. No frontend does, but the worker.
    done = pullfill(stock.cluster, "explain", answers[-1].request_id, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (prefill,) = stock.cluster.of("prefill")
    assert (told["state"], told["path"]) == ("answered", "remote")
    assert (told["decode_instance"], told["prefill_instance"]) == (
        stock.instance_id, prefill.instance_id
    )  # fmt: skip
    for stage in ("queue", "prefill", "kv_write", "commit", "first_token"):
        assert told["timings_ms"][stage] is not None, stage


@pytest.mark.essential
def test_a_page_without_a_frontend_shows_its_requests(stock: Stock) -> None:
    cluster = stock.cluster
    with subprocess.Popen(command(cluster, "page"), stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            (url,) = re.findall(r"http\S+/pullfill/ui", page.stdout.readline())
            answer = stock.ask(random_prompt(900, seed=58))
            through = ask(cluster, random_prompt(900, seed=59), STEPS)
            with httpx.stream("GET", f"{url}/events", trust_env=False, timeout=20.0) as events:
                told = (line[6:] for line in events.iter_lines() if line.startswith("data: "))
                shown = (json.loads(line).get("ended", []) for line in told)
                row = next(row for rows in shown for row in rows if answer.request_id in row["id"])
                again = next(shown)
        finally:
            page.terminate()
    assert [one["id"] for one in again].count(row["id"]) == 1
    assert not any(through.request_id in one["id"] for one in again), "a frontend's page has it"
    assert (row["path"], row["prompt"], row["made"]) == ("remote", 900, STEPS)
    assert row["total_ms"] > row["ttft_ms"] > row["stages"]["prefill"] > 0
    assert row["decode"] == stock.instance_id


@pytest.mark.long
def test_ranks_in_processes_of_their_own_and_steps_that_overlap(
    cluster: Cluster, oracle: Oracle
) -> None:
    with stock_decode(cluster, "--tensor-parallel-size=2", "--async-scheduling") as stock:
        prompts = [random_prompt(length, seed=55) for length in LENGTHS]
        assert_right(oracle, prompts, stock.ask_all(prompts), STEPS, 1e-4)
        longer = [prompt + random_prompt(300, seed=56) for prompt in prompts]
        assert_right(oracle, longer, stock.ask_all(longer), STEPS, 1e-4)
        assert stock.remote() == 2 * len(LENGTHS) - 1
        cluster.assert_clean()


@pytest.mark.long
def test_each_rank_of_a_data_parallel_server_is_a_worker_and_its_death_goes_unnoticed(
    cluster: Cluster, tmp_path: Path, oracle: Oracle
) -> None:
    """vLLM ends the whole server when a rank has died. Who speaks to our frontend does not notice.
    The server's own clients, if any, vLLM 0.32 leaves without an answer, also without our flag."""
    slow = {"PULLFILL_FAILPOINTS": "engine.step=sleep:0.02"}
    how: dict[str, Any] = {"transfer": cluster.stock_flag(), "env": slow}
    how["flags"] = [*FLAGS, "--data-parallel-size=2"]
    before = cluster.records("decode").keys()
    with stock_vllm(tmp_path, cluster.model_path, **how) as (server,):
        server.ready()
        found = cluster.records("decode")
        until(cluster.linked, 40, "prefill workers have connected, and were compared")
        ranks = {name: found[name] for name in sorted(found.keys() - before)}
        assert [rank[-4:] for rank in ranks] == ["_dp0", "_dp1"]
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=60.0, max_retries=0
        )
        prompts = [random_prompt(length, seed=57) for length in LENGTHS[1:]]
        with closing(client), ThreadPoolExecutor(8) as pool:
            direct = list(pool.map(lambda one: ask(cluster, one, STEPS, client), prompts))
        assert_right(oracle, prompts, direct, STEPS, 1e-5)
        sent, unheard = (
            [cluster.counter(DECIDED, instance_id=rank, **label) for rank in ranks]
            # Two engines beside other tests: for a second a rank may not hear NATS.
            for label in ({"path": "remote"}, {"reason": "queue_unavailable"})
        )
        assert sum(sent + unheard) == len(prompts)
        assert all(sent), "both are used"
        prompts, steps = [random_prompt(300 + n, seed=58) for n in range(6)], 200
        answers = [ask_for(cluster, prompt, steps) for prompt in prompts]
        until(lambda: all(one.tokens for one in answers), 60, "they are under way")
        dying = min(ranks)
        os.kill(ranks[dying].pid, signal.SIGKILL)
        assert all(one.done.wait(60) for one in answers)
        assert [one.error for one in answers] == [""] * len(answers)
        assert [one.tokens for one in answers] == [t for t, _ in truth(oracle, prompts, steps)]
        left = [cluster.explain(one.request_id)["migrated_from"] for one in answers]
        assert dying in {name for names in left for name in names}  # the other one may finish its
        until(lambda: not server.alive, 30, "the server ends")
        until(lambda: not ranks.keys() & cluster.records("decode").keys(), 20, "their leases end")


def test_after_its_lease_was_revoked_it_serves_alone_until_it_is_told_to_end(
    stock: Stock, oracle: Oracle
) -> None:
    """The last test of the shared server: it ends it."""
    before = stock.remote()
    prompts = [random_prompt(600, seed=80 + number) for number in range(2)]
    answers = [stock.ask(prompts[0])]
    assert stock.remote() == before + 1
    assert stock.record is not None
    probe = stock.record.http
    assert web.get(f"{probe}/ready").status_code == 200
    drained = pullfill(stock.cluster, "drain", stock.instance_id)
    assert drained.returncode == 0, drained.stderr
    until(lambda: "lease revoked" in stock.worker.log.read_text(), 20, "it has noticed")
    # Its own probe tells. vLLM's tells only whether its engine lives.
    until(lambda: web.get(f"{probe}/ready").status_code == 503, 20, "its probe tells")
    assert web.get(f"{probe}/ready").json()["state"] == "draining"
    assert stock.worker.serves
    answers.append(stock.ask(prompts[1]))
    assert_right(oracle, prompts, answers, STEPS, 1e-5)
    assert stock.record is None
    stock.worker.stop()
    files = [path.name for path in shm_dir().iterdir() if stock.instance_id in path.name]
    assert files == []


def test_settings_are_the_flags_of_a_decode_worker() -> None:
    from pullfill.worker.stock_core import settings_of

    place = {"etcd": "http://e", "nats": "nats://n", "namespace": "ns"}
    cluster, options = settings_of(
        {**place, "kv_port": "7000", "kv_mode": "pull", "reserve_seats": True}, "decode", "m", "d-1"
    )
    assert (cluster.namespace, cluster.etcd_url, cluster.nats_url) == tuple(
        place[key] for key in ("namespace", "etcd", "nats")
    )
    assert (options.model, options.instance_id, options.kv_port) == ("m", "d-1", 7000)
    assert options.kv_mode is KvMode.PULL
    assert options.reserve_seats
    for wrong, told in (
        ({"kv_port": 70000}, "out of 0 to 65535"),
        ({"kv_port": "many"}, "kv_port is 'many'"),
        ({"transports": "avian"}, "no transport is called 'avian'"),
        ({"cores": "1"}, "has no setting 'cores'"),
        ({"concurrency": 1}, "has no setting 'concurrency'"),
        ({"namespace": "A B"}, "namespace 'A B' is not usable"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            settings_of({**place, **wrong}, "decode", "m", "d-1")


def test_files_of_a_killed_process_are_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's ranks make theirs before the fence file, for which others are swept."""
    from pullfill.worker.stock_core import PullfillDecode

    monkeypatch.setenv(SHM_DIR_ENV, str(tmp_path))
    for name in ("decode-mine-1.fence", "decode-mine-1-0.kv", "decode-other-0.kv"):
        (tmp_path / f"pullfill-{name}").write_bytes(b"x")
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="Mine/1"))
    rank = object.__new__(PullfillDecode)
    assert rank.place(config) == ("decode-mine-1", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_any_engine_id_gives_a_name_that_can_be_used() -> None:
    from pullfill.worker.stock_core import name_of

    for engine_id, name in (
        ("1c5b0d42-cde2-45cf-a19e-02f10832612d_dp3", "decode-1c5b0d42_dp3"),
        ("Llama 3.1", "decode-llama-3-1"),
        ("x" * 200 + "_dp1", f"decode-{'x' * 46}_dp1"),
    ):
        config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id))
        assert name_of(config, "decode") == name
        assert is_name(name)


def test_another_side_loop_connector_and_memory_that_cannot_be_shared_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pullfill.worker import stock_core

    model = SimpleNamespace(enable_sleep_mode=True, enable_cumem_allocator=True)
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"), model_config=model,
        parallel_config=SimpleNamespace(
            enable_expert_parallel=False, tensor_parallel_size=1, enable_elastic_ep=False,
            enable_fault_tolerance=True,
        ),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="kv_role is 'kv_both'"):
        stock_core.check_config(config, stock_core.PullfillDecode)
    config.kv_transfer_config.kv_role = "kv_consumer"
    with pytest.raises(ConfigError, match="--enable-fault-tolerance"):
        stock_core.check_config(config, stock_core.PullfillDecode)
    config.parallel_config.enable_fault_tolerance = False
    monkeypatch.setattr(stock_core.kv, "device", lambda: "cuda")
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        stock_core.check_config(config, stock_core.PullfillDecode)
    monkeypatch.setattr(stock_core.log, "setup", lambda _: None)
    monkeypatch.setattr(stock_core, "check_config", lambda *_: None)
    # vLLM's MultiConnector gives each of its own a copy: test_offloading_names.py.
    several = SimpleNamespace(vllm_config=SimpleNamespace())
    monkeypatch.setattr(stock_core, "core_above", lambda: several)
    with pytest.raises(ConfigError, match="use it alone"):
        stock_core.StockCore(config, stock_core.PullfillDecode)


def test_no_key_stays_if_vllm_fails_after_the_worker_has_joined(
    cluster: Cluster, tmp_path: Path
) -> None:
    late = {
        "kv_connector": "FailsLate",
        "kv_connector_module_path": "tests.support.probed_connector",
    }
    before = cluster.records("decode")
    transfer = cluster.stock_flag(lease_ttl=600) | late
    with stock_vllm(tmp_path, cluster.model_path, transfer=transfer, flags=FLAGS) as (server,):
        until(lambda: not server.alive, 60, "it ends")
    assert "registered decode-" in server.log.read_text()
    assert cluster.records("decode").keys() == before.keys()


def test_what_cannot_work_is_told_and_the_server_does_not_start(
    cluster: Cluster, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--dtype=bfloat16"]
    transfer = cluster.stock_flag()
    with stock_vllm(tmp_path, cluster.model_path, transfer=transfer, flags=flags) as (server,):
        until(lambda: not server.alive, 60, "it ends")
    told = "its dtype is 'bfloat16', but that of"
    (line,) = [line for line in server.log.read_text().splitlines() if told in line]
    assert "error: " in line
