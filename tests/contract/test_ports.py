"""What a side stands on (worker/engine_loop.py, worker/context.py), over each loop that gives it.

vLLM's engine core and scheduler are real, and compute no model. An engine that nobody wakes sleeps
for a minute, which fails a test.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest

from pullfill.config import ClusterRef
from pullfill.deploy.members import workers
from pullfill.engine.adapters import Adapters, lora_request
from pullfill.engine.args import build_config, flag_parser
from pullfill.engine.host import EngineHost
from pullfill.engine.life import EngineLife
from pullfill.engine.requests import own_request
from pullfill.errors import BadMessage, ConfigError, NotNow
from pullfill.options import WorkerOptions
from pullfill.registry.client import EtcdClient
from pullfill.registry.membership import Membership
from pullfill.transfer.shm.files import RegionFiles
from pullfill.wire import Adapter
from pullfill.worker import context as contexts
from pullfill.worker import memory
from pullfill.worker.context import SchedulerHalf, StepReport, WorkerContext
from pullfill.worker.engine_loop import EngineLoop
from pullfill.worker.sides import Engine, Role
from pullfill.worker.worker import engine_of
from tests.support.cluster import BLOCK, FLAGS, MOCK
from tests.support.etcd import EtcdServer
from tests.support.late import Late
from tests.support.prompts import random_prompt
from tests.support.waiting import eventually

arg_utils: Any = Late("vllm.engine.arg_utils")
vllm_core: Any = Late("vllm.v1.engine.core")
executor: Any = Late("vllm.v1.executor")
vllm_config: Any = Late("vllm.config")
mocked: Any = Late("pullfill.testing.mock_executor")
stock: Any = Late("pullfill.worker.stock_core")

pytestmark = pytest.mark.engine

# The worker's, in each test another one: files in shared memory have it, and a test that runs late
# may still remove its own.
NAME = ""
NUMBERS = itertools.count()
PROMPT, BROUGHT = 5 * BLOCK, 4 * BLOCK
Half = Callable[[Callable[[], None]], SchedulerHalf]


@pytest.fixture(autouse=True)
def _new_name() -> None:
    global NAME
    NAME = f"ports-{os.getpid()}-{next(NUMBERS)}"


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM freezes all objects that there are when an engine starts. When it ends, vLLM unfreezes
    them and collects garbage among them, which takes longer than the rest of a test here."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


class Probe(SchedulerHalf):
    """A side that does what a test says, and notes what it is told.

    brings: for each request, how many tokens of its prompt will come. placed: requests that have
    blocks for them. keeps: requests whose blocks are still read when they finish. now, with_step:
    what to report next."""

    def __init__(self) -> None:
        self.step_meter: Any = SimpleNamespace(deferred={}, before_step=lambda: None)
        self.brings: dict[str, int] = {}
        self.placed: set[str] = set()
        self.keeps: set[str] = set()
        self.now, self.with_step = StepReport(), StepReport()
        self.turns = 0
        self.steps: list[dict[str, int]] = []
        self.running: deque[int] = deque()
        self.said: list[Any] = []
        self.reserved: list[bool] = []

    def bind(self, manager: Any, kept_from: Any, by_position: Any) -> None: ...

    def matched(self, request: Any, hit_tokens: int) -> tuple[int, bool]:
        self.said.append(request.kv_transfer_params)
        self.reserved.append(request in contexts.installed()[0].in_flight)
        tokens = self.brings.pop(request.request_id, 0)
        return tokens, tokens > 0

    def allocated(self, request: Any, tables: Any, external_tokens: int) -> None:
        self.placed.add(request.request_id)

    def finished(self, request: Any, tables: Any) -> bool:
        return request.request_id in self.keeps

    def before_step(self) -> StepReport:
        self.turns += 1
        report, self.now = self.now, StepReport()
        return report

    def scheduled(self, output: Any) -> StepReport:
        self.steps.append(dict(output.num_scheduled_tokens))
        report, self.with_step = self.with_step, StepReport()
        return report

    def step_done(self, running: int) -> None:
        self.running.append(running)

    @property
    def has_work(self) -> bool:
        return self.with_step != StepReport()


@dataclass
class Made:
    """An engine. stock: its process, if that is vLLM's."""

    engine: Engine
    stock: Any = None

    @property
    def loop(self) -> EngineLoop:
        return self.engine.loop

    async def call(self, work: Callable[[], Any]) -> Any:
        """`EngineLoop.call`, on the asyncio loop of the worker."""
        loop = asyncio.get_running_loop()
        if self.stock is not None:
            (loop,) = ProbeRole.loops
        called = asyncio.run_coroutine_threadsafe(self.loop.call(work), loop)
        return await asyncio.wrap_future(called)


