"""Workers with both sides on beside every static split of the same two cores: `make bench-splits`.

    make bench-splits ARGS="--trace FILE --speeds 2 4 --rounds 2 --save"

In each round every system is started once, and gets all loads one after the other. The order of the
systems changes with each round. The loads:
  trace   the first requests of a trace in Mooncake's format, at each speed; only with --trace
  1K/1K   clients that never pause: prompts of 1024 tokens, answers of 1000
  1K/200  the same with answers of 200 tokens
  paced   both at random times, at rates that two cores can serve
  longs   four streams, and a prompt of 3000 tokens every 2 s
  rates   what `make bench-rates` asks, at random times, at each rate
  change  at random times long prompts with short answers, from half of the time on short prompts
          with long answers
  shared  only if named, as are its systems, four workers with both sides: prompts with one of six
          system prompts of 2048 tokens. Of each window it is told how many tokens of system prompts
          prefill workers computed although another worker had them when the job was claimed, or
          LEFT_S later. That is what the job would save if it was left to a worker that has them
All systems of a round get equal prompts; no two windows share a block. A request is good if its
first token comes within `router.ttft_ms` and the 99th percentile of its gaps is at most
`router.itl_ms`. Tokens per second count where clients never pause, and where few requests are good.
Under `change`, workers with both sides must be better than each of the others. After each of their
windows, their frontend is asked what it predicted for each request (`pullfill explain`). How long a
decision takes is a row of `make sim`.
A round of everything sends requests for 20 minutes. With starts, warm-ups and last answers it
should take 35; a run says at its end how long it took.
--save writes results/splits.md. The exit status is 1 if a target is missed, if a system failed, or
if the machine was not quiet.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import command, machine
from benchmarks.live import BenchError, end_in_order
from benchmarks.report import Row, finish, median, missing, percentile, row, versus
from benchmarks.serving import model, stats, workloads
from benchmarks.serving.campaign import rotated
from benchmarks.serving.contract import Launcher, Name, Running
from benchmarks.serving.systems import FLAGS, SYSTEMS
from benchmarks.serving.systems_pullfill import cluster
from benchmarks.serving.window import Window, explain, measure
from benchmarks.serving.workloads import SYSTEM, Longs, Prompts, Workload, paced
from pullfill.wire import RouterConfig

BOTH, TURNS = "both", "2-vllm"
FOUR = {f"4-{name}": name for name in ("pack", "kv", "round_robin")}
"""The systems that the load `shared` compares, each with its `router.decode_policy`."""
CHOICES: dict[str, Launcher] = {
    BOTH: lambda to: cluster(BOTH, "cost", 0, 0, FLAGS, to, workers=2, decode_policy="pack"),
    "1p1d-cost": lambda to: cluster("1p1d-cost", "cost", 1, 1, FLAGS, to),
    "1p1d-conditional": lambda to: cluster("1p1d-conditional", "conditional", 1, 1, FLAGS, to),
    "2-decode": lambda to: cluster("2-decode", "conditional", 2, 0, FLAGS, to),
    TURNS: SYSTEMS[Name.ROUND_ROBIN].launch,
    "1-vllm": SYSTEMS[Name.AGGREGATED].launch,
}
KNOWN = [*CHOICES]
CHOICES |= {
    name: partial(cluster, name, "cost", 0, 0, FLAGS, workers=4, decode_policy=policy)
    for name, policy in FOUR.items()
}
NOTE = f"""\
{BOTH}: `pullfill up --workers 2` with `router.policy` cost and `router.decode_policy` pack.
1p1d: one decode worker and one prefill worker. {TURNS}: two plain vLLM servers with a core each,
which get the requests in turn. 1-vllm: one plain vLLM server on both cores."""
TRACE, LONGS, ANSWERS = "trace", "longs", {"1K/1K": 1000, "1K/200": 200}
PACED, RATES, CHANGE, SHARED = "paced", "rates", "change", "shared"
PROMPT = 1024
TIMES = {"1K/1K": 2.0}
"""How many times as long its windows are. One answer takes about as long as a window of others."""
PROMPTS_HEAVY, ANSWERS_HEAVY = (1024, 16), (32, 400)
"""Of `change`: tokens of a prompt and of its answer."""
OWN = {"short": (1.5, {(100, 16): 1, (300, 16): 1}), "long": (1.0, {(600, 16): 1, (1000, 16): 1})}
"""Of the load `shared`: prompts per second, and how many tokens follow the system prompt. If few
follow, the KV of the system prompt is read from another decode worker (prefix/fetches.py)."""
LEFT_S = 1.0
WARM = (512, PROMPT, workloads.LONG_IN)
"""Lengths of the prompts before each window."""
SLO = stats.Slo(RouterConfig().ttft_ms / 1e3, RouterConfig().itl_ms / 1e3)
SATURATED = 0.9
"""A load is, if no system keeps that share good."""
TRACE_GOOD = {"trace 2x": 0.99, "trace 4x": 0.95}
"""What share is to be good."""
BETTER = 1.001
"""The least ratio that counts as better."""
ERRORS = {"median": (0.5, 15.0), "p90": (0.9, 50.0)}
"""The largest error of predictions that meets the target, in percent, for each percentile."""


def loads(options: argparse.Namespace, vocabulary: range, number: int) -> dict[str, Workload]:
    """Of one round, by label."""
    found = {}
    for load in options.loads:
        prompts, seconds = Prompts(vocabulary, load, number), options.seconds * TIMES.get(load, 1.0)
        if load == LONGS:
            found[load] = workloads.interference(prompts, seconds, Longs())
        elif answer := ANSWERS.get(load):
            found[load] = workloads.saturated(prompts, seconds, options.clients, PROMPT, answer)
        elif load == PACED:
            for (name, answer), rate in zip(ANSWERS.items(), options.paced, strict=True):
                end_s = seconds * TIMES.get(name, 1.0)
                asks = paced(prompts, rate, {(PROMPT, answer): 1}, 0.0, end_s)
                found[f"{name} {PACED}"] = Workload(tuple(asks), end_s)
        elif load == RATES:
            for rate in options.rates:
                asks = paced(prompts, rate, workloads.MIXED, 0.0, seconds)
                found[f"{RATES} {rate:g}/s"] = Workload(tuple(asks), seconds)
        elif load == CHANGE:
            (first, then), half_s = options.change, seconds / 2
            asks = paced(prompts, first, {PROMPTS_HEAVY: 1}, 0.0, half_s)
            asks += paced(prompts, then, {ANSWERS_HEAVY: 1}, half_s, seconds)
            found[load] = Workload(tuple(asks), seconds)
        elif load == SHARED:
            for name, (rate, shapes) in OWN.items():
                found[f"{SHARED}, {name}"] = workloads.shared(prompts, rate, shapes, seconds)
        else:
            for speed in options.speeds if options.trace else ():
                asks = workloads.trace(options.trace, speed, vocabulary, load, speed, number)
                found[f"{TRACE} {speed:g}x"] = Workload(tuple(asks[: options.requests]), seconds)
    return found


class Figures(NamedTuple):
    """Of one system under one load, all rounds together; times in ms. tokens_s: the median."""

    requests: int
    failed: int
    good: float
    ttft_p50: float
    ttft_p90: float
    itl_p99: float
    tokens_s: float

    def __str__(self) -> str:
        return "{} | {} | {:.3f} | {:.0f} | {:.0f} | {:.1f} | {:.0f}".format(*self)


def figures(windows: Sequence[Window]) -> Figures:
    """Times of which there is none are nan."""
    answers = [a for w in windows for a in w.answers]
    first, gaps = stats.ttfts(answers) or [math.nan], stats.gaps(answers) or [math.nan]
    return Figures(
        len(answers),
        len(stats.failed(answers)),
        stats.goodput(answers, 1.0, SLO)[1],
        1e3 * percentile(first, 0.5),
        1e3 * percentile(first, 0.9),
        1e3 * percentile(gaps, 0.99),
        # What comes after a closed loop's end is left out; a trace may end earlier.
        median(stats.tokens_per_s(w.answers, min(w.length_s, w.result.took_s)) for w in windows),
    )


def errors(windows: Sequence[Window]) -> dict[str, list[float]]:
    """Of predicted times to the first token, in percent, by where the prompt was computed. Prompts
    that were not computed where it was decided are left out."""
    found: dict[str, list[float]] = {"local": [], "remote": []}
    for one in (record for window in windows for record in window.explained.values()):
        was, told = one.get("outcome_ms"), (one.get("predicted_ms") or {}).get(one["path"])
        if was and told and one["path"] == one.get("choice"):
            found[one["path"]].append(100 * abs(told / was - 1))
    return found


def elsewhere(window: Window) -> list[int]:
    """Tokens of system prompts that prefill workers computed although another worker had them, of
    each such job. What the decode worker has is read from there.

    A worker has a system prompt from the first token of an answer to it on."""
    since: dict[tuple[str | None, Sequence[int]], float] = {}
    told = [(a, window.explained[a.request_id]) for a in stats.good(window.answers)]
    for answer, one in told:
        for worker in (one["decode_instance"], one["prefill_instance"]):
            key = worker, answer.ask.prompt[:SYSTEM]
            since[key] = min(answer.token_s[0], since.get(key, math.inf))
    found = []
    for answer, one in (each for each in told if each[1]["path"] == "remote"):
        taker, system = one["prefill_instance"], answer.ask.prompt[:SYSTEM]
        claimed_s = answer.sent_s + (one["timings_ms"]["queue"] or 0.0) / 1e3
        not_these = (None, taker, one["decode_instance"])
        by_s = [at for (who, what), at in since.items() if what == system and who not in not_these]
        if since[taker, system] > claimed_s and min(by_s, default=math.inf) < claimed_s + LEFT_S:
            found.append(max(0, SYSTEM - one["prefix_hit_tokens"]))
    return [tokens for tokens in found if tokens]


Table = Mapping[str, Mapping[str, Figures]]
"""By load and system."""


def table_of(windows: Sequence[Window]) -> Table:
    found: dict[str, dict[str, list[Window]]] = {}
    for window in sorted(windows, key=lambda w: [*CHOICES].index(w.system)):
        found.setdefault(window.label, {}).setdefault(window.system, []).append(window)
    return {load: {k: figures(v) for k, v in each.items()} for load, each in found.items()}


def markdown(found: Table) -> str:
    head = "requests | failed | good | TTFT p50 ms | p90 ms | ITL p99 ms | tokens/s"
    lines = [f"| load | system | {head} |", "|---" * 9 + "|"]
    for load, each in found.items():
        lines += [f"| {load} | {name} | {one} |" for name, one in each.items()]
    return "\n".join(lines)


def rows_of(found: Table) -> list[Row]:
    """Workers with both sides against the others, and against the trace's targets."""
    return [one for load, each in found.items() for one in _held(load, each)]


