"""Every request ends, once and in time, whatever goes wrong with another: the dispatcher alone."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq

from pullfill.engine import front_wire
from pullfill.engine.blame import Fault
from pullfill.frontend import counters, dispatch
from pullfill.frontend.dispatch import Dispatcher
from pullfill.frontend.flight import WAITS, Flight, Waits
from pullfill.frontend.request_log import RequestLog
from pullfill.frontend.routing.balancer import Balancer
from pullfill.wire import DecodePolicy
from tests.support.fake_vllm import Output, Outputs, PlainCodec, request
from tests.support.frontend_rig import Alone, Sink, until


class Worker:
    """What the dispatcher sees of a connection. refuse: wire ids whose sending fails."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.flights: dict[str, Flight] = {}
        self.calls: dict[int, Any] = {}
        self.welcome = None
        self.usable = True
        self.far = False
        self.heard_at = asyncio.get_running_loop().time()
        self.refuse: set[str] = set()

    def send(self, kind: bytes, *frames: Any) -> None:
        if self.refuse & set(self.flights):
            self.refuse.clear()
            raise OSError("no descriptors left")


class Family(Sink):
    """As vLLM: requests whose names share the first letter are choices of one answer, and end with
    the first that fails. breaks: telling it fails."""

    dispatcher: Dispatcher
    open: set[str]
    breaks = False

    def failed(self, request_id: str, message: str, fault: Fault = Fault.WORKERS) -> None:
        super().failed(request_id, message, fault)
        if self.breaks:
            raise RuntimeError("the reader is gone")
        self.dispatcher.abort([n for n in self.open if n[0] == request_id[0] and n != request_id])


class Desk:
    """A dispatcher with requests at worker A."""

    def __init__(self, *requests: Any, waits: Waits = WAITS) -> None:
        self.workers: list[Worker] = [Worker("A")]
        self.sink = Family()
        self.dispatcher = Dispatcher(
            self.sink,
            PlainCodec(),
            Balancer(lambda: DecodePolicy.ROUND_ROBIN),
            RequestLog(),
            Alone(),  # type: ignore[arg-type]
            waits=waits,
        )
        self.dispatcher.on_usable(self.workers)  # type: ignore[arg-type]
        self.sink.dispatcher = self.dispatcher
        self.sink.open = {r.request_id for r in requests}
        for item in requests:
            self.dispatcher.submit(item)

    def lose(self, *left: Worker) -> None:
        """The first worker leaves us, alive; these are there then."""
        gone, self.workers = self.workers[0], list(left)
        self.dispatcher.on_usable(self.workers)  # type: ignore[arg-type]
        self.dispatcher.on_lost(gone, "x", died=False)  # type: ignore[arg-type]

    def say(self, name: str, *tokens: int) -> None:
        outputs = Outputs(outputs=[Output(name, list(tokens))], timestamp=1.0)
        frames = [zmq.Frame(msgspec.msgpack.encode(outputs))]
        self.dispatcher.on_outputs(self.workers[0], frames)  # type: ignore[arg-type]


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_request_that_cannot_be_sent_harms_no_other_and_no_later_one(breaks: bool) -> None:
    desk = Desk(request("a"), request("b"), request("c"))
    desk.sink.breaks = breaks
    second, third = Worker("B"), Worker("C")
    second.refuse.add("a~1")
    desk.lose(second)
    await until(lambda: set(second.flights) == {"b~1", "c~1"})
    assert list(desk.sink.failures) == ["a"]
    assert "no descriptors left" in desk.sink.failures["a"]
    assert desk.sink.faults["a"] is Fault.OURS
    assert desk.dispatcher.in_flight == 2
    desk.lose(third)
    await until(lambda: set(third.flights) == {"b~2", "c~2"})


