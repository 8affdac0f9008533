"""`pullfill worker`, `decode`, `prefill`: one worker process, from flags to exit code.

It has an engine that our own loop steps (engine/host.py), its KV memory, and a decode side, a
prefill side, or, as `pullfill worker`, both. The rooms of the sides say how each is made
(sides.py), and worker.py how they serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NoReturn

from pullfill.config import ClusterRef, ranks_of
from pullfill.engine import args, check, compat, environment
from pullfill.engine.host import EngineHost
from pullfill.engine.life import EngineLife
from pullfill.errors import PullfillError, exit_code
from pullfill.ids import new_instance_id
from pullfill.net.this_host import allow_open_files
from pullfill.options import LogFormat, WorkerOptions
from pullfill.runtime import log, tracing
from pullfill.runtime.lifecycle import EXIT_S, STEP_FAILED, Stop, exit_within, leave, until
from pullfill.transfer.shm.files import RegionFiles
from pullfill.worker.context import WorkerContext, install
from pullfill.worker.sides import Engine, Role, role_of
from pullfill.worker.worker import Worker, engine_of

# The sides of a worker, by the command that starts it.
SIDES = {"decode": ("decode",), "prefill": ("prefill",), "worker": ("decode", "prefill")}

logger = log.get("worker")


def run(
    kind: str, cluster: ClusterRef, options: WorkerOptions, vllm_args: Sequence[str]
) -> NoReturn:
    """Run one worker until told to leave. Does not return: it ends the process, so that no thread
    of a library can hold it.

    kind: a key of SIDES.

    Exit codes: 0: drained. 1: failed. 2: wrong flags or an incompatible peer
    (`errors.exit_code`)."""
    log.setup(kind, as_json=options.log_format is LogFormat.JSON)
    allow_open_files()
    environment.begin_imports()
    eager = "--enforce-eager" in vllm_args
    ranks = ranks_of(list(vllm_args))
    environment.prepare(model=options.model, eager=eager, ranks=ranks)
    own = replace(options, instance_id=options.instance_id or new_instance_id(kind))
    asyncio.run(_serve(kind, cluster, own, list(vllm_args)))
    raise AssertionError("unreachable")


async def _serve(
    kind: str, cluster: ClusterRef, options: WorkerOptions, vllm_args: list[str]
) -> NoReturn:
    """Serve, and end the process from inside the loop."""
    # Closing the loop would wait for whatever its threads still do.
    try:
        check.require_version()
        code = await WorkerProcess(kind, cluster, options, vllm_args).serve()
    except PullfillError as exc:
        log.complain(exc)
        code = exit_code(exc)
    except Exception:
        logger.exception("the worker failed")
        code = 1
    tracing.close()
    leave(code)


class WorkerProcess:
    """One worker, on the process's asyncio loop. The engine has its own thread.

    kind: a key of SIDES."""

    def __init__(
        self,
        kind: str,
        cluster: ClusterRef,
        options: WorkerOptions,
        vllm_args: list[str],
    ) -> None:
        self._roles: list[Role] = []
        for side in SIDES[kind]:
            # The prefill side gets the decode side beside it.
            self._roles.append(role_of(side)(cluster, options, *self._roles))
        self._kind = kind
        self._options = options
        self._vllm_args = vllm_args
        self._stop = Stop()
        self._worker = Worker(self._roles, cluster, options)

    async def serve(self) -> int:
        """Build everything, serve, leave. Returns the exit code."""
        self._stop.starting = True  # a model may take minutes to load
        self._stop.install()
        self._life = life = EngineLife(self._load, self._built)
        life.start()
        async with AsyncExitStack() as parts:
            await self._worker.build(life, parts)
            self._stop.starting = False
            await self._worker.register(parts)
            await until(self._stop.drain, self._worker.revoked, life.dead)
            code = await self._leave(life)
            exit_within(EXIT_S, code)
        return code

    async def _leave(self, life: EngineLife[Any]) -> int:
        """Finish the work, or let others do the rest. Returns the exit code."""
        if self._worker.revoked.is_set():
            self._stop.ask("lease revoked")
        services = self._worker.services
        if not life.dead.is_set():
            await self._worker.stop_taking()
            finished = await self._stop.race(
                asyncio.gather(*(service.finished() for service in services)),
                self._options.drain_timeout_s,
            )
            if not finished and not life.dead.is_set():
                await asyncio.gather(*(service.give_up() for service in services))
        if life.dead.is_set():
            logger.error("the engine has ended (%r): exiting", life.failure)
            await asyncio.gather(*(service.engine_gone(life.hangs) for service in services))
            return 1 if life.hangs else STEP_FAILED
        logger.info("drained")
        return 0

    def _load(self) -> EngineHost:
        environment.bound_compute_threads()
        name = str(self._options.instance_id)
        # It makes the files of the KV memory, so that a name that is taken fails first.
        self._context = WorkerContext(name, RegionFiles(name))
        config = args.build_config(
            self._options.model,
            self._vllm_args,
            kv_role="kv_both" if len(self._roles) > 1 else self._roles[0].kv_role,
            engine_id=name,
        )
        tracing.begin(config.observability_config.otlp_traces_endpoint, self._kind, name)
        self._fingerprint = compat.fingerprint_as_run(config)
        for one in self._roles:
            one.adjust(config)
        host = EngineHost(config, log_stats="decode" in SIDES[self._kind])
        self._halves = [one.make_half(host.wake) for one in self._roles]
        install(self._context, *self._halves)
        return host

    def _built(self) -> Engine:
        return engine_of(self._life, self._context, self._halves, self._fingerprint)
