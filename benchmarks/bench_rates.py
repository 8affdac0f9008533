"""Goodput at rising rates, by a public load generator (guidellm): `make bench-rates`.

Each system is started fresh and gets the same requests at the same random moments: three quarters
short streams, a quarter long prompts. Counted is how many requests per second keep the SLO, as
guidellm counts them: time to the first token, and the mean time between tokens of a request. The
limits are the defaults of `router.ttft_ms` and `router.itl_ms`. guidellm runs in an environment of
its own, which `make install-bench` makes. Writes results/rates.md. Exit status 1 when a system
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import string
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import command, machine
from benchmarks.live import BenchError
from benchmarks.report import Row, missing, row, versus
from benchmarks.serving import model
from benchmarks.serving.contract import Name, System
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.systems_pairs import Skipped
from benchmarks.serving.workloads import LONG_OUT, SHORT_IN, SHORT_OUT, SWEEP_IN, SWEEP_SHARE
from pullfill.deploy import plan
from pullfill.wire import RouterConfig

VERSION = "0.8.1"
START_S = 120.0
"""How long guidellm may take before and after the requests."""
ANSWERS_S = 120.0
"""How long answers may take after the last request."""
SLO = RouterConfig()


@dataclass(frozen=True, slots=True)
class Rate:
    """What came of one rate of requests per second. Tokens and good requests are per second, from
    the first request to the end of the last one."""

    rate: float
    finished: int
    failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    tokens_per_s: float
    good_per_s: float
    good_share: float


def environment() -> Path:
    """Where guidellm lives."""
    return plan.demo_directory().parent / f"guidellm-{VERSION}"


def program() -> Path:
    """guidellm's command. Raises Skipped when it is not installed."""
    path = environment() / "bin" / "guidellm"
    if not path.exists():
        raise Skipped("guidellm is not installed: make install-bench")
    return path


