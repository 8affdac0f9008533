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

The private memory of these four (resident, without the shared KV) is told at half time and at the
end.

Writes results/chaos-soak.md.
Exit status 1 when anything failed, was wrong, or is left behind.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks import command, machine
from benchmarks.chaos_cluster import ChaosCluster, cluster_in
from benchmarks.chaos_load import Load, make_work
from benchmarks.live import BenchError
from benchmarks.report import Row, none_of, percentile, row
from tests.support.checkpoint import tiny_checkpoint
from tests.support.cluster import Worker
from tests.support.oracle import Oracle

LENGTHS = (40, 300, 700, 1100, 1500)
MAX_TOKENS = 24
PROMPTS = 400
CUT_SHARE = 0.1
KV = "/dev/shm/pullfill-"
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
        self._cluster.nats.start()

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


def private_mib(pids: dict[str, int]) -> dict[str, float]:
    """Memory that no other process has, by name."""
    used = {name: machine.memory(pid) for name, pid in pids.items()}
    return {name: (one.rss - one.shared) / 2**20 for name, one in used.items()}


def dead_maps(pid: int) -> int:
    """How many regions of workers that are gone the process still maps."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(m.endswith("(deleted)") and KV in m for m in maps)


def soak(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    """Raises BenchError when the cluster does not start or does not come back."""
    quiet = machine.OtherLoad()
    quiet.look()
    with Oracle(tiny_checkpoint()) as oracle:
        work = make_work(oracle, PROMPTS, LENGTHS, MAX_TOKENS, grow=0.25)
    rng = random.Random(options.seed)
    with cluster_in(
        options.logs or base, tiny_checkpoint(), decode=2, prefill=2, frontends=2
    ) as cluster:
        faults = Faults(cluster, rng)
        kinds = [k for k in faults.kinds if k not in options.without]
        lasting = {w.log.stem: w.pid for w in _lasting(cluster)}
        load = Load(
            work, cluster.urls, clients=options.clients, each=None,
            pause_s=options.pause, cut_share=CUT_SHARE, seed=options.seed,
        )  # fmt: skip
        began, half_s = time.monotonic(), 30 * options.minutes
        with load:
            faults.run(began + half_s, options.every, kinds)
            half = private_mib(lasting)
            faults.run(began + 2 * half_s, options.every, kinds)
            left = _complaint(faults.settle)
            load.stop()
        took = time.monotonic() - began
        left = left or _complaint(cluster.assert_clean)
        dead = [name for name, pid in lasting.items() if not _alive(cluster, pid)]
        end = private_mib(lasting)
        mapped = {name: dead_maps(pid) for name, pid in lasting.items()}
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
    for name in lasting:
        rows.append(row(f"{name}: private memory at half time", half[name], "MiB"))
        rows.append(row(f"{name}: private memory at the end", end[name], "MiB"))
        rows.append(none_of(f"{name}: mapped regions of dead workers", mapped[name]))
    return rows, quiet


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


def main() -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=12.0, metavar="S", help="between faults")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.3, metavar="S", help="mean, of a client")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", action="append", default=[], metavar="KIND")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    options = parser.parse_args()
    title = f"{options.minutes:g} minutes of mixed faults"
    return command.main("chaos-soak", title, options, soak)


if __name__ == "__main__":
    sys.exit(main())
