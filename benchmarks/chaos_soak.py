"""Mixed faults at random moments under constant load, for as long as you like: `make soak`.

Two frontends, two decode and two prefill workers, real servers, a small float32 model. Clients
stream greedy answers, which are compared, token for token, with those of one plain vLLM engine;
one client in ten hangs up somewhere. Meanwhile, about every --every seconds, one of these happens:

  kill-prefill, kill-decode       SIGKILL, and another one started in its place
  drain-prefill, drain-decode     SIGTERM, and another one started in its place
  stop-prefill                    SIGSTOP for up to eight seconds, then SIGCONT
  kill-nats, hang-nats            SIGKILL and restart; SIGSTOP for up to six seconds
  kill-etcd, hang-etcd            the same; up to nine seconds, more than the leases live

Kinds and moments follow from --seed. One decode worker, one prefill worker and both frontends are
never hit. So a decode worker is always left, and no request may fail.

The private memory of these four (resident, without the shared KV) is sampled every second. It must
not grow in the last half of the run. The measure is the lowest sample of each half minute, taken
after the heap was trimmed, and a straight line through these samples by least squares. Its slope
must be at most two standard errors above zero, or below --slope-floor.

Caches that fill up must not look like a leak. So they are filled before the measurement starts:
  - prompts of more lengths than vLLM's CPU build keeps oneDNN kernels for, one at a time. It keeps
    the kernels of the last 32 numbers of tokens in a step, for each weight;
  - load without faults for --warm-up seconds, from four times the clients and without pauses. Half
    of the time the decode workers prefill every prompt, half of the time the prefill workers;
  - for each frontend as many short requests as it keeps records of.

Writes results/chaos-soak.json and .md with --save.
Exit status 1 when anything failed, was wrong, or is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from benchmarks import machine
from benchmarks.chaos_cluster import ChaosCluster, cluster_in
from benchmarks.chaos_load import Load, make_work
from benchmarks.chaos_memory import Sampler, memory_rows
from benchmarks.chaos_tables import none_of
from benchmarks.live import BenchError, end_in_order
from benchmarks.report import Row, finish, percentile, row
from pullfill.frontend.request_log import MAX_RECORDS
from tests.support.checkpoint import tiny_checkpoint
from tests.support.cluster import MODEL, Worker
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt

LENGTHS = (40, 300, 700, 1100, 1500)
MAX_TOKENS = 24
PROMPTS = 400
CUT_SHARE = 0.1
KERNELS = 32
"""For how many token counts vLLM keeps the oneDNN kernel of each weight."""
STEPS = {"always_local": range(1024, 1536), "always_remote": range(512, 1024)}
"""Prompt lengths that fill this cache: as long as the longest steps of each kind of worker."""
POLICY_S = 1.0
"""For a router setting to arrive."""
STOP_S, NATS_S, ETCD_S = 8.0, 6.0, 9.0
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:.* {2}.*\n)*.*")


class Faults:
    """Does one fault at a time; what it took away is started again in the background.

    done: kind → how often. bad_exits: of workers that drained, other than 0. bad_starts: last lines
    of workers that ended instead of joining; another one is started. The victims are always the
    youngest of their role, so the oldest live.
    """

    def __init__(self, cluster: ChaosCluster, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng
        self._starting: dict[str, Worker] = {}
        self.done: Counter[str] = Counter()
        self.bad_exits: list[str] = []
        self.bad_starts: list[str] = []
        self.kinds: dict[str, Callable[[], None]] = {
            "kill-prefill": lambda: self._kill("prefill"),
            "kill-decode": lambda: self._kill("decode"),
            "drain-prefill": lambda: self._drain("prefill"),
            "drain-decode": lambda: self._drain("decode"),
            "stop-prefill": self._stop_prefill,
            "kill-nats": self._kill_nats,
            "hang-nats": self._hang_nats,
            "kill-etcd": self._kill_etcd,
            "hang-etcd": self._hang_etcd,
        }

    def run(self, until: float, every_s: float, kinds: list[str]) -> None:
        """Until time.monotonic() is `until`. Each kind comes once before any comes again."""
        pack: list[str] = []
        while (now := time.monotonic()) < until:
            time.sleep(min(self._rng.expovariate(1 / every_s), 3 * every_s, until - now))
            pack = pack or self._rng.sample(kinds, len(kinds))
            kind = next((k for k in pack if self._possible(k)), None)
            if kind is None or time.monotonic() >= until:
                continue
            pack.remove(kind)
            print(f"{time.strftime('%H:%M:%S')} {kind}", flush=True)
            self.kinds[kind]()
            self.done[kind] += 1

    def settle(self) -> None:
        """Everything whole again."""
        for role in list(self._starting):
            self._possible(f"kill-{role}")
        self._cluster.whole()
        self._starting.clear()

    # ------------------------------------------------------------------ inside

    def _possible(self, kind: str) -> bool:
        """A role with a worker still starting has only one that may not be taken."""
        role = kind.partition("-")[2]
        worker = self._starting.get(role)
        if worker is None:
            return True
        if not worker.alive:
            self.bad_starts.append(f"{role}: {worker.tail(1)}")
            self._starting[role] = self._cluster.replace(worker)
            return False
        with suppress(AssertionError):
            self._cluster.wait_ready(worker, within_s=0.2)
            del self._starting[role]
            return True
        return False

    def _kill(self, role: str) -> None:
        victim = self._cluster.of(role)[-1]
        victim.kill()
        time.sleep(self._rng.uniform(0, 3))
        self._starting[role] = self._cluster.replace(victim)

    def _drain(self, role: str) -> None:
        victim = self._cluster.of(role)[-1]
        victim.signal(signal.SIGTERM)
        self._starting[role] = self._cluster.replace(victim)
        if (code := victim.process.wait(90)) != 0:
            print(f"  {victim.instance_id} drained with exit code {code}", flush=True)
            self.bad_exits.append(f"{victim.instance_id}: {code}")

    def _stop_prefill(self) -> None:
        victim = self._rng.choice(self._cluster.of("prefill"))
        victim.signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.2, STOP_S))
        victim.signal(signal.SIGCONT)

    def _kill_nats(self) -> None:
        self._cluster.nats.kill()
        time.sleep(self._rng.uniform(0, 3))
        asyncio.run(self._cluster.nats.start())

    def _hang_nats(self) -> None:
        self._cluster.nats.pause()
        time.sleep(self._rng.uniform(0.2, NATS_S))
        self._cluster.nats.resume()

    def _kill_etcd(self) -> None:
        self._cluster.etcd.kill()
        time.sleep(self._rng.uniform(0, ETCD_S))
        self._cluster.etcd.start()

    def _hang_etcd(self) -> None:
        self._cluster.etcd.pause()
        time.sleep(self._rng.uniform(0.2, ETCD_S))
        self._cluster.etcd.resume()


def warm_up(cluster: ChaosCluster, load: Load, seconds: float) -> None:
    """Raises BenchError when a request fails, as nothing is wrong yet."""
    for policy, lengths in STEPS.items():
        cluster.set_router(policy=policy)
        time.sleep(POLICY_S)
        fill_kernels(cluster.urls()[0], lengths)
    with load:
        for policy in ("always_local", "always_remote"):
            cluster.set_router(policy=policy)
            time.sleep(seconds / 2)
    cluster.set_router(policy="conditional")
    if failed := load.failed():
        raise BenchError(f"before any fault: {failed[0].error}")


def fill_kernels(url: str, lengths: Sequence[int]) -> None:
    """Send prompts of many lengths, one after the other, so that each is a step of its own.

    There are many more lengths than vLLM keeps kernels for, because two workers share the prompts
    by chance."""
    with httpx.Client(timeout=60.0) as http:
        for length in random.Random(1).sample(lengths, 4 * KERNELS):
            prompt = random_prompt(length, seed=length)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            http.post(f"{url}/v1/completions", json=body).raise_for_status()


def fill_histories(urls: Sequence[str]) -> None:
    """One-token requests, 100 in a body, until every frontend has forgotten some."""
    prompts = [[10 + i % 200, 20 + i // 10] for i in range(100)]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 1, "temperature": 0}
    with httpx.Client(timeout=60.0) as http:
        for url in urls:
            for _ in range(MAX_RECORDS // len(prompts) + 5):
                http.post(f"{url}/v1/completions", json=body).raise_for_status()


def soak(options: argparse.Namespace, base: Path) -> list[Row]:
    """Raises BenchError when the cluster does not start or does not come back."""
    with Oracle(tiny_checkpoint()) as oracle:
        work = make_work(oracle, PROMPTS, LENGTHS, MAX_TOKENS, grow=0.25)
    rng = random.Random(options.seed)
    with cluster_in(base, tiny_checkpoint(), decode=2, prefill=2, frontends=2) as cluster:
        faults = Faults(cluster, rng)
        kinds = [k for k in faults.kinds if k not in options.without]
        lasting = {w.log.stem: w.pid for w in _lasting(cluster)}
        load = Load(
            work, cluster.urls, clients=options.clients, each=None,
            pause_s=options.pause, cut_share=CUT_SHARE, seed=options.seed,
        )  # fmt: skip
        warm = Load(work, cluster.urls, clients=4 * options.clients, each=None, seed=options.seed)
        fill_histories(cluster.urls())
        warm_up(cluster, warm, options.warm_up)
        began = time.monotonic()
        with load, Sampler(lasting) as sampler:
            faults.run(began + 60 * options.minutes, options.every, kinds)
            left = _complaint(faults.settle)
            load.stop()
        took = time.monotonic() - began
        left = left or _complaint(cluster.assert_clean)
        dead = [name for name, pid in lasting.items() if not _alive(cluster, pid)]
        sampler.look_at_maps()
        sampler.write(base / "memory.csv")
        errors = _tracebacks(cluster)
    asks, wrong = load.ended, work.wrong(load.ended)
    for ask in load.failed()[:20] + wrong[:20]:
        print(f"  {ask.request_id} at {ask.url}, {len(ask.tokens)} tokens: {ask.error or 'wrong'}")
    for line in [*errors[:20], *faults.bad_starts, *faults.bad_exits, *dead, left]:
        print(f"  {line}")
    rows = [
        row("length", took / 60, "min"),
        row("requests", len(asks), ""),
        row("of them abandoned by their client", sum(a.cut for a in asks), ""),
        none_of("requests failed", len(load.failed()), len(asks)),
        none_of("wrong answers", len(wrong), len(asks)),
        none_of("blocks, jobs or messages left behind", int(bool(left))),
        none_of("log lines with a traceback", len(errors)),
        none_of("processes that ended without being told to", len(dead)),
        none_of("workers that ended while they started", len(faults.bad_starts)),
        none_of("drained with another exit code than 0", len(faults.bad_exits)),
        row("tokens", sum(len(a.tokens) for a in asks) / took, "tokens/s"),
    ]
    whole = [1000 * (a.ended - a.began) for a in asks if not a.cut and not a.error]
    rows += [row(f"duration, p{100 * p:g}", percentile(whole, p), "ms") for p in (0.5, 0.99)]
    rows += [row(f"fault: {kind}", count, "times") for kind, count in sorted(faults.done.items())]
    return rows + [
        line
        for name, samples in sampler.of.items()
        for line in memory_rows(name, samples, options.slope_floor)
    ]


def _complaint(check: Callable[[], object]) -> str:
    """What is wrong according to `check`; "" if nothing."""
    try:
        check()
    except (AssertionError, BenchError) as exc:
        return str(exc) or "not whole again"
    return ""


def _tracebacks(cluster: ChaosCluster) -> list[str]:
    """What the workers' logs hold of each traceback: its frames and its error."""
    texts = ((w.log.name, w.log.read_text(errors="replace")) for w in cluster.workers)
    return [f"{name}: {found[0]}" for name, text in texts for found in _TRACEBACK.finditer(text)]


def _alive(cluster: ChaosCluster, pid: int) -> bool:
    return any(w.pid == pid for w in cluster.workers_alive())


def _lasting(cluster: ChaosCluster) -> list[Worker]:
    """The processes that no fault ends."""
    return [cluster.of("decode")[0], cluster.of("prefill")[0], *cluster.of("frontend")]


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=120.0, metavar="S", help="before them")
    parser.add_argument("--every", type=float, default=12.0, metavar="S", help="between faults")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.3, metavar="S", help="mean, of a client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slope-floor", type=float, default=0.5, metavar="MIB_PER_MIN")
    parser.add_argument("--without", action="append", default=[], metavar="KIND")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    parser.add_argument("--save", action="store_true", help="write the results")
    return parser


def main() -> int:
    options = command_line().parse_args()
    end_in_order()
    quiet = machine.OtherLoad()
    quiet.look()
    with tempfile.TemporaryDirectory(prefix="pullfill-soak-") as directory:
        rows = soak(options, options.logs or Path(directory))
    return finish(
        "chaos-soak",
        rows,
        quiet=quiet.quiet,
        save=options.save,
        title=f"{options.minutes:g} minutes of mixed faults",
    )


if __name__ == "__main__":
    sys.exit(main())
