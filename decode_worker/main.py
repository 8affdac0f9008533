"""`pullfill decode`: one decode worker process, from flags to exit code."""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.config import ClusterRef
from pullfill.decode_worker.side import DecodeRole
from pullfill.options import WorkerOptions
from pullfill.worker.process import WorkerProcess
from pullfill.worker.run import run_worker


def run(cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """One decode worker; does not return (worker/run.py)."""

    async def serve() -> int:
        role = DecodeRole(cluster, options)
        return await WorkerProcess(role, cluster, options, list(vllm_args)).serve()

    run_worker("decode", options, vllm_args, serve)
