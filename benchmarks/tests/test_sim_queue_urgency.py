"""The simulation of the queue at too high a load: the targets, and that order alone misses them."""

from __future__ import annotations

from benchmarks.sim import queue_urgency as sim
from pullfill.queue.urgency import Urgency

TIGHT, NORMAL, LOOSE = Urgency


def test_tight_jobs_are_in_time_and_loose_ones_are_not_left_out() -> None:
    found = sim.simulate(4, 1.2, seconds=90.0)
    assert found.in_time[TIGHT] >= 0.95
    assert found.work[LOOSE] >= 0.10


def test_in_order_of_arrival_tight_jobs_are_late() -> None:
    assert sim.simulate(4, 1.2, fifo=True, seconds=90.0).in_time[TIGHT] < 0.5


def test_where_there_is_no_queue_order_does_not_matter() -> None:
    run, fifo = (sim.simulate(16, 0.4, fifo, seconds=60.0) for fifo in (False, True))
    assert min(run.in_time[TIGHT], fifo.in_time[TIGHT]) > 0.98


def test_a_job_that_is_taken_back_is_not_computed() -> None:
    jobs = sim.asks(2, 2.0, 60.0, 1)
    sim.Queue(2, fifo=False).run(jobs, 60.0)
    assert any(job.gone for job in jobs)
    assert not any(job.gone and job.taken for job in jobs)


def test_the_same_seed_gives_the_same_result() -> None:
    first, second = (sim.simulate(2, 1.2, seconds=40.0) for _ in range(2))
    assert first == second