def predictions(windows: Sequence[Window]) -> Iterator[Row]:
    """How far they were off, if workers with both sides were measured."""
    mine = [window for window in windows if window.system == BOTH]
    for path, off in errors(mine).items() if mine else ():
        what = f"prompts computed {'here' if path == 'local' else 'at another worker'}"
        if not off:
            yield missing(f"{what}: error of predictions", "", "no such prompt had one")
            continue
        for name, (share, most) in ERRORS.items():
            metric = f"{what}: error of {len(off)} predictions, {name}"
            yield row(metric, percentile(off, share), "%", at_most=most)


def _held(load: str, systems: Mapping[str, Figures]) -> Iterator[Row]:
    rest = {name: one for name, one in systems.items() if name != BOTH}
    if BOTH not in systems or not rest:
        return
    mine = systems[BOTH]
    if load == CHANGE:
        for name, one in rest.items():
            if one.good:
                yield versus(f"{load}: good", mine.good, "share", name, one.good, at_least=BETTER)
            if most := one.tokens_s:
                yield versus(f"{load}: tokens", mine.tokens_s, "1/s", name, most, at_least=BETTER)
        return
    best = max(rest, key=lambda name: rest[name].good)
    if good := rest[best].good:  # else nobody is better
        yield versus(f"{load}: good", mine.good, "share", best, good, at_least=0.99)
    best = max(rest, key=lambda name: rest[name].tokens_s)
    if (most := rest[best].tokens_s) and (load in ANSWERS or good < SATURATED):
        yield versus(f"{load}: tokens", mine.tokens_s, "1/s", best, most, at_least=0.97)
    if load.startswith(TRACE):
        yield row(f"{load}: good", mine.good, "share", at_least=TRACE_GOOD.get(load))
        yield row(f"{load}: ITL p99", mine.itl_p99, "ms", at_most=25.0)
        if TURNS in rest:
            p90 = rest[TURNS].ttft_p90
            yield versus(f"{load}: TTFT p90", mine.ttft_p90, "ms", TURNS, p90, at_most=1.05)