@pytest.fixture(autouse=True)
def _sleeps_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EngineHost.__init__.__kwdefaults__, "idle_ms", 60_000)


@asynccontextmanager
async def own_loop(model: Path, half: Half) -> AsyncIterator[Made]:
    """Our own loop (engine/host.py)."""
    name = NAME
    files = RegionFiles(name)

    def load() -> EngineHost:
        config = build_config(str(model), [*FLAGS, *MOCK], kv_role="kv_both", engine_id=name)
        host = EngineHost(config)
        contexts.install(WorkerContext(name, files), half(host.wake))
        return host

    def built() -> Engine:
        return engine_of(life, *contexts.installed(), "0")

    life = EngineLife(load, built)
    life.start()
    engine = await life.ready
    try:
        yield Made(engine)
    finally:
        await memory.end(life, engine.context, [])


def stock_proc(config: Any) -> Any:
    """vLLM's EngineCoreProc without its sockets: what comes and goes is in its queues."""

    class Proc(vllm_core.EngineCoreProc):  # type: ignore[misc]
        def __init__(self) -> None:
            self.input_queue, self.output_queue = Queue[Any](), Queue[Any]()
            self.shutdown_state = vllm_core.EngineShutdownState.RUNNING
            self.engines_running = self.reject_new_requests = False
            self.publish_dp_lb_stats = self.has_coordinator = self.enable_fault_tolerance = False
            self.process_input_queue_block = True
            made_by = executor.Executor.get_class(config)
            vllm_core.EngineCore.__init__(self, config, made_by, log_stats=False)

    return Proc()


class StockProc:
    """The process of a core, as a thread."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.core: Future[Any] = Future()
        self._thread.start()

    def _run(self) -> None:
        try:
            core = stock_proc(self._config)
        except BaseException as exc:
            why = exc.__cause__ if isinstance(exc, SystemExit) else exc
            self.core.set_exception(why or exc)
            return
        self.core.set_result(core)
        with suppress(SystemExit):
            core.run_busy_loop()
        core.shutdown()

    def put(self, kind: str, what: Any = None) -> None:
        self.core.result().input_queue.put_nowait((vllm_core.EngineCoreRequestType[kind], what))

    def end(self) -> None:
        """As SIGTERM does."""
        if self.core.exception() is None:
            self.core.result().shutdown_state = vllm_core.EngineShutdownState.REQUESTED
            self.put("WAKEUP")
        self._thread.join(20)
        assert not self._thread.is_alive()


class ProbeRole(Role):
    """A role whose half is a test's, and which notes its engine."""

    name, kv_role = "decode", "kv_consumer"
    half: ClassVar[Half]
    engine: ClassVar[asyncio.Future[Engine]]
    loops: ClassVar[list[asyncio.AbstractEventLoop]]
    # How long it takes to finish its work, and what it was told of its end.
    finish_s: ClassVar[float] = 0.0
    told: ClassVar[list[str]] = []

    def __init__(self, cluster: ClusterRef, options: WorkerOptions) -> None:
        self.told.clear()

    def adjust(self, config: Any) -> None: ...

    def make_half(self, wake: Callable[[], None]) -> SchedulerHalf:
        return self.half(wake)

    async def watch(self, etcd: EtcdClient, parts: AsyncExitStack) -> None: ...

    async def build(self, engine: Engine, servers: Any, parts: AsyncExitStack) -> Any:
        self._dead = engine.dead
        ProbeRole.loops = [asyncio.get_running_loop()]
        self.engine.get_loop().call_soon_threadsafe(self.engine.set_result, engine)

        async def nothing(*_: Any, **__: Any) -> None: ...

        servers.nats.start = nothing  # there is none

        async def finished() -> None:
            await asyncio.sleep(self.finish_s)
            self.told.append("too late" if self._dead.is_set() else "finished")

        async def give_up() -> None:
            self.told.append("too late" if self._dead.is_set() else "gave up")

        async def engine_gone(hangs: bool) -> None:
            self.told.append("engine gone")

        return SimpleNamespace(
            describe=lambda record: record, start=nothing, checking=str, reasons=list,
            told=dict, status=dict, jobs=dict, refresh_metrics=lambda: None, stop_taking=nothing,
            finished=finished, give_up=give_up, engine_gone=engine_gone,
        )  # fmt: skip


