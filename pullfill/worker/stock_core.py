"""The ports (ports.py) inside stock `vllm serve`: one flag makes its engine a decode worker.

    --kv-transfer-config '{"kv_connector": "PullfillDecode", "kv_role": "kv_consumer",
        "kv_connector_module_path": "pullfill.worker.stock_core", "kv_connector_extra_config":
        {"etcd": "http://…", "nats": "nats://…", "namespace": "…"}}'

vLLM's own engine core takes the steps, and calls the side through the connector. The rest of the
worker runs on an asyncio loop in a thread of the same process. There is no `EngineThread` and no
`Submit`: so nobody reads this worker's prefix cache, and it makes no self-check. Clients speak to
vLLM's own server.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_transfer_state import (
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.v1.request import RequestStatus

from pullfill.config import ClusterRef
from pullfill.engine import args, check, compat, kv, request_limits, speculation
from pullfill.engine.host import Pulse
from pullfill.engine.view import View
from pullfill.errors import ConfigError
from pullfill.ids import is_name
from pullfill.options import ClusterOptions, WorkerOptions, declared
from pullfill.runtime import log
from pullfill.runtime.lifecycle import until
from pullfill.transfer.shm.files import RegionFiles, shm_dir, sweep
from pullfill.worker import context as contexts
from pullfill.worker import memory
from pullfill.worker.connector import RankTold, StepMetadata, WorkerConnector
from pullfill.worker.context import SchedulerHalf, WorkerContext
from pullfill.worker.sides import Engine, Role
from pullfill.worker.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = log.get("worker.stock")

# Flags of `pullfill decode` that are settings here, too. The others are about what vLLM owns.
_SETTINGS = frozenset({
    "host", "lease_ttl_s", "connect_timeout_s", "transports", "kv_port", "advertise_kv",
    "http_port", "kv_mode", "control_port", "advertise_control",
})  # fmt: skip
# How long vLLM's end waits for the worker's. vLLM kills the process after a few seconds more.
_CLOSE_S = 3.0


def settings_of(
    extra: Mapping[str, Any], model: str, name: str
) -> tuple[ClusterRef, WorkerOptions]:
    """Read `kv_connector_extra_config`. Its keys are flags, as in "kv_port". Raises ConfigError.

    model: its path. name: the worker's instance id."""
    flags = {one.name.strip("-").replace("-", "_"): one for one in declared(WorkerOptions)}
    flags = {key: one for key, one in flags.items() if one.field in _SETTINGS}
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


def name_of(config: VllmConfig) -> str:
    """Return the instance id: all processes of this engine know vLLM's engine_id."""
    name = f"decode-{config.kv_transfer_config.engine_id}".lower()
    if not is_name(name):
        raise ConfigError(
            f"engine_id {config.kv_transfer_config.engine_id!r} of --kv-transfer-config: use "
            "letters, digits, '-' and '_' only, or leave it out"
        )
    return name


def check_config(config: VllmConfig) -> None:
    """Raise ConfigError, in one line, if this engine cannot be a decode worker."""
    check.require_version()
    transfer = config.kv_transfer_config
    if transfer.kv_role != "kv_consumer":
        raise ConfigError(
            f"kv_role is {transfer.kv_role!r}, but PullfillDecode is one side only: use kv_consumer"
        )
    model, parallel = config.model_config, config.parallel_config
    flags = SimpleNamespace(
        enable_sleep_mode=model.enable_sleep_mode,
        enable_cumem_allocator=model.enable_cumem_allocator,
        enable_expert_parallel=parallel.enable_expert_parallel,
        tensor_parallel_size=parallel.tensor_parallel_size,
    )
    args.check_flags(flags, kv.device_of(config), os.environ)
    args.check_config(config)
    speculation.check_config(config)


