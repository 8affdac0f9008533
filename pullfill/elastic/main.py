"""`pullfill decode --elastic`, `pullfill prefill --elastic`: from flags to exit code."""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.config import ClusterRef
from pullfill.elastic.worker import ElasticRole, check
from pullfill.options import WorkerOptions
from pullfill.worker.process import WorkerProcess
from pullfill.worker.run import run_worker


def run(role: str, cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """Run one elastic worker that begins as `role`. Does not return (worker/run.py)."""

    async def serve() -> int:
        check(options, list(vllm_args))
        made = ElasticRole(role, cluster, options)
        return await WorkerProcess(made, cluster, options, list(vllm_args)).serve()

    run_worker(role, options, vllm_args, serve)