def campaign(
    options: argparse.Namespace, base: Path, quiet: machine.OtherLoad, windows: list[Window]
) -> list[str]:
    """Fill `windows`. Returns what failed."""
    troubles, vocabulary = list[str](), model.plain_tokens()
    rounds = range(options.rounds)
    for number, name in ((n, name) for n in rounds for name in rotated(options.systems, n)):
        folder = base / f"{number}-{name}"
        folder.mkdir()
        quiet.look(2.0)
        try:
            with CHOICES[name](folder) as running:
                for label, work in loads(options, vocabulary, number).items():
                    warm = workloads.warm_up(Prompts(vocabulary, "warm-up", label, number), WARM)
                    measure(running, "splits", "warm-up", number, warm)
                    windows.append(measured(running, name, label, number, work))
                    quiet.others.append(windows[-1].others)
        except (KeyboardInterrupt, SystemExit):
            return [*troubles, "ended early"]
        except (BenchError, OSError, subprocess.SubprocessError) as exc:
            troubles.append(f"{name}, round {number}: {str(exc)[-1500:]}")
            print(troubles[-1], flush=True)
    return troubles


def measured(running: Running, name: str, label: str, number: int, work: Workload) -> Window:
    """Raises BenchError if the load was not what it says."""
    window = measure(running, "splits", label, number, work)
    if window.result.dry:
        raise BenchError(f"{label}: no prompts left for the clients")
    window.system = name
    if name in (BOTH, *FOUR):
        explain(window, running.url)
    off = "".join(
        f" | {path} predictions off by {median(each):.0f} % of {len(each)}"
        for path, each in errors([window]).items()
        if each
    )
    if name in FOUR:
        saves, whole = elsewhere(window), sum(len(answer.ask.prompt) for answer in window.answers)
        off += f" | {len(saves)} jobs could save {sum(saves)} tokens of prompts of {whole}"
    others, bad = f"others used {100 * window.others:.0f} %", stats.failed(window.answers)
    why = f" | first failure: {bad[0].error[:200]}" if bad else ""
    print(f"{label} | {name} | {figures([window])} | {others}{off}{why}", flush=True)
    return window


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.described(__doc__)
    parser.add_argument("--systems", nargs="+", choices=CHOICES, default=KNOWN)
    known = [TRACE, *ANSWERS, PACED, LONGS, RATES, CHANGE]
    parser.add_argument("--loads", nargs="+", choices=[*known, SHARED], default=known)
    parser.add_argument("--trace", type=Path, help="JSON lines, Mooncake's format")
    parser.add_argument("--speeds", type=float, nargs="+", default=[2.0, 4.0], help="of the trace")
    parser.add_argument("--requests", type=int, help="of the trace (those of --seconds)")
    parser.add_argument("--clients", type=int, default=16, help="of 1K/1K and 1K/200")
    parser.add_argument("--paced", type=float, nargs=2, default=[0.4, 1.7], metavar="RATE",
                        help="of 1K/1K and 1K/200")  # fmt: skip
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--change", type=float, nargs=2, default=[2.0, 1.0], metavar="RATE",
                        help="of both halves of change")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=15.0,
                        help="in which requests are sent")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results/splits.md")
    parser.add_argument("--even-if-busy", action="store_true", help="save also then, marked")
    options = parser.parse_args(argv)
    if options.trace and not options.trace.is_file():
        parser.error(f"there is no file {options.trace}")
    if options.loads == [TRACE] and not options.trace:
        parser.error("the load trace needs --trace FILE")
    end_in_order()
    quiet, windows, began = machine.OtherLoad(), list[Window](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        troubles = campaign(options, Path(directory), quiet, windows)
    found = table_of(windows)
    more = f"{markdown(found)}\n\n{NOTE}"
    took = f"it took {(time.monotonic() - began) / 60:.1f} minutes"
    print(f"\n{more}\n\n{quiet}", took, *troubles, sep="\n")
    title, save = "Workers with both sides on beside static splits", options.save and not troubles
    rows = [*rows_of(found), *predictions(windows)]
    status = finish("splits", rows, quiet=quiet.quiet, save=save, title=title, more=more,
                    even_if_busy=options.even_if_busy)  # fmt: skip
    return status or int(bool(troubles))


if __name__ == "__main__":
    sys.exit(main())
