"""One process of a fleet: a mock worker with probes, or the driver.

`main` takes one argument, the JSON object that `Plant.fork` writes. `plant` has the process forked
from one that has imported vLLM: 32 workers could not each have the 0.6 GB of these imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.control import driver, probes
from pullfill.config import ClusterRef
from pullfill.decode_worker.scheduler import DecodeScheduler
from pullfill.engine import environment
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.scheduler import PrefillScheduler
from pullfill.worker import process

_PROBED = {
    "decode": (DecodeScheduler, probes.DECODE_CALLS),
    "prefill": (PrefillScheduler, probes.PREFILL_CALLS),
}


def main() -> None:
    order = json.loads(sys.argv[1])
    role, model = order["role"], order["model"]
    cluster = ClusterRef.resolve(
        etcd=order["etcd"], nats=order["nats"], namespace=order["namespace"]
    )
    if role == "driver":
        environment.prepare(model=model, eager=True)
        driver.run(cluster, model, Path(order["socket"]), order["router"])
        return
    probes.install(*_PROBED[role], Path(order["stats"]))
    options = WorkerOptions(model=model, engine_stall_s=600.0, drain_timeout_s=3.0)
    process.run(role, cluster, options, order["flags"])
