"""Push and pull with real engines: the oracle's tokens, also when somebody dies in a read."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.checked import STEPS, checked
from tests.support.cluster import Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import Answer, ask, ask_all, random_prompt, truth

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = [2, 33, 65, 96, 257, 700, 1026, 2000]
READ, WRITTEN = "pullfill_kv_read_bytes_total", "pullfill_kv_write_bytes_total"


@contextmanager
def cluster_in(mode: str, directory: Path, model_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(directory, model_path)
    try:
        cluster.start_servers()
        cluster.launch("decode", "--kv-mode", mode)
        cluster.launch("prefill")
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote", remote_timeout_s=30)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def pulling(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_in("pull", tmp_path_factory.mktemp("pull"), model_path) as cluster:
        yield cluster


def check_tokens(cluster: Cluster, oracle: Oracle, seed: int) -> None:
    """Cold, then as the start of longer prompts (hits on both sides), one by one and at once."""
    heads = [random_prompt(n, seed=seed) for n in LENGTHS]
    longer = [head + random_prompt(n, seed=seed + 1) for head in heads for n in (1, 40)]
    with checked(cluster, oracle) as check:
        for prompt in heads:
            assert check.told(check.ask(prompt))["path"] == "remote"
        answers = ask_all(cluster, longer, STEPS)
        for prompt, answer, (tokens, _) in zip(
            longer, answers, truth(oracle, longer, STEPS), strict=True
        ):
            assert answer.tokens == tokens, f"prompt of {len(prompt)} tokens"


def of_role(cluster: Cluster, name: str, role: str) -> float:
    return cluster.counter(name, role=role)


@pytest.mark.long
def test_push_answers_as_the_oracle_does(model_path: Path, tmp_path: Path, oracle: Oracle) -> None:
    with cluster_in("push", tmp_path, model_path) as cluster:
        check_tokens(cluster, oracle, seed=9100)
        assert of_role(cluster, WRITTEN, "prefill") > 0
        assert of_role(cluster, READ, "decode") == 0


@pytest.mark.essential
def test_pull_answers_as_the_oracle_does(pulling: Cluster, oracle: Oracle) -> None:
    check_tokens(pulling, oracle, seed=9200)
    assert of_role(pulling, WRITTEN, "prefill") == 0, "nothing is written"
    assert of_role(pulling, READ, "decode") > 0
    assert of_role(pulling, READ, "prefill") > 0, "prefix hits"


class Asking:
    """One request on a thread of its own."""

    def __init__(self, cluster: Cluster, prompt: list[int]) -> None:
        self.answer: Answer | None = None
        self.error: openai.OpenAIError | None = None
        self._thread = threading.Thread(target=self._ask, args=(cluster, prompt), daemon=True)
        self._thread.start()

    def _ask(self, cluster: Cluster, prompt: list[int]) -> None:
        try:
            self.answer = ask(cluster, prompt, STEPS)
        except openai.OpenAIError as exc:
            self.error = exc

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "never answered"


def kept(cluster: Cluster) -> int:
    """KV bytes that prefill workers keep to be read."""
    (prefill,) = cluster.of("prefill")
    credits: dict[str, Any] = cluster.load_of(prefill)["kv_credits"]
    return sum(credits["used_bytes"].values())


@pytest.mark.long
def test_row_2_prefill_dies_while_it_is_read(pulling: Cluster, oracle: Oracle) -> None:
    """It had done all it had to do: what it kept is read to the end, and nothing computed again."""
    (decode,), (victim,) = pulling.of("decode"), pulling.of("prefill")
    prompt = random_prompt(1500, seed=9300)
    with checked(pulling, oracle, stale={"claim": (0, 1)}) as check:
        decode.arm("shm.read.batch=hold@1")
        asking = Asking(pulling, prompt)
        until(lambda: reads(pulling), 20, "the decode worker reads them")
        assert kept(pulling) > 0
        victim.kill()
        decode.arm("")
        asking.join()
        assert asking.answer is not None, asking.error
        assert asking.answer.tokens == truth(oracle, [prompt], STEPS)[0][0]
        told = check.told(asking.answer)
        assert (told["path"], told["fallback"]) == ("remote", None)
        pulling.wait_ready(pulling.launch("prefill"))


def reads(cluster: Cluster) -> int:
    """Jobs that the decode worker reads."""
    (decode,) = cluster.of("decode")
    count: int = cluster.load_of(decode)["kv_reads"]
    return count


@pytest.mark.long
def test_row_8_decode_dies_while_it_reads(pulling: Cluster, oracle: Oracle) -> None:
    """The kernel lets go of its lock: the prefill worker has its blocks back at once, and serves
    the next decode worker."""
    (victim,) = pulling.of("decode")
    victim.arm("shm.read.batch=kill@1")
    asking = Asking(pulling, random_prompt(1500, seed=9400))
    assert victim.process.wait(20) == -signal.SIGKILL
    asking.join()
    assert asking.error is not None
    until(lambda: not kept(pulling), 10, "nothing is kept for the dead")
    pulling.wait_ready(pulling.launch("decode", "--kv-mode", "pull"))
    with checked(pulling, oracle) as check:
        assert check.told(check.ask(random_prompt(900, seed=9401)))["path"] == "remote"


@pytest.mark.long
def test_a_stopped_reader_keeps_what_it_reads(pulling: Cluster, oracle: Oracle) -> None:
    """In the middle of a batch it holds the fence of the prefill worker's blocks: they are not used
    for anything else, however long it takes."""
    (decode,), (prefill,) = pulling.of("decode"), pulling.of("prefill")
    decode.arm("shm.read.batch=stop@1")
    prompt = random_prompt(1500, seed=9500)
    asking = Asking(pulling, prompt)
    until(lambda: decode.stopped, 20, "stopped in a read")
    blocks = pulling.load_of(prefill)
    until(lambda: not pulling.load_of(prefill)["decode_workers"], 20, "its lease is gone")
    assert blocks["kv_free_blocks"] < blocks["kv_blocks"]
    assert pulling.load_of(prefill)["kv_free_blocks"] == blocks["kv_free_blocks"], "no proof"
    decode.signal(signal.SIGCONT)
    decode.arm("")
    asking.join()
    until(lambda: pulling.load_of(prefill)["kv_free_blocks"] == blocks["kv_blocks"], 20, "let go")
    until(lambda: pulling.load_of(prefill)["decode_workers"], 20, "connected again")
    until(lambda: idle(pulling.load_of(decode)), 20, "nothing of the stopped time is left")
    # The queue may deliver the job of the stopped time once more. Its claim is refused.
    with checked(pulling, oracle, stale={"claim": (0, 1)}) as check:
        check.ask(prompt)


def idle(load: dict[str, Any]) -> bool:
    """Whether a decode worker that reports this load has nothing to do."""
    return not load["requests"] and not load["open_jobs"]


@pytest.mark.long
def test_pull_over_tcp(pulling: Cluster, oracle: Oracle) -> None:
    """From a prefill worker whose memory is reached through its port only."""
    (before,) = pulling.of("prefill")
    pulling.wait_ready(pulling.launch("prefill", "--transports", "tcp"))
    before.stop()
    until(lambda: len(pulling.of("prefill")) == 1, 10, "it left")
    check_tokens(pulling, oracle, seed=9600)
    assert pulling.counter(READ, role="decode", transport="tcp") > 0
    assert pulling.counter(READ, role="prefill", transport="tcp") > 0
    assert pulling.counter(WRITTEN) == 0
