"""The wire between a frontend and a decode worker.

ZMQ DEALER (frontend) → ROUTER (decode worker, bound at `WorkerRecord.data`). Each message is
`[kind, *payload]`; the ROUTER sees the frontend's routing id in front of it. vLLM's structs travel
in vLLM's own msgpack codec. So both ends must run the same vLLM release. HELO checks that.

The frontend connects under a routing id that it never uses again, sends HELO and PING, and sends
requests only after the welcome. A connection that breaks is over, because messages may be lost.
Then the frontend sends its requests elsewhere, to go on from the tokens that it has. The decode
worker aborts the requests of a frontend that has said BYE, or nothing for SILENCE_S.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.backend import zmq_poll

from pullfill.engine.blame import Fault
from pullfill.engine.check import base_version
from pullfill.errors import BadMessage
from pullfill.wire import (
    WIRE_VERSION,
    Count,
    ExplainRecord,
    Finite,
    Id,
    Message,
    PrefixHolder,
    Text,
    Version,
    decode,
    encode,
    u32,
)

# frontend → decode                              decode → frontend
# HELO  FrontendHello           (first)          HELO  DecodeWelcome, or NOPE text
# ADD   id, prompt as u32, PrefixHolder or       OUT   EngineCoreOutputs frames
#       nothing, EngineCoreRequest
# ABRT  list[request id]                         EXPL  list[ExplainRecord]
# UTIL  (call_id, method, args) frames           LAST  EXPL's and OUT's, of requests that end
#                                                BACK  list[request id]: the worker drains, or its
#                                                      intake is full; it has nothing of them
# FOLW  PrefixFollow                             LOAD  LoadReport, when it has changed
#                                                BLKS  PrefixEvents or PrefixPage, after FOLW
# PING  every PING_INTERVAL_S, idle every 2nd    PONG
# BYE                                            DRAIN takes no new requests
#                                                GONE  the worker had dropped this frontend
HELO = b"HELO"
NOPE = b"NOPE"
ADD = b"ADD"
ABRT = b"ABRT"
UTIL = b"UTIL"
OUT = b"OUT"
EXPL = b"EXPL"
LAST = b"LAST"
BACK = b"BACK"
LOAD = b"LOAD"
FOLW = b"FOLW"
BLKS = b"BLKS"
PING = b"PING"
PONG = b"PONG"
DRAIN = b"DRAIN"
GONE = b"GONE"
BYE = b"BYE"

PING_INTERVAL_S = 1.0
# A decode worker aborts the requests of a frontend that says nothing for this long.
SILENCE_S = 6.0
# ZMQ's own heartbeat: a peer that is stopped or cut off counts as lost after seven of these.
HEARTBEAT_IVL_MS = 500
LOAD_S = 0.05
MAX_IDS = 65536
# vLLM's FinishReason.ERROR.
ERROR = 3
# Messages that may wait in each direction, at each end. A peer that lets them grow to that is
# treated as lost: nothing is ever left out of the middle.
QUEUE_LIMIT = 10_000

# bytes, memoryview or zmq.Frame. vLLM's codec takes all three.
Frames = Sequence[Any]
# Plain numbers: with pyzmq's enums, combining the flags takes as long as sending.
_NOW = int(zmq.NOBLOCK)
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)


class FrontendHello(Message, frozen=True, kw_only=True):
    """First message of a frontend. `model`: the served model name it was started for."""

    v: Version = WIRE_VERSION
    frontend_instance: Id
    vllm_version: Text
    model: Text


class LoadReport(Message, frozen=True, kw_only=True):
    """What a decode worker has to do, all frontends taken together.

    It is sent when it has changed, at most every LOAD_S.

    running, waiting: requests in vLLM's scheduler.
    uncached_tokens_queued: tokens that are to be computed before these requests can go on to
    generate. Of a request that waits, the tokens that were not in the prefix cache when the request
    came. Tokens that a prefill worker computes do not count.
    active_blocks: KV blocks that requests hold. free_blocks: all others, cached ones included.
    seats: `--max-num-seqs`. 0: not told.
    requests: of clients, not finished. streams: those that generate. stream_tokens: in their KV.
    prompt_share: share of the engine's time that prompts took lately, own and pulled ones.
    step_s: seconds of a step without prompts: its own, of each stream, and of each of
    `stream_tokens`.
    prompt_token_s: seconds that a token of a prompt took lately. 0: it has computed none.
    prompt_tokens_per_s: uncached, of the requests that began to generate, whoever computed them.
    ended: of answers that ended lately: uncached tokens of their prompts, tokens, number."""

    running: Count
    waiting: Count
    uncached_tokens_queued: Count
    active_blocks: Count
    free_blocks: Count
    draining: bool = False
    seats: Count = 0
    requests: Count = 0
    streams: Count = 0
    stream_tokens: Count = 0
    prompt_share: Finite = 0.0
    step_s: tuple[Finite, Finite, Finite] = (0.0, 0.0, 0.0)
    prompt_token_s: Finite = 0.0
    prompt_tokens_per_s: Finite = 0.0
    ended: tuple[Finite, Finite, Finite] = (0.0, 0.0, 0.0)


class DecodeWelcome(Message, frozen=True, kw_only=True):
    """The decode worker takes requests.

    supported_tasks: vLLM's. Frontends of older builds read them.
    prefix_block_size: tokens of a block of the prefix cache, whose changes can be followed. 0: they
    cannot."""

    v: Version = WIRE_VERSION
    decode_instance: Id
    vllm_version: Text
    max_model_len: Count
    num_gpu_blocks: Count
    block_size: Count
    supported_tasks: list[Text]
    load: LoadReport | None = None
    prefix_block_size: Count = 0


def refuse_hello(hello: FrontendHello, *, vllm_version: str, models: Sequence[str]) -> str | None:
    """Why a decode worker must answer NOPE, naming the field that differs. None: welcome it.

    models: the names (served name, path) of the worker's model."""
    if base_version(hello.vllm_version) != base_version(vllm_version):
        return (
            f"vllm_version differs: this decode worker runs vLLM {vllm_version}, "
            f"the frontend {hello.vllm_version}"
        )
    if models and hello.model not in models:
        return f"model differs: this decode worker serves {models[0]!r}, not {hello.model!r}"
    return None