@asynccontextmanager
async def stock_core(
    etcd: EtcdServer, ns: str, model: Path, half: Half, shutdown_timeout: int = 0
) -> AsyncIterator[Made]:
    """vLLM's own loop, and one flag (worker/stock_core.py)."""
    ProbeRole.half = staticmethod(half)
    ProbeRole.engine = asyncio.get_running_loop().create_future()
    parser = arg_utils.EngineArgs.add_cli_args(flag_parser("test"))
    args = arg_utils.EngineArgs.from_cli_args(
        parser.parse_args(["--model", str(model), *FLAGS, *MOCK])
    )
    args.shutdown_timeout = shutdown_timeout
    place = {"etcd": etcd.url, "nats": "nats://unused", "namespace": ns}
    args.kv_transfer_config = vllm_config.KVTransferConfig(
        kv_connector="PullfillDecode", kv_connector_module_path="pullfill.worker.stock_core",
        kv_role="kv_consumer", engine_id=NAME, kv_connector_extra_config=place,
    )  # fmt: skip
    config = args.create_engine_config()
    with mock.patch("pullfill.worker.stock_core.role_of", return_value=ProbeRole):
        proc = StockProc(config)
        try:
            await asyncio.wrap_future(proc.core)
            engine = await ProbeRole.engine
            yield Made(engine, proc)
        finally:
            await asyncio.to_thread(proc.end)


async def test_a_client_of_stock_vllm_says_nothing_of_kv_transfer(
    model_path: Path, etcd: EtcdServer, ns: str
) -> None:
    """It would end the engine. Our frontends drop it. Stock clients do not come through them."""
    holder = {"prefix_holder": {"instance_id": "d-9", "address": "10.0.0.1:1", "tokens": 4096}}
    async with probed(partial(stock_core, etcd, ns), model_path) as (made, probe):
        asked = request("a")
        asked.client_index, asked.sampling_params.extra_args = 0, {"kv_transfer_params": holder}
        core = made.stock.core.result()
        made.stock.put("ADD", core.preprocess_add_request(asked))
        client, answer = await asyncio.to_thread(core.output_queue.get, timeout=20)
        assert (client, [one.request_id for one in answer.outputs]) == (0, [asked.request_id])
        assert probe.said == [None]


