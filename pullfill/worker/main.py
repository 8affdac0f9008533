"""`pullfill decode`, `pullfill prefill`: one worker process, from flags to exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn

from pullfill.config import ClusterRef, ranks_of
from pullfill.engine import check, environment
from pullfill.errors import ConfigError, PullfillError, exit_code
from pullfill.ids import new_instance_id
from pullfill.net.this_host import allow_open_files
from pullfill.options import LogFormat, WorkerOptions
from pullfill.runtime import log, tracing
from pullfill.runtime.lifecycle import leave
from pullfill.worker.process import NO_OFFLOADING, WorkerProcess

# By name, as vLLM gets the connector: the rooms of the sides import this one.
ROLES = {
    "decode": ("pullfill.decode_worker.side", "DecodeRole"),
    "prefill": ("pullfill.prefill_worker.side", "PrefillRole"),
}


def run(
    first: str, cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]
) -> NoReturn:
    """Run one worker that begins as `first`, until told to leave. Does not return: it ends the
    process, so that no thread of a library can hold it.

    Exit codes: 0: drained. 1: failed. 2: wrong flags or an incompatible peer
    (`errors.exit_code`)."""
    log.setup(first, as_json=options.log_format is LogFormat.JSON)
    allow_open_files()
    environment.begin_imports()
    eager = "--enforce-eager" in vllm_args
    core = options.cores[0] if len(options.cores) == 1 else None
    ranks = ranks_of(list(vllm_args))
    environment.prepare(cpu=core, model=options.model, eager=eager, ranks=ranks)

    async def serve() -> int:
        names = [first]
        if options.elastic:
            refuse(options, vllm_args)
            names = list(ROLES)
        name = options.instance_id or new_instance_id("worker" if options.elastic else first)
        roles: list[Any] = []
        for role in names:
            module, kind = ROLES[role]
            made = getattr(import_module(module), kind)
            # The prefill side gets the decode side beside it.
            roles.append(made(cluster, replace(options, instance_id=name), *roles))
        process = WorkerProcess(roles, first, name, cluster, options, list(vllm_args))
        return await process.serve()

    asyncio.run(_serve(first, serve))
    raise AssertionError("unreachable")


async def _serve(role: str, serve: Callable[[], Coroutine[Any, Any, int]]) -> NoReturn:
    """Serve, and end the process from inside the loop."""
    # Closing the loop would wait for whatever its threads still do.
    try:
        check.require_version()
        code = await serve()
    except PullfillError as exc:
        log.complain(exc)
        code = exit_code(exc)
    except Exception:
        log.get(f"{role}_worker").exception("%s worker failed", role)
        code = 1
    tracing.close()
    leave(code)


def refuse(options: WorkerOptions, vllm_args: Sequence[str]) -> None:
    """Raise ConfigError for what a worker with two sides cannot do."""
    if any(arg.startswith("--kv-offloading") for arg in vllm_args):
        raise ConfigError(NO_OFFLOADING)
    if options.kv_port or options.advertise_kv:
        raise ConfigError(
            "--elastic needs a KV port for each role, and --kv-port and --advertise-kv name one: "
            "leave them out"
        )