def attempt_id(request_id: str, attempt: int) -> str:
    """The id of a request at a worker: its own at first, a new one each time it is sent again.

    So a worker that still holds the last attempt never sees one id twice."""
    return request_id if attempt == 0 else f"{request_id}~{attempt}"


def set_options(socket: Any) -> None:
    """Set the options of both ends, before bind or connect."""
    # Heartbeats run in ZMQ's I/O thread. So a process that is busy with an engine step does not
    # look dead, and one that is stopped or cut off does.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
    socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_IVL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6 * HEARTBEAT_IVL_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)


def send(socket: Any, parts: Sequence[Any], copy: bool = True) -> None:
    """Queue one message. Never blocks. Raises zmq.Again if the queue is full, or another ZMQError.

    copy: copy the parts now, whatever their size."""
    for part in parts[:-1]:
        socket.send(part, _NOW_AND_MORE, copy)
    socket.send(parts[-1], _NOW, copy)


def readable(socket: Any) -> bool:
    """Whether a message can be received now. A fifth of the cost of catching zmq.Again."""
    return bool(zmq_poll(((socket, _POLLIN),), 0))  # `getsockopt` goes through enums


def receive(socket: Any) -> list[zmq.Frame]:
    """Return one message. The socket must be `readable`. Raises ZMQError."""
    frame = socket.recv(_NOW, False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(_NOW, False)
        frames.append(frame)
    return frames


def encode_list(items: Sequence[str | ExplainRecord]) -> bytes:
    """Payload of ABRT, BACK and EXPL."""
    return msgspec.msgpack.encode(list(items))


def decode_ids(data: Any) -> list[str]:
    """Raises BadMessage."""
    ids = decode(_bytes(data), list[str])
    if len(ids) > MAX_IDS:
        raise BadMessage(f"{len(ids)} request ids in one message (at most {MAX_IDS})")
    return ids


def request_id(frames: Frames) -> str:
    """Return the request id of an ADD payload. Raises BadMessage."""
    try:
        return str(_bytes(frames[0]), "utf-8")
    except (IndexError, ValueError) as exc:
        raise BadMessage("a request without an id in UTF-8") from exc


def holder_of(frames: Frames) -> PrefixHolder | None:
    """Return the hint of an ADD payload. Raises BadMessage."""
    hint = _bytes(frames[2])
    return decode(hint, PrefixHolder) if len(hint) else None


def decode_explain(data: Any) -> list[ExplainRecord]:
    """Raises BadMessage."""
    return decode(_bytes(data), list[ExplainRecord])


def fault_mark(fault: Fault) -> dict[str, Any] | None:
    """Return the `kv_transfer_params` of an EngineCoreOutput that ends a request with an error.

    They say whose fault it is: vLLM's struct has no other field for that, and an error has no KV to
    transfer."""
    return {"fault": Fault.OURS.value} if fault is Fault.OURS else None


def fault_of(output: Any) -> Fault | None:
    """Return whose fault it is that a decode worker did not take a request.

    output: the request's last EngineCoreOutput. Its `stop_reason` holds the reason. Returns None if
    it is no such error."""
    if output.finish_reason != ERROR or not isinstance(output.stop_reason, str):
        return None
    return Fault.OURS if output.kv_transfer_params == fault_mark(Fault.OURS) else Fault.REQUEST


def text_of(data: Any) -> str:
    """The reason of a NOPE, bounded and printable whatever the peer sent."""
    text = bytes(_bytes(data))[:2048].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text)


