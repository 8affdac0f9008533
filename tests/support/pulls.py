"""When a prefill worker takes no further job, by what it counts and by what NATS knows."""

from __future__ import annotations

from nats.js import JetStreamContext

from tests.support.cluster import Cluster, until


def granted(cluster: Cluster) -> float:
    """Grants that the prefill workers have received."""
    return cluster.counter("pullfill_claim_total", result="granted", role="prefill")


def requests_waiting(cluster: Cluster) -> int:
    """Pull requests that wait for a job at NATS."""

    async def ask(context: JetStreamContext, jobs: str) -> int:
        return sum(each.num_waiting or 0 for each in await context.consumers_info(jobs))

    return cluster.jetstream(ask)


def in_time(cluster: Cluster) -> None:
    """Give jobs an hour. The prompts go to prefill workers."""
    cluster.set_router(policy="always_remote", remote_timeout_s=30, ttft_ms=3.6e6)


def until_full(cluster: Cluster, before: float, jobs: int) -> None:
    """Wait until the prefill workers hold so many jobs, which fill their budgets, and ask for none.

    A claim that is answered late does not count, and the worker asks for one more job meanwhile.
    Jobs that are late fill no budget: before them call `in_time`.

    before: `granted` before the jobs were sent."""
    until(lambda: granted(cluster) == before + jobs, 20, "all are granted")
    until(lambda: not requests_waiting(cluster), 10, "nobody asks for more jobs")
