"""`pullfill decode`: one decode worker process, from flags to exit code.

Start: engine thread loads the model while etcd and NATS are dialled; then the control server, the
publisher, the probe server; last the registration, which makes frontends and prefill workers come.
End: lease revoked, SIGTERM, or the engine died. A drain leaves routing at once, finishes the
streams, closes the jobs and exits 0.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from pullfill import log
from pullfill.config import ClusterRef, WorkerOptions
from pullfill.decode_worker.worker import DecodeWorker
from pullfill.engine import check, process
from pullfill.errors import ConfigError, IncompatibleError, PullfillError

logger = log.get("decode_worker")


def run(cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """Serve until told to leave. 0: drained; 1: failed; 2: wrong flags or an incompatible peer.

    Does not return: leaves through os._exit so that no library's thread can hold the process.
    """
    log.setup("decode")
    eager = "--enforce-eager" in vllm_args
    process.prepare(cpu=options.cpu, model=options.model, eager=eager)
    try:
        check.require_version()
        code = asyncio.run(DecodeWorker(cluster, options, list(vllm_args)).serve())
    except (ConfigError, IncompatibleError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        code = 2
    except PullfillError as exc:
        print(f"error: {exc}", file=sys.stderr)
        code = 1
    except Exception:
        logger.exception("decode worker failed")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