class CoreFromHooks:
    """As much of vLLM's EngineCore as a `View` reads, as the connector's calls tell it.

    The connector never gets vLLM's scheduler. So the total of a step's tokens cannot be changed
    from here, only how many of them one prompt gets.

    scheduled, done: number of steps."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, manager: Any) -> None:
        self.vllm_config = config
        self.scheduler = self
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = manager
        self.connector = None
        self.scheduler_config = steps = config.scheduler_config
        most = steps.max_num_scheduled_tokens or steps.max_num_batched_tokens
        self.max_num_scheduled_tokens = most
        self.num_spec_tokens = config.num_speculative_tokens
        self.requests: dict[str, Any] = {}
        self._inflight_prefills: set[Any] = set()
        self.scheduled = self.done = 0

    @property
    def running(self) -> list[Any]:
        """vLLM's requests that run. Any thread."""
        return [r for r in list(self.requests.values()) if r.status is RequestStatus.RUNNING]

    def get_request_counts(self) -> tuple[int, int]:
        running = len(self.running)
        return running, len(self.requests) - running

    @property
    def batch_queue(self) -> int:
        """Number of scheduled steps that have not run yet."""
        return self.scheduled - self.done


class StockLife:
    """The engine of stock vLLM (engine/life.py: `Life`). vLLM owns its end, and its memory.

    fail: see `Engine`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[list[Engine[Any]]] = self.loop.create_future()
        self.dead = asyncio.Event()
        self.failure = ""

    def fail(self, why: str) -> None:
        """End vLLM's engine at its next step. Any thread."""
        self.failure = why

    def pulse(self) -> Pulse:
        return Pulse(0, "", 0)  # vLLM watches its own engine

    give_up = fail

    async def halt(self) -> None:
        await self.dead.wait()

    async def stop(self) -> None:
        """vLLM frees it."""


class StockCore:
    """The worker of one engine of vLLM's. Engine thread, except for `_run` and what it calls.

    made with the connector ─▶ begin: the memory is known ─▶ vLLM serves ─▶ close
    """

    def __init__(
        self, config: VllmConfig, kv_cache_config: KVCacheConfig, role_class: tuple[str, str]
    ) -> None:
        """role_class: see `PullfillDecode`.

        Raises ConfigError if the settings or the engine do not fit."""
        log.setup("decode")
        check_config(config)
        # vLLM's default ends a request whose KV does not come. Ours is computed here.
        config.kv_transfer_config.kv_load_failure_policy = "recompute"
        name, model = name_of(config), config.model_config
        extra = config.kv_transfer_config.kv_connector_extra_config
        cluster, options = settings_of(extra, model.model, name)
        module, kind = role_class
        role: Role[Any] = getattr(import_module(module), kind)(cluster, options)
        self._worker = Worker([role], role.name, name, cluster, options)
        self._config, self._kv_cache_config = config, kv_cache_config
        self._fingerprint = compat.fingerprint_as_run(config)
        self.context: WorkerContext = role.make_context(lambda: None, RegionFiles(name))
        self.half: SchedulerHalf = role.make_half(self.context)
        # As in our own loop: a claim must not wait 5 ms for the engine thread to let the GIL go.
        sys.setswitchinterval(0.0005)
        self._made, self._serves = Future[StockLife](), Future[None]()
        self._thread = threading.Thread(target=self._run, name="pullfill", daemon=True)
        self._thread.start()
        self._life = self._made.result()

    def bind(self, manager: Any) -> None:
        """vLLM has made its scheduler. manager: its KVCacheManager."""
        self.core = CoreFromHooks(self._config, self._kv_cache_config, manager)

    def begin(self) -> None:
        """The memory of all ranks is known: join the cluster. Returns once the worker serves.

        Raises PullfillError. vLLM then does not start, as with connectors of its own."""
        served = self._config.model_config.served_model_name
        assert self.context.geometry is not None
        described = compat.describe(self._config, served, self._fingerprint, self.context.geometry)
        view = View(self.core)
        self.half.built(view)
        engine = Engine(
            view, None, None, None, served, described, self.context, self._life.dead,
            self._life.fail,
        )  # fmt: skip
        self._tell(self._life.ready.set_result, [engine])
        self._serves.result()

    def scheduled(self) -> None:
        """vLLM has scheduled a step. Raises RuntimeError to end the engine."""
        self.core.scheduled += 1
        if self._life.failure:
            raise RuntimeError(self._life.failure)

    def step_done(self) -> None:
        """A step has run on every rank, and vLLM knows what it has computed."""
        self.core.done += 1
        self.half.step_done(self.core.batch_queue)

    def close(self) -> None:
        """vLLM ends: the engine takes no more steps. Leave the cluster. May be called again."""
        self._tell(self._life.dead.set)
        self._thread.join(_CLOSE_S)
        if self.context.files is not None:
            self.context.files.close()  # while etcd or NATS is away, the worker takes longer

    def _tell(self, function: Callable[..., object], *given: object) -> None:
        """Call this on the worker's loop, unless the worker has ended, well or not."""
        with suppress(RuntimeError):  # its loop is closed
            self._life.loop.call_soon_threadsafe(function, *given)

    # ------------------------------------------------------------------ the worker's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:
            if self._serves.done():
                logger.exception("this worker has left its cluster: all prompts are prefilled here")
            else:
                self._serves.set_exception(exc)

    async def _serve(self) -> None:
        life = StockLife()
        self._made.set_result(life)
        async with AsyncExitStack() as parts:
            # `build` does this, too, but not if it fails early. No exit of ours removes the files.
            parts.callback(memory.close, self.context)
            try:
                await self._worker.build(life, parts)
                await self._worker.register(parts)
            except BaseException:
                life.dead.set()  # `begin` raises this, so the engine never takes a step
                raise
            self._serves.set_result(None)
            await until(self._worker.revoked, life.dead)
            await self._worker.stop_taking()
            if not life.dead.is_set():
                logger.warning("lease revoked: all prompts are prefilled here from now on")
            # Prefill workers may still write what was granted before. vLLM owns the process.
            await life.dead.wait()


