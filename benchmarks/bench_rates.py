"""Goodput at rising rates, by a public load generator (guidellm): `make bench-rates`.

Each system is started fresh and gets the same requests at the same random moments: three quarters
short streams, a quarter long prompts. Counted is how many requests per second keep the SLO, as
guidellm counts them: time to the first token, and the mean time between tokens of a request.
`make bench` measures the same with a load of its own, which holds each single pause against the
SLO. Writes results/rates.md. Exit status 1 when a system failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from benchmarks import machine
from benchmarks.live import BenchError, end_in_order
from benchmarks.report import Row, finish, missing, row, versus
from benchmarks.serving import public_load
from benchmarks.serving.contract import Name, System
from benchmarks.serving.public_load import Rate, Slo
from benchmarks.serving.systems import SYSTEMS
from benchmarks.serving.systems_pairs import Skipped

DEFAULT = (Name.AGGREGATED, Name.AGGREGATED_256, Name.ROUND_ROBIN, Name.NIXL, Name.PULLFILL)
WARM_RATE, WARM_S = 4.0, 3.0
GOOD = 0.9
"""Share of the requests of a rate that must keep the SLO for the system to sustain it."""


def sweep(
    system: System, options: argparse.Namespace, base: Path, quiet: machine.OtherLoad
) -> list[Rate]:
    """Start, warm up, measure every rate, end. Raises BenchError."""
    slo, found = Slo(options.slo_ttft / 1e3, options.slo_itl / 1e3), []
    folder = base / system.name
    folder.mkdir()
    quiet.look(2.0)
    with system.launch(folder) as running:
        url = running.url
        public_load.measure(url, WARM_RATE, WARM_S, slo, options.seed - 1, folder)
        for number, rate in enumerate(options.rates):
            seed = options.seed + number
            with quiet.window(running.pids):
                came = public_load.measure(url, rate, options.seconds, slo, seed, folder)
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


def rows_of(measured: dict[str, list[Rate]], failed: dict[str, str]) -> list[Row]:
    """Every rate of every system, then who sustains most."""
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
    rows += [missing(f"{name}: goodput", "", why) for name, why in failed.items()]
    return rows


def run(
    options: argparse.Namespace, base: Path, quiet: machine.OtherLoad
) -> tuple[list[Row], bool]:
    """The rows, and whether every system that is installed could be measured."""
    measured: dict[str, list[Rate]] = {}
    failed: dict[str, str] = {}
    fine = True
    for name in options.systems:
        try:
            measured[name] = sweep(SYSTEMS[name], options, base, quiet)
        except BenchError as exc:
            print(f"{name}: {exc}", file=sys.stderr)
            failed[name] = str(exc).splitlines()[0][:120]
            fine = fine and isinstance(exc, Skipped)
    return rows_of(measured, failed), fine


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(DEFAULT))
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests, for each rate")
    parser.add_argument("--slo-ttft", type=float, default=1000.0, metavar="MS")
    parser.add_argument("--slo-itl", type=float, default=50.0, metavar="MS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="rates", help="of the files in results/")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(argv)
    end_in_order()
    try:
        public_load.program()
    except Skipped as exc:
        sys.exit(f"error: {exc}")
    quiet = machine.OtherLoad()
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        rows, fine = run(options, Path(directory), quiet)
    print(quiet)
    slo = f"TTFT {options.slo_ttft:g} ms, mean ITL {options.slo_itl:g} ms"
    title = f"Goodput at rising rates, measured by guidellm ({slo})"
    status = finish(options.name, rows, quiet=quiet.quiet, save=not options.no_save, title=title)
    return status or int(not fine)


if __name__ == "__main__":
    sys.exit(main())
