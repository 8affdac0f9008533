"""A decode worker in stock `vllm serve` beside one of pullfill's own: `make bench-flag`.

One prefill worker, and decode workers of both kinds behind one frontend, which get requests in
turn. Measured:
  first token  of long prompts that are prefilled remotely, one at a time
  waiting      CPU of a decode worker while 8 of its requests wait for their KV
  tokens       tokens/s of 8 streams that are prefilled locally, against `vllm serve` without the
               flag: no other worker, both asked by their own HTTP servers, in turn
Writes results/flag.md. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import openai

from benchmarks import command, machine
from benchmarks.report import Row, median, row, versus
from benchmarks.serving import model
from tests.support.answers import ask_for
from tests.support.cluster import FLAGS, MODEL, Cluster, StockWorker, Worker, stock_vllm, until
from tests.support.prompts import random_prompt

PROMPT = 1000
WAITING = 8
STREAMS, TOKENS = 8, 64
PAIRS = 8
KV_MIB = 256
BOTH = ("own loop", "stock vLLM")


def first_tokens(cluster: Cluster, workers: list[Worker], each: int) -> list[Row]:
    """Remote prefills, one at a time, by which worker decodes."""
    ttft: dict[str, list[float]] = {worker.instance_id: [] for worker in workers}
    cluster.set_router(policy="always_remote", max_queue_wait_s=3600)
    for number in range(-4, 2 * each):  # the first ones warm up
        began = time.monotonic()
        answer = ask_for(cluster, random_prompt(PROMPT, seed=number), 2)
        until(lambda: answer.tokens or answer.error, 60, "a first token")  # noqa: B023
        took = (time.monotonic() - began) * 1e3
        assert answer.done.wait(60), answer.error
        told = cluster.explain(answer.request_id)
        assert told["path"] == "remote", told
        if number >= 0:
            ttft[told["decode_instance"]].append(told["timings_ms"].get("first_token") or took)
    own, stock = (median(ttft[worker.instance_id]) for worker in workers)
    return [
        row(f"first token, {BOTH[0]}", own, "ms"),
        row(f"first token, {BOTH[1]}", stock, "ms"),
        row("first token, stock vLLM less own loop", stock - own, "ms", at_most=3.0),
    ]


def waiting(cluster: Cluster, workers: list[Worker], seconds: float) -> list[Row]:
    """CPU of both decode workers while their requests wait for a prefill worker that is stopped.

    seconds: fewer than 5, since they give that worker up after 5 s."""
    (prefill,) = cluster.of("prefill")
    prefill.signal(signal.SIGSTOP)
    answers = [
        ask_for(cluster, random_prompt(PROMPT, seed=1000 + number), 2)
        for number in range(len(workers) * WAITING)
    ]
    try:
        time.sleep(0.5)
        before = [machine.cpu_seconds(worker.pid) for worker in workers]
        time.sleep(seconds)
        after = [machine.cpu_seconds(worker.pid) for worker in workers]
    finally:
        prefill.signal(signal.SIGCONT)
    assert all(answer.done.wait(120) for answer in answers)
    used = [(b - a) / seconds * 100 for a, b in zip(before, after, strict=True)]
    return [
        row(f"CPU while {WAITING} requests wait, {name}", share, "% of a core")
        for name, share in zip(BOTH, used, strict=True)
    ]


def tokens(directory: Path, base: Path, rounds: int) -> list[Row]:
    """Tokens/s of vLLM's own HTTP servers, with and without the flag. There is no other worker.

    Even two servers without the flag differ by some percent. So several pairs are started."""
    flags = [*FLAGS, f"--served-model-name={MODEL}", f"--kv-cache-memory-bytes={KV_MIB << 20}"]
    made: tuple[list[float], list[float]] = ([], [])
    with Cluster(base / "alone", directory) as cluster:
        cluster.start_servers()
        for pair in range(PAIRS):
            servers: dict[bool, StockWorker] = {}
            with ExitStack() as stack:
                for flagged in (True, False)[:: -1 if pair % 2 else 1]:
                    (servers[flagged],) = stack.enter_context(
                        stock_vllm(
                            base / f"{pair}-{flagged}", directory, connector=flagged,
                            transfer=cluster.stock_flag(), flags=flags,
                        )
                    )  # fmt: skip
                both = [servers[True], servers[False]]
                for server in both:
                    server.ready()
                for rates, more in zip(
                    made, streams([server.url for server in both], rounds), strict=True
                ):
                    rates += more
    flag, without = map(median, made)
    return [
        versus("tokens/s with the flag", flag, "tokens/s", "without it", without, at_least=0.99)
    ]


def streams(urls: Sequence[str], rounds: int) -> list[list[float]]:
    """Tokens/s of each server in each round."""
    # vLLM ends connections that were idle for 5 s. A client then asks once more.
    clients = [openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) for url in urls]

    def one(client: openai.OpenAI, number: int) -> None:
        client.completions.create(
            model=MODEL, prompt=random_prompt(64, seed=number), max_tokens=TOKENS,
            temperature=0, extra_body={"ignore_eos": True},
        )  # fmt: skip

    made: list[list[float]] = [[], []]
    with ThreadPoolExecutor(STREAMS) as pool:
        for turn in range(-1, rounds):
            for which in (0, 1) if turn % 2 else (1, 0):  # neither is always the second one
                asked = partial(one, clients[which])
                began = time.monotonic()
                list(pool.map(asked, [5000 + STREAMS * turn + n for n in range(STREAMS)]))
                if turn >= 0:
                    made[which].append(STREAMS * TOKENS / (time.monotonic() - began))
    return made


def measure(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    quiet, directory = machine.OtherLoad(), model.model_directory()
    with Cluster(base / "cluster", directory, kv_mib=KV_MIB) as cluster:
        cluster.start("decode", "prefill", "frontend")
        cluster.stock = frozenset({"decode"})
        workers = [*cluster.of("decode"), cluster.add("decode")]
        quiet.look()
        rows = first_tokens(cluster, workers, options.requests)
        rows += waiting(cluster, workers, options.seconds)
    rows += tokens(directory, base, options.rounds)
    quiet.look()
    return rows, quiet


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--requests", type=int, default=40, help="prompts for each worker")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long requests wait")
    parser.add_argument("--rounds", type=int, default=6, help="of streams, for each server")
    title = "A decode worker in stock vLLM (`make bench-flag`)"
    return command.main("flag", title, parser.parse_args(), measure)


if __name__ == "__main__":
    sys.exit(main())
