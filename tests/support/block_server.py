"""A decode worker's request server and block events over a real ROUTER, without an engine."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker.prefix.block_events import BlockEvents
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.engine import check, front_wire
from pullfill.engine.kv_events import Change, KvEvents, Places, Removed, Stored
from pullfill.ids import new_incarnation
from pullfill.net.this_host import host_id
from pullfill.prefix import chain
from pullfill.wire import WorkerRecord, WorkerState, u32
from tests.support.request_server_rig import own_loop

SIZE = 4


def prompt_hashes(tokens: Sequence[int]) -> list[int]:
    """What a frontend computes for a prompt."""
    root = chain.root(None, None, SIZE)
    return chain.extend(root, u32.pack(list(tokens)), SIZE)


def handle(tokens: Sequence[int]) -> bytes:
    """What stands for vLLM's hash of the block that ends with these tokens."""
    return bytes(u32.pack(list(tokens)))


class FakeEvents(KvEvents):
    """An engine that tells what the test says, through `take`."""

    def attach(self, core: Any, take: Callable[[list[Change]], None]) -> None:
        self.places = Places({0: 1}, SIZE)
        self.take = take


VIEW: Any = SimpleNamespace(tell_blocks=lambda events, take: events.attach(None, take))


class BlockServer:
    """One decode worker. Its engine thread serves frontends; `tell` gives it events.

    Make it on the loop that its asyncio thread stands for. step_s: its engine's steps take so
    long, and nothing is sent meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "decode-1") -> None:
        monkeypatch.setattr(front_wire, "WorkerCodec", lambda: None)
        self.step_s = 0.0
        self._todo: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stop = threading.Event()
        loop = own_loop(
            SimpleNamespace(vllm_config=None), lambda work, wake=True: self._todo.put(work)
        )
        welcome = front_wire.DecodeWelcome(
            decode_instance=name, vllm_version=check.require_version(), max_model_len=1,
            num_gpu_blocks=1, block_size=SIZE, supported_tasks=[], prefix_block_size=SIZE,
        )  # fmt: skip
        self.events = FakeEvents()
        self.blocks = BlockEvents(asyncio.get_running_loop(), VIEW, self.events)
        self.server = RequestServer(
            loop,
            RequestTraces(name),
            welcome=lambda _: welcome,
            models=["m"],
            follow=self.blocks.follow,
        )
        self.server.bind("127.0.0.1")
        self.record = WorkerRecord(
            instance_id=name, incarnation=new_incarnation(), role="decode",
            state=WorkerState.READY, model="m", host="127.0.0.1", host_id=host_id(), pid=1,
            started_at=0.0, data=self.server.address,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.step_s):
            if self.server._socket.poll(2):
                self.server.receive()
            while not self._todo.empty():
                self._todo.get()()

    def tell(self, *changes: Change) -> None:
        """Let a step of the engine end with these changes."""
        self._todo.put(lambda: self.events.take(list(changes)))

    def store(self, tokens: Sequence[int]) -> None:
        """Store the blocks of a prompt."""
        ends = range(SIZE, len(tokens) + 1, SIZE)
        self.tell(Stored(1, [handle(tokens[:end]) for end in ends], None, list(tokens), "", None))

    def remove(self, *ends: Sequence[int]) -> None:
        """Remove the blocks that end with these prompts, each with an event of its own."""
        self.tell(*(Removed(1, [handle(tokens)]) for tokens in ends))

    async def die(self) -> None:
        """As SIGKILL looks from outside."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 5)
        await self.blocks.close()
        self.server.close()