async def test_a_request_whose_end_cannot_be_noted_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even if it is the one that is being placed of many."""
    raised = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, told: raised.append(told))

    def over(self: RequestLog, *told: Any) -> None:
        raise RuntimeError("no span")

    desk = Desk(request("a"), request("b"), request("c"))
    monkeypatch.setattr(RequestLog, "over", over)
    second = Worker("B")
    second.refuse.add("a~1")
    desk.lose(second)
    await until(lambda: {"b~1", "c~1"} <= set(second.flights))
    assert len(raised) == 1


async def test_a_request_that_cannot_be_judged_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def why_not(item: Any, tokens: Any) -> str | None:
        assert item.request_id != "a"
        return None

    monkeypatch.setattr(dispatch.migration, "why_not", why_not)
    desk = Desk(request("a"), request("b"))
    desk.say("a", 1)
    desk.say("b", 1)
    second = Worker("B")
    desk.lose(second)
    await until(lambda: set(second.flights) == {"b~1"})
    assert list(desk.sink.failures) == ["a"]


async def test_a_request_that_has_found_a_worker_has_no_deadline_any_more() -> None:
    desk = Desk(request("a"), waits=Waits(least=0.05, most=0.05))
    second = Worker("B")
    desk.lose(second)
    await until(lambda: set(second.flights) == {"a~1"})
    await asyncio.sleep(0.1)
    assert not desk.sink.failures


async def test_choices_that_fail_together_are_counted_once() -> None:
    """And none of them is sent anywhere once the first has failed."""
    failed = counters.FAILED._value
    before = failed.get()
    waits = Waits(first=0.01, least=600.0)
    seeded = Desk(request("a1", seed=1), request("a2", seed=1), waits=waits)
    seeded.say("a1", 1)
    second = Worker("B")
    seeded.lose(second)
    await asyncio.sleep(0.05)
    assert (list(seeded.sink.failures), second.flights) == (["a1"], {})
    assert seeded.dispatcher.in_flight == 0
    later = Desk(waits=waits)
    later.dispatcher.on_usable([])
    later.sink.open = {"a1", "a2"}
    for name in ("a1", "a2"):
        later.dispatcher.submit(request(name))
    await until(lambda: list(later.sink.failures) == ["a1"])
    assert later.dispatcher.in_flight == 0
    assert failed.get() - before == 2


async def test_a_worker_that_says_why_a_request_fails_is_believed() -> None:
    """The user gets the reason, as an error of the request, and no token after it."""
    desk = Desk(request("a1"), request("a2"), request("b"))
    desk.say("a1", 1)
    error = Output("a1", [2], finish_reason=front_wire._ERROR, stop_reason="no text matches it")
    frames = [zmq.Frame(msgspec.msgpack.encode(Outputs(outputs=[error], timestamp=1.0)))]
    desk.dispatcher.on_outputs(desk.workers[0], frames)  # type: ignore[arg-type]
    assert desk.sink.failures == {"a1": "no text matches it"}
    assert desk.sink.refused == {"a1"}
    assert desk.sink.tokens["a1"] == [1]
    assert desk.dispatcher.in_flight == 1, "the other choice of that answer ended too"


async def test_a_bug_of_a_worker_does_not_look_like_a_bad_request() -> None:
    desk = Desk(request("a"))
    error = Output("a", [], finish_reason=front_wire._ERROR, stop_reason="a bug")
    error.kv_transfer_params = front_wire.fault_mark(Fault.OURS)
    frames = [zmq.Frame(msgspec.msgpack.encode(Outputs(outputs=[error], timestamp=1.0)))]
    desk.dispatcher.on_outputs(desk.workers[0], frames)  # type: ignore[arg-type]
    assert desk.sink.failures == {"a": "a bug"}
    assert desk.sink.faults == {"a": Fault.OURS}


async def test_a_request_that_no_wire_can_carry_is_refused() -> None:
    desk = Desk(request("a"))
    odd = request("b")
    odd.sampling_params.seed = 10**30
    desk.dispatcher.submit(odd)
    assert desk.sink.refused == {"b"}
    assert desk.dispatcher.in_flight == 1
