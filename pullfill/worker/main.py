"""`pullfill decode`, `pullfill prefill`: one worker process, from flags to exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from pullfill.config import ClusterRef, ranks_of
from pullfill.errors import ConfigError
from pullfill.ids import new_instance_id
from pullfill.options import WorkerOptions
from pullfill.worker.process import NO_OFFLOADING, ONE_RANK, WorkerProcess
from pullfill.worker.run import run_worker

# By name, as vLLM gets the connector: the rooms of the sides import this one.
ROLES = {
    "decode": ("pullfill.decode_worker.side", "DecodeRole"),
    "prefill": ("pullfill.prefill_worker.side", "PrefillRole"),
}


def run(first: str, cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]) -> int:
    """Run one worker that begins as `first`. Does not return (worker/run.py)."""

    async def serve() -> int:
        names = [first]
        if options.elastic:
            check(options, vllm_args)
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

    run_worker(first, options, vllm_args, serve)


def check(options: WorkerOptions, vllm_args: Sequence[str]) -> None:
    """Refuse what a worker with two sides cannot do. Raises ConfigError."""
    if any(arg.startswith("--kv-offloading") for arg in vllm_args):
        raise ConfigError(NO_OFFLOADING)
    if ranks_of(list(vllm_args)) > 1:
        raise ConfigError(ONE_RANK)
    if options.kv_port or options.advertise_kv:
        raise ConfigError(
            "--elastic needs a KV port for each role, and --kv-port and --advertise-kv name one: "
            "leave them out"
        )
