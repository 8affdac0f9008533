"""Bytes on the frontend wire: vLLM's own codec (imported here), and the decode worker's request
server.

The engine thread must survive whatever comes, and nothing may be unpickled.
"""

from __future__ import annotations

import contextlib
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st

from pullfill import wire
from pullfill.decode_worker import request_server as request_servers
from pullfill.decode_worker.request_server import RequestServer
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.engine import check, front_wire
from pullfill.engine.requests import own_request
from pullfill.errors import BadMessage
from tests.support.fuzz import EXAMPLES, explore, little_memory, mutated
from tests.support.request_server_rig import FakeCore, engine_loop
from tests.support.said import blank

KINDS = [value for value in vars(front_wire).values() if isinstance(value, bytes)]
HELLO = wire.encode(
    front_wire.FrontendHello(frontend_instance="f", vllm_version=check.require_version(), model="m")
)


class _Bomb:
    """Unpickling it is noticed."""

    exploded = False

    def __reduce__(self) -> Any:
        return (_explode, ())


def _explode() -> None:
    _Bomb.exploded = True


BOMBS = [
    msgspec.msgpack.encode([0, "m", [msgspec.msgpack.Ext(code, pickle.dumps(_Bomb()))]])
    for code in (1, 2, 42)
]
SHAPES = [
    msgspec.msgpack.encode([0, "m", [["float32", shape, data]]])
    for shape in ([2**40], [-1], [2**31, 2**31], [0] * 500, ["x"])
    for data in (0, 5, b"", b"x" * 8)
]


@pytest.fixture(scope="module")
def codecs() -> tuple[front_wire.WorkerCodec, front_wire.FrontendCodec]:
    return front_wire.WorkerCodec(), front_wire.FrontendCodec()


@EXAMPLES
@pytest.mark.essential
def test_vllms_codec_gives_its_structs_or_bad_message(
    codecs: tuple[front_wire.WorkerCodec, front_wire.FrontendCodec], examples: int
) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    worker, frontend = codecs
    request = own_request("r", [1, 2], cache_salt="s", priority=0, arrival_time=0.0)
    answer = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r", new_token_ids=[1])])
    valid = [bytes(b"".join(map(bytes, frontend.encode(request))))]
    valid += [bytes(b"".join(map(bytes, worker.encode(answer)))), *BOMBS, *SHAPES]
    valid += [msgspec.msgpack.encode((1, "profile", []))]

    def decode(frames: list[bytes]) -> None:
        for parse in (worker.request, worker.utility, frontend.outputs):
            with contextlib.suppress(BadMessage):
                parse(frames)

    with little_memory():
        for frames in ([b] for b in valid):
            decode(frames)
    explore(examples, decode, frames=st.lists(mutated(valid), min_size=1, max_size=3))
    assert not _Bomb.exploded
    pickle.loads(pickle.dumps(_Bomb()))
    assert _Bomb.exploded, "it would have been noticed"


class _Core(FakeCore):
    """Takes every request; a utility of it fails."""

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        return SimpleNamespace(
            request_id="r", arrival_time=0.0, _all_token_ids=[], block_hashes=[]
        ), 0

    def profile(self) -> bool:
        raise RuntimeError("no")


class _Sent:
    """Instead of the ROUTER."""

    def send(self, part: Any, *_: Any) -> None:
        assert isinstance(part, bytes | memoryview)


@pytest.fixture
def request_server(
    codecs: tuple[front_wire.WorkerCodec, front_wire.FrontendCodec],
) -> RequestServer:
    loop = engine_loop(_Core(), lambda work, **_: work())
    welcome = blank(
        front_wire.DecodeWelcome, vllm_version=check.require_version(), max_model_len=100
    )
    request_server = RequestServer(
        loop, RequestTraces("decode-1"), welcome=lambda _: welcome, models=["m"]
    )
    request_server._socket = _Sent()
    return request_server


@EXAMPLES
@pytest.mark.essential
def test_any_multipart_message_leaves_the_engine_thread_alive(
    request_server: RequestServer, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = own_request("r", [1, 2], cache_salt=None, priority=0, arrival_time=0.0)
    encoded = [bytes(f) for f in front_wire.FrontendCodec().encode(request)]
    calls = [msgspec.msgpack.encode((1, m, [])) for m in ("profile", "shutdown", "__class__")]
    valid = [HELLO, front_wire.encode_list(["r"]), *encoded, *calls, *BOMBS]
    failed: list[object] = []
    monkeypatch.setattr(request_servers.logger, "exception", lambda *args: failed.append(args))

    def arrive(messages: list[tuple[bytes, bytes, list[bytes]]]) -> None:
        for identity, kind, payload in messages:
            frames = [zmq.Frame(part) for part in payload]
            with contextlib.suppress(BadMessage):
                request_server._dispatch(identity, kind, frames)
            request_server.intake.thread.wait()

    identity = st.sampled_from([b"a", b"b"])
    kind = st.one_of(st.sampled_from(KINDS), st.binary(max_size=5))
    message = st.tuples(identity, kind, st.lists(mutated(valid), max_size=3))
    greeted = st.lists(message, max_size=6).map(
        lambda rest: [(b"a", front_wire.HELO, [HELLO]), *rest]
    )
    explore(examples, arrive, messages=greeted)
    arrive([(b"z", front_wire.HELO, [HELLO]), (b"z", front_wire.PING, [])])
    assert b"z" in request_server._frontends
    assert failed == []


@pytest.mark.essential
def test_blocks_of_two_salts_never_have_one_hash() -> None:
    """The prefill worker's own prefix cache: the salt of the user is in every block's hash, from
    the first on, so what one tenant's prompt left there is no hit for another's."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(4, sha256)

    def hashes(salt: str | None) -> list[bytes]:
        request = own_request("r", list(range(16)), cache_salt=salt, priority=0, arrival_time=0.0)
        return list(Request.from_engine_core_request(request, hasher).block_hashes)

    assert len(hashes("a")) == 4
    assert hashes("a") == hashes("a")
    for one, other in (("a", "b"), ("a", None), ("b", None)):
        assert set(hashes(one)).isdisjoint(hashes(other))
