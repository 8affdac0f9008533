"""`pullfill prefill`: one prefill worker process, from flags to exit code."""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.config import ClusterRef
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.worker import PrefillRole
from pullfill.worker.process import WorkerProcess
from pullfill.worker.run import run_worker


def run(cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """One prefill worker; does not return (worker/run.py)."""

    async def serve() -> int:
        role = PrefillRole(cluster, options)
        return await WorkerProcess(role, cluster, options, list(vllm_args)).serve()

    run_worker("prefill", options, vllm_args, serve)
