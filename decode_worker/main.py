"""`pullfill decode`: one decode worker process, from flags to exit code.

Start: engine thread loads the model while etcd and NATS are dialled; then the control server, the
publisher, the probe server; last the registration, which makes frontends and prefill workers come.
End: lease revoked, SIGTERM, or the engine died. A drain leaves routing at once, finishes the
streams, closes the jobs and exits 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.config import ClusterRef
from pullfill.decode_worker.worker import DecodeWorker
from pullfill.engine.entry import run_worker
from pullfill.options import WorkerOptions


def run(cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """One decode worker; does not return (engine/entry.py)."""
    worker = DecodeWorker(cluster, options, list(vllm_args))
    run_worker("decode", options, vllm_args, worker.serve)
