"""`pullfill prefill`: one prefill worker process, from flags to exit code.

Start: engine thread loads the model while etcd and NATS are dialled; then links to the decode
workers, registration, and the first pull. End: lease revoked, SIGTERM, or the engine died. A drain
stops pulling, finishes the granted jobs and their writes, and exits 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.config import ClusterRef
from pullfill.engine.entry import run_worker
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.worker import PrefillWorker


def run(cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """One prefill worker; does not return (engine/entry.py)."""
    worker = PrefillWorker(cluster, options, list(vllm_args))
    run_worker("prefill", options, vllm_args, worker.serve)
