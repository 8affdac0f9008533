"""Pull mode with real engines: the oracle's tokens, also after a reader was stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.support.checked import STEPS, checked
from tests.support.cluster import Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import ask, ask_all, assert_right, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = [2, 33, 65, 96, 257, 700, 1026, 2000]
READ, WRITTEN = "pullfill_kv_read_bytes_total", "pullfill_kv_write_bytes_total"


@pytest.fixture(scope="module")
def pulling(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pull"), model_path) as cluster:
        pull = ("decode", "--kv-mode", "pull")
        router = {"policy": "always_remote", "remote_timeout_s": 30}
        yield cluster.start(pull, "prefill", "frontend", **router)


@pytest.mark.essential
def test_pull_answers_as_the_oracle_does(pulling: Cluster, oracle: Oracle) -> None:
    """Cold, then as the start of longer prompts (hits on both sides), one by one and at once."""
    heads = [random_prompt(n, seed=9200) for n in LENGTHS]
    longer = [head + random_prompt(n, seed=9201) for head in heads for n in (1, 40)]
    with checked(pulling, oracle) as check:
        for prompt in heads:
            assert check.told(check.ask(prompt))["path"] == "remote"
        answers = ask_all(pulling, longer, STEPS)
        assert_right(oracle, longer, answers, STEPS)
    assert pulling.counter(WRITTEN, role="prefill") == 0, "nothing is written"
    assert pulling.counter(READ, role="decode") > 0
    assert pulling.counter(READ, role="prefill") > 0, "prefix hits"


@pytest.mark.long
def test_a_stopped_reader_keeps_what_it_reads(pulling: Cluster, oracle: Oracle) -> None:
    """In the middle of a batch it holds the fence of the prefill worker's blocks: they are not used
    for anything else, however long it takes. Its one slow read keeps no later prompt local."""
    (decode,), (prefill,) = pulling.of("decode"), pulling.of("prefill")
    decode.arm("shm.read.batch=stop@1")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, pulling, random_prompt(1500, seed=9500), STEPS)
        until(lambda: decode.stopped, 20, "stopped in a read")
        blocks = pulling.load_of(prefill)
        until(lambda: not pulling.load_of(prefill)["decode_workers"], 20, "its lease is gone")
        assert blocks["kv_free_blocks"] < blocks["kv_blocks"]
        assert pulling.load_of(prefill)["kv_free_blocks"] == blocks["kv_free_blocks"], "no proof"
        decode.signal(signal.SIGCONT)
        decode.arm("")
        assert isinstance(asking.exception(30), openai.OpenAIError | None)  # served or refused
    until(lambda: pulling.load_of(prefill)["kv_free_blocks"] == blocks["kv_blocks"], 20, "let go")
    until(lambda: pulling.load_of(prefill)["decode_workers"], 20, "connected again")
    until(
        lambda: not any(pulling.load_of(decode)[key] for key in ("requests", "open_jobs")),
        20, "nothing of the stopped time is left",
    )  # fmt: skip
    # The queue may deliver the job of the stopped time once more. Its claim is refused.
    with checked(pulling, oracle, stale={"claim": (0, 1)}) as check:
        check.ask(random_prompt(900, seed=9501))
