"""The process that all mock workers are forked from: imports vLLM once, for any number of them.

Reads one JSON command per line on stdin and answers each with a line on stdout:
    {"fork": "decode"|"prefill"|"driver", "namespace": …, "log": FILE, …} → {"pid": …}
Kills its children at the end of stdin, and ends.

A forked worker is a whole worker process, with its own loop, threads, sockets, memory and signals.
It shares only the memory pages of the imports, 0.6 GB, which 128 processes could not each have.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pullfill.transfer.shm.files import shm_dir, sweep

_PR_SET_PDEATHSIG = 1
_MODULES = (
    "benchmarks.control.driver",
    "pullfill.decode_worker.side",
    "pullfill.prefill_worker.side",
    "pullfill.worker.connector",
    "pullfill.worker.process",
    "pullfill.testing.mock_executor",
)


def preload(model: str, flags: list[str]) -> None:
    """Import all that a worker or a driver will, and build an engine once.

    A worker shares what exists before the fork, until it writes to it. It does not share what it
    imports itself (7 MB), nor what vLLM makes for the first engine of a process (3 MB)."""
    from pullfill.engine import environment

    environment.prepare(model=model, eager=True)
    import vllm.v1.core.sched.scheduler  # noqa: F401

    from pullfill.engine import args
    from pullfill.engine.host import EngineHost

    for module in _MODULES:
        import_module(module)
    config, _ = args.build_config(model, flags, kv_role="kv_consumer", engine_id="zygote", extra={})
    config.kv_transfer_config = None  # the connector needs a worker
    host = EngineHost(config)
    host.build()
    host.shutdown()
    gc.collect()
    gc.freeze()


@cache
def _config(role: str, model: str, flags: tuple[str, ...]) -> tuple[Any, str]:
    """Return the engine's config and the served model name for a worker's flags.

    Made once in the zygote, because 4 MB of each worker would be copies of what vLLM reads."""
    from pullfill.decode_worker.side import DecodeRole
    from pullfill.engine import args
    from pullfill.prefill_worker.side import PrefillRole

    of = DecodeRole if role == "decode" else PrefillRole
    made = args.build_config(model, flags, kv_role=of.kv_role, engine_id="zygote", extra={})
    gc.collect()
    gc.freeze()
    return made


def _take(config: Any, served: str) -> None:
    """Make this worker use the config that the zygote has built, with the worker's own engine id.

    It replaces `args.build_config`, which would build the same config anew, in 4 MB of its own."""
    from pullfill.engine import args

    def build_config(*_: Any, engine_id: str, extra: dict[str, str], **__: Any) -> tuple[Any, str]:
        config.kv_transfer_config.engine_id = engine_id
        config.kv_transfer_config.kv_connector_extra_config = extra
        return config, served

    args.build_config = build_config  # type: ignore[assignment]


def _child(order: dict[str, Any], model: str, flags: list[str]) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        _serve(order, model, flags + list(order.get("flags", ())))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(order: dict[str, Any], model: str, flags: list[str]) -> None:
    from benchmarks.control import driver, probes
    from pullfill.config import ClusterRef
    from pullfill.options import WorkerOptions

    cluster = ClusterRef.resolve(
        etcd=order["etcd"], nats=order["nats"], namespace=order["namespace"]
    )
    stats = Path(order["stats"])
    if order["fork"] == "driver":
        driver.run(cluster, model, Path(order["socket"]), order.get("router", {}))
        return
    _take(*_config(order["fork"], model, tuple(flags)))
    options = WorkerOptions(model=model, engine_stall_s=600.0, drain_timeout_s=3.0)
    from pullfill.worker import process

    if order["fork"] == "decode":
        from pullfill.decode_worker import scheduler

        probes.install(scheduler.DecodeScheduler, probes.DECODE_CALLS, stats)
    else:
        from pullfill.prefill_worker import scheduler as prefill_side

        probes.install(prefill_side.PrefillScheduler, probes.PREFILL_CALLS, stats)
    process.run(order["fork"], cluster, options, flags)


def _end(children: list[int]) -> None:
    """Kill all children at once.

    A normal end of vLLM runs the garbage collector, which writes to pages that are still shared.
    128 workers would need 20 GB and minutes for that."""
    for pid in children:
        _signal(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    sweep(shm_dir())


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    model, flags = sys.argv[1], sys.argv[2:]
    preload(model, flags)

    def answer(**told: Any) -> None:
        print(json.dumps(told), file=answers, flush=True)

    answer(ready=True)
    children: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order:
            _end(order["end"])
            children = [pid for pid in children if pid not in order["end"]]
            answer(ended=len(order["end"]))
            continue
        if order["fork"] != "driver":
            _config(order["fork"], model, (*flags, *order.get("flags", ())))
        pid = os.fork()
        if pid == 0:
            _child(order, model, flags)
        children.append(pid)
        answer(pid=pid)
    _end(children)
    os._exit(0)


if __name__ == "__main__":
    main()