def _bytes(data: Any) -> bytes | bytearray | memoryview:
    return data.buffer if isinstance(data, zmq.Frame) else data


class FrontendCodec:
    """vLLM's codec as a frontend needs it. Imports vLLM. For one thread."""

    def __init__(self) -> None:
        from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._encode: Callable[[Any], Frames] = MsgpackEncoder().encode
        self._decode = MsgpackDecoder(EngineCoreOutputs).decode
        self._request_type = EngineCoreRequest

    def encode(self, obj: Any, holder: PrefixHolder | None = None) -> Frames:
        """Return the payload of ADD for an EngineCoreRequest, or of UTIL for a call.

        The request is not changed.

        holder: another decode worker that holds the prompt's prefix."""
        if not isinstance(obj, self._request_type):
            return self._encode(obj)
        # msgpack decodes a long list in one go and holds the GIL meanwhile: 6 ms for 128k token
        # ids.
        rest: Any = copy.copy(obj)
        if obj.prompt_token_ids:
            rest.prompt_token_ids = None
        tokens = u32.pack(obj.prompt_token_ids or ())
        hint = b"" if holder is None else encode(holder)
        return [obj.request_id.encode(), tokens, hint, *self._encode(rest)]

    def outputs(self, frames: Frames) -> Any:
        """EngineCoreOutputs of an OUT payload. Raises BadMessage."""
        try:
            return self._decode(frames)
        except Exception as exc:
            raise BadMessage(f"not EngineCoreOutputs: {exc}") from exc


class WorkerCodec:
    """vLLM's codec for a decode worker. Imports vLLM.

    One thread may call `encode` while another calls the other methods."""

    def __init__(self) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.encode: Callable[[Any], Frames] = MsgpackEncoder().encode
        self._request = MsgpackDecoder(EngineCoreRequest).decode
        self._generic = MsgpackDecoder().decode

    def request(self, frames: Frames) -> tuple[Any, memoryview]:
        """Decode an ADD payload. Returns the EngineCoreRequest without its prompt, and the prompt's
        token ids as u32. Raises BadMessage."""
        if len(frames) < 4:
            raise BadMessage("an ADD has at least four parts")
        try:
            request = self._request(frames[3:])
        except Exception as exc:
            raise BadMessage(f"not an EngineCoreRequest: {exc}") from exc
        tokens = memoryview(_bytes(frames[1]))
        fits = request.request_id == request_id(frames) and not request.prompt_token_ids
        if not fits or len(tokens) % 4:
            raise BadMessage("the parts of an ADD do not fit together")
        return request, tokens

    def utility(self, frames: Frames) -> tuple[int, str, list[Any]]:
        """(call_id, method, args) of a UTIL payload. Raises BadMessage."""
        try:
            call_id, method, args = self._generic(frames)
        except Exception as exc:
            raise BadMessage(f"not a utility call: {exc}") from exc
        if not (isinstance(call_id, int) and isinstance(method, str) and isinstance(args, list)):
            raise BadMessage("not a utility call: (call_id, method, args) expected")
        return call_id, method, args
