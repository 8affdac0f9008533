"""Whatever a decode worker sends, the frontend's loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import zmq
from hypothesis import strategies as st

from pullfill import wire
from pullfill.engine import check, front_wire
from pullfill.errors import BadMessage
from pullfill.frontend.decode_connection import ConnectionState, DecodeConnection
from tests.support.fuzz import EXAMPLES, explore, mutated

KINDS = [value for value in vars(front_wire).values() if isinstance(value, bytes)]
HELLO = wire.encode(
    front_wire.FrontendHello(frontend_instance="f", vllm_version=check.require_version(), model="m")
)


class _Owner:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@EXAMPLES
@pytest.mark.essential
async def test_any_message_of_a_decode_worker_leaves_the_frontend_alive(examples: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    record = wire.WorkerRecord(
        instance_id="decode-1", incarnation="i", role="decode", state=wire.WorkerState.READY,
        model="m", host="h", host_id="h", pid=1, started_at=0.0, data="tcp://127.0.0.1:1",
    )  # fmt: skip
    hello = wire.decode(HELLO, front_wire.FrontendHello)
    welcome = front_wire.DecodeWelcome(
        decode_instance="decode-1", vllm_version="v", max_model_len=1,
        num_gpu_blocks=1, block_size=1,         supported_tasks=[],
    )  # fmt: skip
    link = DecodeConnection(context, record, hello, _Owner())
    valid = [wire.encode(welcome), HELLO, front_wire.encode_ids(["r"]), b"reason"]

    def arrive(messages: list[tuple[bytes, list[bytes]]]) -> None:
        for kind, payload in messages:
            with contextlib.suppress(BadMessage):
                link._handle(kind, [zmq.Frame(part) for part in payload])

    message = st.tuples(
        st.one_of(st.sampled_from(KINDS), st.binary(max_size=5)),
        st.lists(mutated(valid), max_size=3),
    )
    try:
        explore(examples, arrive, messages=st.lists(message, max_size=5))
        await asyncio.sleep(0)
        assert link.state in ConnectionState
    finally:
        link.close()
        context.destroy(0)
