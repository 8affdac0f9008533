"""Our turns in vLLM's busy loop, around a core that is told what to do."""

from __future__ import annotations

import os
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine.host import EngineHooks
from pullfill.engine.requests import FRONTENDS
from pullfill.engine.stock_host import StockHost


class Core:
    """As much of an EngineCoreProc as a turn asks for. It has one step to take for each output."""

    vllm_config = batch_queue = None
    engines_running = False

    def __init__(self) -> None:
        self.input_queue, self.output_queue = Queue[Any](), Queue[Any]()
        self.running = True
        self.done: list[str] = []
        self.outputs: list[dict[int, Any]] = []
        self.scheduler = SimpleNamespace(
            has_requests=lambda: bool(self.outputs), requests={}, running=[],
            finished_recving_kv_req_ids=set(), get_request_counts=lambda: (0, 0),
        )  # fmt: skip

    def is_running(self) -> bool:
        return self.running

    def has_work(self) -> bool:
        return bool(self.outputs)

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        self.done.append("step")
        return self.outputs.pop(), True

    def post_step(self, executed: bool) -> None: ...

    def shutdown(self) -> None: ...

    def _send_abort_outputs_to_client(self, request_ids: list[str], client: int) -> None:
        self.done.append(f"abort {request_ids} of {client}")

    def _handle_client_request(self, kind: str, what: Any) -> None:
        self.outputs.append(what)

    def _maybe_publish_request_counts(self) -> None:
        self.done.append("counts")


class Hooks(EngineHooks):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_outputs(self, outputs: dict[int, Any]) -> None:
        self.told.append(outputs)

    def on_failed_step(self, untouched: set[str]) -> None:
        self.told.append(("ends", untouched))

    def on_aborted(self, request_ids: set[str]) -> None:
        self.told.append(("aborted", request_ids))


@pytest.fixture
def core() -> Any:
    return Core()


@pytest.fixture
def host(core: Any, monkeypatch: pytest.MonkeyPatch) -> StockHost:
    monkeypatch.setattr("pullfill.engine.requests.statuses", lambda: None)
    return StockHost(core, lambda: core.done.append("ending"), lambda: None)


@pytest.fixture
def hooks(host: StockHost) -> Hooks:
    host.use(made := Hooks())
    return made


def test_frontends_wait_until_the_engine_is_made(core: Any, host: StockHost) -> None:
    """Their requests would find a core without its last parts."""
    reader, writer = os.pipe()
    os.write(writer, b"x")
    host.submit(lambda: host.register(reader, lambda: core.done.append("read")))
    rounds = iter([False, False, True])
    host.wait(lambda: next(rounds))
    assert core.done == []
    assert not host.pulse().busy, "a wait of vLLM's would count as stuck"
    host.turn()
    host.turn()
    assert "read" in core.done
    os.close(reader)
    os.close(writer)


def test_requests_of_clients_count_before_they_take_a_step(core: Any, host: StockHost) -> None:
    core.input_queue.put_nowait(("ADD", {0: SimpleNamespace(scheduler_stats=None)}))
    host.turn()
    assert core.done == ["counts", "step"]


def test_vllms_own_servers_count_the_statistics(core: Any, host: StockHost, hooks: Hooks) -> None:
    for whose in ({0: True, FRONTENDS: False}, {FRONTENDS: True, 1: False}, {FRONTENDS: True}):
        full = SimpleNamespace(num_running_reqs=3, iteration=7)
        core.outputs.append({c: SimpleNamespace(scheduler_stats=full if has else None)
                             for c, has in whose.items()})  # fmt: skip
        host.turn()
        (ours,) = hooks.told.pop().values()
        assert ours.scheduler_stats is None
        _, theirs = core.output_queue.get_nowait()
        assert theirs.scheduler_stats is full
        assert core.output_queue.empty()


def test_what_vllm_aborts_goes_on_elsewhere_and_a_pause_is_no_end(
    core: Any, host: StockHost, hooks: Hooks
) -> None:
    core._send_abort_outputs_to_client(["a"], FRONTENDS)
    core._send_abort_outputs_to_client(["b"], 0)
    core.running = False
    core._send_abort_outputs_to_client(["c"], FRONTENDS)
    assert hooks.told == [("aborted", {"a"}), ("ends", {"c"})]
    assert core.done == ["abort ['b'] of 0"]
