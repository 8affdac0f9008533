"""Methods of the engine core that a frontend may call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pullfill.engine import outputs
from pullfill.engine.adapters import Adapters

UTILITIES = frozenset({
    "get_supported_tasks", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
    "is_sleeping", "profile", "is_scheduler_paused", "get_kv_cache_group_metadata",
    "get_weight_version", "add_lora",
})  # fmt: skip


def bound(adapters: Adapters, method: str, args: list[Any]) -> Callable[[Any], Any]:
    """Return a function that calls a method of the engine core. Intake thread.

    It reads the files of an adapter that is to be loaded. The engine thread does not wait for
    them."""
    if method == "add_lora":
        return adapters.adding(args[0] if args else None)

    def run(core: Any) -> Any:
        if method not in UTILITIES:
            raise PermissionError(f"{method} cannot be called from a frontend")
        return getattr(core, method)(*args)

    return run


def call(core: Any, call_id: int, run: Callable[[Any], Any], then: Callable[[Any], object]) -> None:
    """Call `run` with the engine core. `then` gets the EngineCoreOutputs with what came of it, now
    or later, on any thread."""

    def answer(future: Future[Any]) -> None:
        exc = future.exception()
        made = (None, str(exc)) if exc else (future.result(), None)
        then(outputs.utility_outputs(call_id, *made))

    future: Future[Any] = Future()
    try:
        result = run(core)
        if isinstance(result, Future):
            future = result
        else:
            future.set_result(result)
    except Exception as exc:
        future.set_exception(exc)
    future.add_done_callback(answer)