class Present(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Tells nothing, but is there: vLLM drops the output of a rank that tells nothing at all, and
    then does not call `update_connector_output`."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


class PullfillDecode(WorkerConnector):
    """The connector of a decode worker in stock `vllm serve`. See the module.

    role_class: of its side, by module and name, because the rooms of the sides import this one."""

    role_class: ClassVar = ("pullfill.decode_worker.side", "DecodeRole")

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._stock: StockCore | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._stock = StockCore(vllm_config, kv_cache_config, self.role_class)
            contexts.install((self._stock.context, self._stock.half))
        super().__init__(vllm_config, role, kv_cache_config)

    def place(self, vllm_config: VllmConfig) -> tuple[str, Path]:
        # vLLM makes the ranks before its scheduler, so they find the names by themselves. And what
        # a killed process has left would be in their way, by its name or its size.
        directory = shm_dir()
        with suppress(OSError):  # whoever makes the files says why the directory cannot be used
            sweep(directory)
        return name_of(vllm_config), directory

    @property
    def _core(self) -> StockCore:
        assert self._stock is not None, "the half of vLLM's scheduler has it"
        return self._stock

    def shutdown(self) -> None:
        if self._stock is not None:
            self._stock.close()

    # ------------------------------------------------------------------ scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._core.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], RankTold]
    ) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        self._core.begin()

    def on_new_request(self, request: Any) -> None:
        self._core.core.requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # Clients come past our frontends. These drop what a client says about KV transfer, and
        # refuse targets that are no numbers. Here either would end the engine, so both are dropped.
        request.kv_transfer_params = None
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        if request_limits.why_bad_targets(extra):
            targets = request_limits.TARGET_HEADERS.values()
            params.extra_args = {key: value for key, value in extra.items() if key not in targets}
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        self._core.scheduled()
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        # vLLM reads these two right after this call. So a request whose KV came during a step is
        # scheduled in the next one, as in our own loop.
        report = self._core.half.before_step()
        for name, ended in (("finished_recving", report.loaded), ("finished_sending", report.sent)):
            if ended:
                already = getattr(connector_output, name) or set()
                setattr(connector_output, name, already | ended)

    def get_kv_connector_stats(self) -> None:
        # vLLM asks each rank for statistics, too, but its scheduler once after each step.
        if self._stock is not None:
            self._stock.step_done()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._core.core.requests.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

    # ------------------------------------------------------------------ worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if has_kv_transfer_group() and get_kv_transfer_group() is not self:
            # Another connector may still copy from a block that a prefill worker writes. Our own
            # loop knows of such copies (engine/tier.py).
            raise ConfigError("PullfillDecode cannot be one of several connectors: use it alone")
        super().register_kv_caches(kv_caches)

    def build_connector_worker_meta(self) -> Present:
        return Present()
