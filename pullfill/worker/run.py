"""Runs a worker process: sets its environment, serves, and ends it with an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from pullfill.config import ranks_of
from pullfill.engine import check, environment
from pullfill.errors import PullfillError, exit_code
from pullfill.net.this_host import allow_open_files
from pullfill.options import LogFormat, WorkerOptions
from pullfill.runtime import log, tracing
from pullfill.runtime.lifecycle import leave


def run_worker(
    role: str,
    options: WorkerOptions,
    vllm_args: Sequence[str],
    serve: Callable[[], Coroutine[Any, Any, int]],
) -> NoReturn:
    """Serve until told to leave, then exit. No thread of a library can hold the process.

    Exit codes: 0: drained. 1: failed. 2: wrong flags or an incompatible peer
    (`errors.exit_code`)."""
    log.setup(role, as_json=options.log_format is LogFormat.JSON)
    allow_open_files()
    environment.begin_imports()
    eager = "--enforce-eager" in vllm_args
    ranks = ranks_of(vllm_args)
    core = options.cores[0] if len(options.cores) == 1 else None
    environment.prepare(cpu=core, model=options.model, eager=eager, ranks=ranks)
    asyncio.run(_serve(role, serve))
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
