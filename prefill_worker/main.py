"""`pullfill prefill`: one prefill worker process, from flags to exit code.

Start: engine thread loads the model while etcd and NATS are dialled; then links to the decode
workers, registration, and the first pull. End: lease revoked, SIGTERM, or the engine died. A drain
stops pulling, finishes the granted jobs and their writes, and exits 0.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from pullfill import log
from pullfill.config import ClusterRef, WorkerOptions
from pullfill.engine import check, process
from pullfill.errors import ConfigError, IncompatibleError, PullfillError
from pullfill.prefill_worker.worker import PrefillWorker

logger = log.get("prefill_worker")


def run(cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """Pull until told to leave. 0: drained; 1: failed; 2: wrong flags or an incompatible peer.

    Does not return: leaves through os._exit so that no library's thread can hold the process.
    """
    log.setup("prefill")
    eager = "--enforce-eager" in vllm_args
    process.prepare(cpu=options.cpu, model=options.model, eager=eager)
    try:
        check.require_version()
        code = asyncio.run(PrefillWorker(cluster, options, list(vllm_args)).serve())
    except (ConfigError, IncompatibleError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        code = 2
    except PullfillError as exc:
        print(f"error: {exc}", file=sys.stderr)
        code = 1
    except Exception:
        logger.exception("prefill worker failed")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
