"""A worker inside stock `vllm serve`: one flag makes its engine one.

    --kv-transfer-config '{"kv_connector": "PullfillDecode", "kv_role": "kv_consumer",
        "kv_connector_module_path": "pullfill.worker.stock_core", "kv_connector_extra_config":
        {"etcd": "http://…", "nats": "nats://…", "namespace": "…"}}'

`PullfillPrefill` with "kv_producer" makes it a prefill worker. vLLM's own busy loop takes our turns
(engine/stock_host.py), and calls the side through the connector. The rest of the worker runs on an
asyncio loop in a thread of the same process. Clients may speak to vLLM's own server, to our
frontends, or to both.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import fields
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pullfill.config import ClusterRef
from pullfill.engine import args, check, compat, kv
from pullfill.engine.life import Life
from pullfill.engine.requests import FRONTENDS
from pullfill.engine.stock_host import StockHost, core_above
from pullfill.errors import ConfigError, PullfillError, exit_code
from pullfill.options import ClusterOptions, Flag, WorkerOptions, declared
from pullfill.runtime import log
from pullfill.runtime.lifecycle import EXIT_S, exit_within, leave, until
from pullfill.transfer.shm.files import RegionFiles, shm_dir, sweep
from pullfill.worker import memory
from pullfill.worker.connector import RankTold, WorkerConnector
from pullfill.worker.context import WorkerContext, install
from pullfill.worker.sides import Engine, role_of
from pullfill.worker.worker import Worker, engine_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = log.get("worker.stock")

# Flags of `pullfill decode` and `pullfill prefill` that are about what vLLM owns here. The others
# are settings.
_VLLMS = frozenset({"model", "instance_id", "drain_timeout_s", "log_format", "cores"})
# How long vLLM's end waits for the worker's. vLLM kills the process after a few seconds more.
_CLOSE_S = 3.0
_NO_NAME = re.compile(r"[^a-z0-9_-]")
_UUID = re.compile(r"^([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def settings(side: str) -> dict[str, Flag]:
    """Return the settings of a worker with this side, beside where its cluster is."""
    found = [one for one in declared(WorkerOptions) if one.fits(side)]
    names = ((one.name.partition("/")[0].strip("-").replace("-", "_"), one) for one in found)
    return {name: one for name, one in names if one.field not in _VLLMS}


def settings_of(
    extra: Mapping[str, Any], side: str, model: str, name: str
) -> tuple[ClusterRef, WorkerOptions]:
    """Read `kv_connector_extra_config`. Its keys are flags, as in "kv_port". Raises ConfigError.

    model: its path. name: the worker's instance id."""
    flags = settings(side)
    places = {one.name for one in fields(ClusterOptions)}
    given: dict[str, Any] = {}
    for key, value in extra.items():
        if key in places:
            continue
        if (one := flags.get(key)) is None:
            known = ", ".join(sorted(places | flags.keys()))
            raise ConfigError(f"kv_connector_extra_config has no setting {key!r}: it has {known}")
        try:
            typed = msgspec.convert(value, one.type, strict=False)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"kv_connector_extra_config: {key} is {value!r}: {exc}") from None
        if isinstance(typed, int | float) and not (
            (one.least or 0) <= typed <= (one.most if one.most is not None else typed)
        ):
            raise ConfigError(
                f"kv_connector_extra_config: {key} is {value!r}, out of {one.least} to {one.most}"
            )
        given[one.field] = one.parse(typed)
    cluster = ClusterRef.resolve(**{key: value for key, value in extra.items() if key in places})
    return cluster, WorkerOptions(model=model, instance_id=name, **given)


def name_of(config: VllmConfig, side: str) -> str:
    """Return the instance id: all processes of this engine know vLLM's engine_id.

    Of a UUID, which is vLLM's own choice, 8 digits are enough. Ranks have ends of their own."""
    engine_id = _UUID.sub(r"\1", config.kv_transfer_config.engine_id).lower()
    return f"{side}-{_NO_NAME.sub('-', engine_id)[-50:]}"