def install() -> Path:
    """Make the environment unless it is there. Raises BenchError with what pip said last.

    guidellm needs versions that vLLM does not want, so not into .venv; PyTorch and transformers
    are read from there, which saves gigabytes.
    """
    target = environment()
    if (target / "bin" / "guidellm").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    steps = [
        [sys.executable, "-m", "venv", str(target)],
        [str(target / "bin" / "python"), "-m", "pip", "install", f"guidellm=={VERSION}"],
    ]
    for number, step in enumerate(steps):
        if number:
            packages = next(target.glob("lib/python*/site-packages"))
            (packages / "venv-of-pullfill.pth").write_text(sysconfig.get_path("purelib") + "\n")
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(target, ignore_errors=True)
            raise BenchError(f"guidellm was not installed: {(done.stdout + done.stderr)[-1500:]}")
    return target


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[dict[str, Any]]:
    """So many rows of guidellm's data: random words, a quarter of the prompts long, the same for
    the same seed; lengths in tokens, to one or two."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        long = draw.random() < SWEEP_SHARE
        wanted, out = (SWEEP_IN, LONG_OUT) if long else (SHORT_IN, SHORT_OUT)
        letters = draw.choices(string.ascii_lowercase + " ", k=2 * wanted)
        ids = tokenizer.encode("".join(letters)).ids[:wanted]
        text = tokenizer.decode(ids)
        rows.append({"prompt": text, "prompt_tokens_count": wanted, "output_tokens_count": out})
    return rows


def scenario(
    url: str, rate: float, count: int, seed: int, data: Path, output: Path
) -> dict[str, Any]:
    """guidellm's settings: so many requests at random times (Poisson), whether the ones before are
    answered or not; it ends with the last answer."""
    return {
        "spec": {
            "backend": {
                "kind": "openai_http",
                "target": url,
                "model": model.NAME,
                "request_format": "/v1/completions",
                "http2": False,
                "extras": {"body": {"ignore_eos": True, "temperature": 0.0}},
            },
            "tokenizer": {"kind": "huggingface_auto", "model": str(model.model_directory())},
            "data": [{"kind": "json_file", "path": str(data)}],
            "profile": {"kind": "poisson", "rate": rate},
            "constraints": [{"kind": "max_requests", "count": count}],
            "seed": {"kind": "static", "value": seed},
            "metrics": {
                "kind": "generative",
                "sample_size": 0,
                "slo": {"ttft_ms": SLO.ttft_ms, "tpot_ms": SLO.itl_ms},
            },
            "outputs": [{"kind": "json", "path": str(output)}],
        }
    }


def measure(url: str, rate: float, seconds: float, seed: int, folder: Path) -> Rate:
    """Send a server `rate` requests per second for so long and wait for all answers. What guidellm
    was told and said stays in the folder.

    Raises Skipped without guidellm, BenchError when it fails or is late."""
    command, count = program(), max(1, round(rate * seconds))
    data, report, log, settings = (
        folder / f"guidellm-{rate:g}-{seed}{end}"
        for end in ("-data.jsonl", ".json", ".log", "-settings.json")
    )
    tokenizer = Tokenizer.from_file(str(model.model_directory() / "tokenizer.json"))
    rows = prompts(tokenizer, count, seed)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = scenario(url, rate, count, seed, data.absolute(), report.absolute())
    settings.write_text(json.dumps(told, indent=2))
    env = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder.absolute() / "datasets"),
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
    }
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                [str(command), "run", "--disable-console", "-c", str(settings.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=START_S + seconds + ANSWERS_S,
                cwd=folder,
                env={**os.environ, **env},
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"guidellm did not end in time: see {log}") from None
    if done.returncode or not report.exists():
        raise BenchError(f"guidellm failed ({done.returncode}):\n{log.read_text()[-2000:]}")
    return parse(json.loads(report.read_text()))


def parse(report: dict[str, Any]) -> Rate:
    """The one benchmark of a guidellm report. Raises BenchError when it has another form."""
    try:
        (benchmark,) = report["benchmarks"]
        metrics = benchmark["metrics"]
        totals = metrics["request_totals"]
        ttft = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
        itl = metrics["inter_token_latency_ms"]["successful"]["percentiles"]
        duration = float(benchmark["duration"])
        finished, share = int(totals["successful"]), float(metrics["slo_attainment"] or 0.0)
        return Rate(
            rate=float(benchmark["config"]["strategy"]["rate"]),
            finished=finished,
            failed=int(totals["errored"]) + int(totals["incomplete"]),
            ttft_p50_s=ttft["p50"] / 1e3,
            ttft_p99_s=ttft["p99"] / 1e3,
            itl_p50_s=itl["p50"] / 1e3,
            itl_p99_s=itl["p99"] / 1e3,
            tokens_per_s=metrics["output_token_count"]["successful"]["total_sum"] / duration,
            good_per_s=share * metrics["slo_determined_requests"] / duration,
            good_share=share,
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise BenchError(f"a report of guidellm {VERSION} was expected: {exc!r}") from exc


DEFAULT = (Name.AGGREGATED, Name.AGGREGATED_256, Name.ROUND_ROBIN, Name.NIXL, Name.PULLFILL)
WARM_RATE, WARM_S = 4.0, 3.0
GOOD = 0.9
"""Share of the requests of a rate that must keep the SLO for the system to sustain it."""


def sweep(
    system: System, options: argparse.Namespace, base: Path, quiet: machine.OtherLoad
) -> list[Rate]:
    """Start, warm up, measure every rate, end. Raises BenchError."""
    found, folder = [], base / system.name
    folder.mkdir()
    quiet.look(2.0)
    with system.launch(folder) as running:
        url = running.url
        measure(url, WARM_RATE, WARM_S, options.seed - 1, folder)
        for number, rate in enumerate(options.rates):
            seed = options.seed + number
            with quiet.window(running.pids):
                came = measure(url, rate, options.seconds, seed, folder)
            print(f"{system.name} at {rate:g}/s: {describe(came)}", flush=True)
            found.append(came)
    return found


def describe(rate: Rate) -> str:
    """One rate in one line."""
    failed = f", {rate.failed} failed" if rate.failed else ""
    return (
        f"{100 * rate.good_share:.0f} % of {rate.finished} good{failed}; "
        f"TTFT p50 {1e3 * rate.ttft_p50_s:.0f} p99 {1e3 * rate.ttft_p99_s:.0f} ms; "
        f"ITL p50 {1e3 * rate.itl_p50_s:.1f} p99 {1e3 * rate.itl_p99_s:.1f} ms; "
        f"{rate.tokens_per_s:.0f} tokens/s"
    )


def rows_of(measured: dict[str, list[Rate]], failed: dict[str, BenchError]) -> list[Row]:
    """Every rate of every system, then who sustains most, then what failed."""
    rows = [
        row(f"{name}: goodput at {rate.rate:g} requests/s", rate.good_per_s, f"1/s, {text}")
        for name, rates in measured.items()
        for rate, text in ((rate, describe(rate)) for rate in rates)
    ]
    best = {name: max(rate.good_per_s for rate in rates) for name, rates in measured.items()}
    rivals = {name: good for name, good in best.items() if SYSTEMS[name].aggregated}
    for name, good in best.items():
        if SYSTEMS[name].ours and rivals:
            rival = max(rivals, key=lambda other: rivals[other])
            what = f"{name}: best goodput of all rates"
            rows.append(versus(what, good, "1/s", rival, rivals[rival]))
    for name, rates in measured.items():
        ordered = sorted(rates, key=lambda rate: rate.rate)
        kept = list(takewhile(lambda r: r.good_share >= GOOD and not r.failed, ordered))
        what = f"{name}: highest rate up to which {100 * GOOD:g} % are good"
        rows.append(row(what, kept[-1].rate if kept else 0.0, "1/s"))
    for name, exc in failed.items():
        why = str(exc).splitlines()[0][:120]
        rows.append(missing(f"{name}: goodput", "", why))
        rows[-1].ok = isinstance(exc, Skipped)  # what is not installed fails nothing
    return rows


def run(options: argparse.Namespace, base: Path) -> tuple[list[Row], machine.OtherLoad]:
    measured: dict[str, list[Rate]] = {}
    failed: dict[str, BenchError] = {}
    quiet = machine.OtherLoad()
    for name in options.systems:
        try:
            measured[name] = sweep(SYSTEMS[name], options, base, quiet)
        except BenchError as exc:
            print(f"{name}: {exc}", file=sys.stderr)
            failed[name] = exc
    return rows_of(measured, failed), quiet


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(DEFAULT))
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests, for each rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--install", action="store_true", help="install guidellm, and no more")
    options = parser.parse_args(argv)
    if options.install:
        print(install())
        return 0
    try:
        program()
    except Skipped as exc:
        sys.exit(f"error: {exc}")
    slo = f"TTFT {SLO.ttft_ms:g} ms, mean ITL {SLO.itl_ms:g} ms"
    title = f"Goodput at rising rates, measured by guidellm ({slo})"
    return command.main("rates", title, options, run)


if __name__ == "__main__":
    sys.exit(main())