async def test_no_file_stays_if_the_worker_takes_longer_than_vllm_to_end(
    model_path: Path, etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(self: Any) -> None:
        await asyncio.sleep(1.0)

    monkeypatch.setattr(Membership, "leave", slow)
    monkeypatch.setattr("pullfill.worker.stock_core._CLOSE_S", 0.1)
    adapter = partial(stock_core, etcd, ns)
    async with probed(adapter, model_path) as (made, _):
        files = made.engine.context.files
        assert files.fence_path.exists()
    assert not files.fence_path.exists()


@pytest.mark.parametrize(
    ("shutdown_timeout", "finish_s", "told"),
    [(10, 0.3, ["finished"]), (1, 60.0, ["gave up"]), (0, 60.0, [])],
)
async def test_a_worker_finishes_within_the_time_that_vllm_gives_it(
    model_path: Path, etcd: EtcdServer, ns: str, monkeypatch: pytest.MonkeyPatch,
    shutdown_timeout: int, finish_s: float, told: list[str],
) -> None:  # fmt: skip
    """Its work is no request of vLLM's: the engine has none here. vLLM kills it after that time."""
    warned: list[str] = []
    monkeypatch.setattr(stock.logger, "warning", lambda text, *_: warned.append(text))
    monkeypatch.setattr(ProbeRole, "finish_s", finish_s)
    adapter = partial(stock_core, etcd, ns, shutdown_timeout=shutdown_timeout)
    async with probed(adapter, model_path):
        pass
    assert ProbeRole.told == [*told, "engine gone"]
    assert any("--shutdown-timeout is 0" in text for text in warned) is (not shutdown_timeout)


async def test_stock_vllm_says_why_a_worker_has_failed_before_it(
    model_path: Path,
    etcd: EtcdServer,
    ns: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also if that has ended the worker's loop already. One line, and no file stays."""

    async def refuse(self: Any, etcd: EtcdClient, parts: AsyncExitStack) -> None:
        raise ConfigError("not in this cluster")

    files: list[RegionFiles] = []
    begin = stock.StockCore.begin

    def begin_late(begun: Any) -> None:
        files.append(begun.context.files)
        begun._thread.join(20)
        begun.close()
        begun.close()
        begin(begun)

    monkeypatch.setattr(ProbeRole, "watch", refuse)
    monkeypatch.setattr(stock.StockCore, "begin", begin_late)
    with pytest.raises(ConfigError, match="not in this cluster"):
        async with stock_core(etcd, ns, model_path, lambda _: Probe()):
            pass
    assert not files[0].fence_path.exists()
    assert "error: not in this cluster\n" in capfd.readouterr().err


@pytest.fixture(params=["own_loop", "stock_core"])
def adapter(request: pytest.FixtureRequest) -> Any:
    if request.param == "own_loop":
        return own_loop
    return partial(stock_core, request.getfixturevalue("etcd"), request.getfixturevalue("ns"))


@asynccontextmanager
async def probed(adapter: Any, model: Path) -> AsyncIterator[tuple[Made, Probe]]:
    """An engine with a `Probe` as its side. Each step must be told as done in the end."""
    probe = Probe()
    async with adapter(model, lambda _: probe) as made:
        yield made, probe
    assert len(probe.running) == len(probe.steps)
    assert not any(probe.running)


def request(name: str, tokens: int = PROMPT, **fields: Any) -> Any:
    prompt = random_prompt(tokens, seed=sum(name.encode()))
    return own_request(name, prompt, cache_salt=None, priority=0, arrival_time=0.0, **fields)


async def until(holds: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(eventually, holds, what)


async def test_work_runs_on_the_engine_thread_in_order(adapter: Any, model_path: Path) -> None:
    done: list[str] = []
    async with probed(adapter, model_path) as (made, probe):
        # Workers of two kinds exchange nothing.
        assert made.engine.compat.isa == mocked.MockExecutor.KV_KIND
        assert await made.call(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await made.call(lambda: 1 // 0)
        made.loop.submit(lambda: done.append("a"), wake=False)
        made.loop.submit(lambda: done.append("b"))
        await until(lambda: done == ["a", "b"], "the engine sleeps")
        turns = probe.turns
        made.loop.wake()
        await until(lambda: probe.turns > turns, "the side is not asked")
    if made.stock is None:  # the asyncio loop of the other one has ended, too
        with pytest.raises(NotNow, match="has ended"):
            await made.loop.call(lambda: None)


async def test_a_request_has_one_outcome(adapter: Any, model_path: Path) -> None:
    async with probed(adapter, model_path) as (made, probe):
        await made.call(lambda: None)
        await asyncio.sleep(0.05)  # the engine sleeps by now
        async with asyncio.timeout(20):
            output = await asyncio.wrap_future(made.loop.add(request("a")))
        assert output.finish_reason is not None
        assert len(output.new_token_ids) == 1
        named = lora_request(Adapter(name="red", path="/red", content="0" * 32))
        refused = made.loop.add(request("b", lora_request=named))
        with pytest.raises(BadMessage, match="--enable-lora"):
            await asyncio.wrap_future(refused)
        # One that is aborted has none. vLLM keeps its blocks until it is told that nobody writes.
        probe.brings["c"] = BROUGHT
        aborted, forgotten = made.loop.add(request("c")), list[bool]()
        await until(lambda: "c" in probe.placed, "it does not wait")
        made.loop.abort("c", lambda: forgotten.append(True))
        await until(lambda: forgotten == [True], "never told")
        assert not aborted.done()
        probe.with_step = StepReport(failed={"c"})  # takes a step, and no request needs one
        made.loop.wake()
        view = made.engine.view
        await until(lambda: view.free_blocks == view.usable_blocks, "its blocks are held")


async def test_a_request_whose_load_has_failed_needs_its_blocks_once(
    adapter: Any, model_path: Path
) -> None:
    """vLLM asks about a request without blocks. It has reserved some for this one before."""
    async with probed(adapter, model_path) as (made, probe):
        probe.brings["a"] = BROUGHT
        computed = made.loop.add(request("a"))
        await until(lambda: "a" in probe.placed, "it does not wait")
        assert made.engine.context.in_flight
        probe.with_step = StepReport(failed={"a"})
        made.loop.wake()
        await asyncio.wrap_future(computed)
        assert probe.reserved == [False, False]


async def test_what_a_side_defers_does_not_begin_and_is_asked_about_once(
    adapter: Any, model_path: Path
) -> None:
    async with probed(adapter, model_path) as (made, probe):
        probe.step_meter.deferred = {"later": False}
        later = made.loop.add(request("later"))
        await until(lambda: probe.deferred == {"later": True}, "it is not asked about")
        await asyncio.wrap_future(made.loop.add(request("now")))
        assert len(probe.said) == 2
        assert not any("later" in step for step in probe.steps)
        probe.step_meter.deferred = {}
        made.loop.wake()
        await asyncio.wrap_future(later)
        # One that goes elsewhere goes at once.
        probe.step_meter.deferred, probe.brings = {"away": False}, {"away": BROUGHT}
        away = made.loop.add(request("away"))
        await until(lambda: "away" in probe.placed, "it does not wait")
        probe.now = StepReport({"away"})
        made.loop.wake()
        await asyncio.wrap_future(away)


async def test_the_memory_is_freed_after_nobody_can_reach_it(
    adapter: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[bool] = []
    monkeypatch.setattr(mocked.MockExecutor, "shutdown", lambda _: left.append(not fence.exists()))
    async with probed(adapter, model_path) as (made, _):
        fence = made.engine.context.files.fence_path
        assert fence.exists()
    assert left
    assert all(left)


async def test_a_worker_whose_engine_hangs_in_stock_vllm_leaves_and_ends_the_process(
    model_path: Path, etcd: EtcdServer, client: EtcdClient, ns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, goes_on = list[int](), threading.Event()
    monkeypatch.setattr("pullfill.worker.stock_core.leave", ended.append)
    monkeypatch.setattr("pullfill.worker.stock_core.exit_within", lambda *_: None)
    async with probed(partial(stock_core, etcd, ns), model_path) as (made, _):
        life = made.stock.core.result().scheduler.connector._stock
        made.loop.submit(lambda: goes_on.wait(60))
        try:
            life.loop.call_soon_threadsafe(life.give_up, "it hangs")
            await until(lambda: ended == [1], "the process stays")
            assert not await workers(client, ns)
            assert not goes_on.is_set()
        finally:
            goes_on.set()


def test_a_request_that_comes_past_vllms_servers_wakes_the_group() -> None:
    """Else this rank would wait in its first step for the others, which have no request."""
    core = vllm_core.DPEngineCoreProc.__new__(vllm_core.DPEngineCoreProc)
    added: list[Any] = []
    core.vllm_config, core.has_coordinator, core.current_wave = None, True, 0
    core.engines_running, core.output_queue = False, Queue[Any]()
    core.request_block_hasher = core.mm_receiver_cache = None
    core.scheduler = SimpleNamespace(
        add_request=added.append, pause_state=vllm_core.PauseState.UNPAUSED
    )
    host: Any = SimpleNamespace(
        core=core, enter=lambda work: work(), submit=None, wake=None, use=None
    )
    host.register = host.waiting_for_blocks = None
    EngineLoop(host, None, Adapters()).add(request("a"))  # type: ignore[arg-type]
    assert [one.request_id for one in added] == ["a"]
    assert core.engines_running
    client, told = core.output_queue.get_nowait()
    assert (client, told.start_wave) == (-1, 0)