def check_config(config: VllmConfig, kind: type[PullfillDecode]) -> None:
    """Raise ConfigError, in one line, if this engine cannot be a worker of this kind."""
    check.require_version()
    transfer = config.kv_transfer_config
    if transfer.kv_role != kind.kv_role:
        raise ConfigError(
            f"kv_role is {transfer.kv_role!r}, but {kind.__name__} is one side only: "
            f"use {kind.kv_role}"
        )
    model, parallel = config.model_config, config.parallel_config
    for name in ("enable_fault_tolerance", "enable_elastic_ep"):
        if getattr(parallel, name):
            # The first goes on after a step of which nobody knows what has run. After the second
            # vLLM's loop waits for its own clients only.
            raise ConfigError(
                f"--{name.replace('_', '-')}: vLLM's loop then takes no turns of a worker; remove "
                "the flag"
            )
    args.check_flags(model, parallel, kv.device(), os.environ)
    args.check_config(config)


class StockCore(Life[Engine]):
    """The worker of one engine of vLLM's. Engine thread, except for `_run` and what it calls.

    made with the connector ─▶ begin: the memory is known ─▶ vLLM serves ─▶ close

    It is the life of that engine, too. vLLM owns the engine's end, and its memory. If the engine
    hangs, this process must end. vLLM's server then ends.
    """

    def __init__(self, config: VllmConfig, kind: type[PullfillDecode]) -> None:
        """kind: says which side it has.

        Raises ConfigError if the settings or the engine do not fit."""
        log.setup(kind.side)
        check_config(config, kind)
        if (core := core_above()) is None:
            raise ConfigError(
                f"{kind.__name__} needs vLLM's engine in a process of its own: use `vllm serve`"
            )
        if core.vllm_config is not config:  # vLLM's MultiConnector gives each of its own a copy
            # Another connector may still copy from a block that a prefill worker writes. Our own
            # loop knows of such copies (engine/tier.py).
            raise ConfigError(f"{kind.__name__} cannot be one of several connectors: use it alone")
        # vLLM's default ends a request whose KV does not come. Ours is computed here.
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
        name, model = name_of(config, kind.side), config.model_config
        extra = config.kv_transfer_config.kv_connector_extra_config
        cluster, options = settings_of(extra, kind.side, model.model, name)
        role = role_of(kind.side)(cluster, options)
        role.adjust(config)
        self._worker = Worker([role], cluster, options, stays=True)
        # vLLM kills this process after its `shutdown_timeout`.
        drain_s = config.shutdown_timeout
        self._drain_s = max(drain_s / 2, drain_s - _CLOSE_S)
        if not drain_s:
            logger.warning(
                "--shutdown-timeout is 0: vLLM will not end this worker but kill it, and requests "
                "with it; give seconds, e.g. 30"
            )
        self._fingerprint = compat.fingerprint_as_run(config)
        super().__init__(asyncio.new_event_loop(), StockHost(core, self._stays, self.close))
        self.context = WorkerContext(name, RegionFiles(name))
        self.half = role.make_half(self.host.wake)
        # As in our own loop: a claim must not wait 5 ms for the engine thread to let the GIL go.
        sys.setswitchinterval(0.0005)
        self._close_s = _CLOSE_S
        self._serves = Future[None]()
        self._ending = asyncio.Event()  # vLLM is told to shut down
        self._left = False  # the worker has nothing left to finish then
        self._thread = threading.Thread(target=self._run, name="pullfill", daemon=True)
        self._thread.start()
        # If vLLM fails after `begin`, nobody calls `close`. This process then ends like any child.
        self._at_exit = Finalize(None, self.close, exitpriority=0)

    def begin(self) -> None:
        """The memory of all ranks is known: join the cluster. Returns once the worker serves.

        Raises PullfillError. vLLM then does not start, as with connectors of its own."""
        engine = engine_of(self, self.context, [self.half], self._fingerprint)
        self.tell(self.ready.set_result, engine)
        self.host.wait(self._serves.done)
        self._serves.result()

    def close(self) -> None:
        """The engine takes no more steps: leave the cluster. May be called again."""
        self._at_exit.cancel()
        self.tell(self.dead.set)
        self._thread.join(self._close_s)
        self._close_s = 0.0
        self.context.files.close()  # while etcd or NATS is away, the worker takes longer

    def _stays(self) -> bool:
        """vLLM is told to end. Returns whether the worker still finishes its work."""
        self.tell(self._ending.set)
        return self._drain_s > 0 and not self._left and self._thread.is_alive()

    def fail(self, why: str) -> None:
        """End vLLM's engine at its next step. Any thread."""

        def end() -> None:
            raise RuntimeError(why)

        self.host.submit(end)

    # ------------------------------------------------------------------ the worker's thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._serve())
        except BaseException as exc:
            if self._serves.done():
                logger.exception("this worker has left its cluster: all prompts are prefilled here")
            else:
                self._serves.set_exception(exc)
        else:
            if self.hangs:
                leave(1)

    async def _serve(self) -> None:
        async with AsyncExitStack() as parts:
            # `build` does this, too, but not if it fails early. No exit of ours removes the files.
            parts.callback(memory.close, self.context)
            try:
                await self._worker.build(self, parts)
                await self._worker.register(parts)
            except BaseException:
                self.dead.set()  # `begin` raises this, so the engine never takes a step
                raise
            self._serves.set_result(None)
            await until(self._worker.revoked, self._ending, self.dead)
            if not self.dead.is_set():
                revoked = self._worker.revoked.is_set()
                logger.warning("%s: draining", "lease revoked" if revoked else "vLLM ends")
                await self._worker.stop_taking()
                # Prefill workers may still write what was granted before. vLLM owns the process.
                await until(self._ending, self.dead)
                await self._finish()
            await self.dead.wait()
            if self.hangs:
                logger.error("the engine has ended (%r): exiting", self.failure)
                exit_within(EXIT_S, 1)
            for service in self._worker.services:
                await service.engine_gone(self.hangs)

    async def _finish(self) -> None:
        """Finish the work while vLLM waits for it, or let others do what is left."""
        if self.dead.is_set() or not self._drain_s:
            return
        services = self._worker.services
        try:
            async with asyncio.timeout(self._drain_s):
                await asyncio.gather(*(service.finished() for service in services))
        except TimeoutError:
            await asyncio.gather(*(service.give_up() for service in services))
        self._left = True
        self.host.wake()

    async def halt(self) -> None:
        await self.dead.wait()

    async def stop(self) -> None:
        """vLLM frees it."""


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Have vLLM's engine end at once if it cannot be a worker, and say why in one line.

    Of another exception vLLM would print three tracebacks."""
    try:
        yield
    except PullfillError as exc:
        if core_above() is None:
            raise  # this process is not vLLM's
        log.complain(exc)
        raise SystemExit(exit_code(exc)) from exc


class PullfillDecode(WorkerConnector):
    """The connector of a decode worker in stock `vllm serve`. See the module.

    side: its name. kv_role: what vLLM must be told of it."""

    side = "decode"
    kv_role = "kv_consumer"

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._stock: StockCore | None = None
        if role is KVConnectorRole.SCHEDULER:
            with _in_one_line():
                self._stock = StockCore(vllm_config, type(self))
            install(self._stock.context, self._stock.half)
        super().__init__(vllm_config, role, kv_cache_config)

    def place(self, vllm_config: VllmConfig) -> tuple[str, Path]:
        # vLLM makes the ranks before its scheduler, so they find the names by themselves. And what
        # a killed process has left would be in their way, by its name or its size.
        directory = shm_dir()
        with suppress(OSError):  # whoever makes the files says why the directory cannot be used
            sweep(directory)
        return name_of(vllm_config, self.side), directory

    def shutdown(self) -> None:
        if self._stock is not None:
            self._stock.close()

    # ------------------------------------------------------------------ scheduler half

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], RankTold]
    ) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        assert self._stock is not None, "the half of vLLM's scheduler has it"
        with _in_one_line():
            self._stock.begin()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if 0 <= request.client_index < FRONTENDS:
            # Our frontends drop what a client says of KV transfer. Here it would end the engine.
            request.kv_transfer_params = None
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class PullfillPrefill(PullfillDecode):
    """The connector of a prefill worker in stock `vllm serve`."""

    side = "prefill"
    kv_role = "kv_producer"
