"""The promises of `frontend/forward/layer.py`, for each forwarder and protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from pullfill.frontend.admission import Admission
from pullfill.frontend.forward import sources
from pullfill.frontend.forward.sources import Heartbeats, bind_heartbeats
from pullfill.wire import DecodePolicy
from tests.support.asgi import Client
from tests.support.frontend_rig import PATIENCE_S, ForwardRig, events, forwarding
from tests.support.waiting import soon

STOCK = [
    ("staged", "nixl"),
    ("staged", "mooncake"),
    ("parallel", "mooncake"),
    ("staged", "p2p"),
    ("parallel", "p2p"),
]
ALONE = [how for how in STOCK if how[1] != "p2p"]
"""Those whose decode servers can serve a request without a prefill."""
each_alone = pytest.mark.parametrize("how", ALONE, ids="-".join)
each_stock = pytest.mark.parametrize("how", STOCK, ids="-".join)


def streamed(request_id: str = "r1", **fields: Any) -> bytes:
    return b"".join(events(request_id, fields))


ID = [(b"x-request-id", b"r1")]


@each_stock
async def test_an_answer_comes_whole_and_a_stream_unchanged(how: Any) -> None:
    async with forwarding(*how) as rig:
        got = await rig.ask(headers=ID)
        assert (got.status, got.whole) == (200, True)
        assert got.json["choices"][0]["text"] == " 0é 1é 2é 3é"
        got = await rig.ask(headers=ID, stream=True, max_tokens=7)
        body = got.body
    assert got.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    if how[1] == "p2p":  # its ids carry addresses
        first = json.loads(body.partition(b"\n")[0][6:])["id"].removeprefix("cmpl-")
        assert body == streamed(first, max_tokens=7)
    else:
        assert body == streamed(max_tokens=7)


@each_stock
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_all_it_has_opened(how: Any, stream: bool) -> None:
    async with forwarding(*how) as rig:
        for fake in rig.all:
            fake.stalls = asyncio.Event()
        asked = rig.begin(stream=stream)
        await soon(lambda: any(f.open for f in rig.all))
        asked.leave()
        assert not (await asked.ended()).parts
        await rig.idle()


@each_stock
async def test_the_decode_server_gets_what_the_prefill_server_has_computed(how: Any) -> None:
    """The prefill server is asked for one token, the decode server for as many as the client."""
    kept = {"model": "m", "prompt": "hello", "temperature": 0.5, "tools": [1], "seed": 5}
    sent = kept | {
        "max_tokens": 3, "max_completion_tokens": 3, "stream": True, "min_tokens": 3,
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
        "stop": "x", "stop_token_ids": [1],
    }  # fmt: skip
    async with forwarding(*how) as rig:
        await rig.ask(sent | {"kv_transfer_params": {"mine": 1}})
        ((_, _, first),) = rig.prefill[0].requests
        ((_, _, second),) = rig.decode[0].requests
        assert rig.decode[0].remote == 1
    assert first.pop("kv_transfer_params")["do_remote_decode"] is True
    one = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "ignore_eos": True}
    assert first == kept | one
    told = second.pop("kv_transfer_params")
    assert (told["do_remote_prefill"], "mine" in told) == (True, False)
    assert second == sent


@each_stock
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", ["breaks", "refuses", "full"])
@pytest.mark.essential
async def test_a_failed_stage_is_repeated_at_another_server(
    how: Any, role: str, fault: str
) -> None:
    async with forwarding(*how, prefill=2, decode=2) as rig:
        bad = getattr(rig, role)[0]
        if fault == "breaks":
            bad.breaks = 0
        else:
            bad.refuse = (500, "boom") if fault == "refuses" else (503, "full")
        for number in range(4):
            got = await rig.ask(stream=bool(number % 2), prompt=f"hello {number}")
            assert got.status == 200, got.body
            assert b"boom" not in got.body
            assert b" 3" in got.body
        assert bad.requests, "the fault was never met"


@each_stock
async def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_repeated(how: Any) -> None:
    async with forwarding(*how, decode=2) as rig:
        for fake in rig.decode:
            fake.breaks = 2
        got = await rig.ask(stream=True)
        assert sum(len(f.requests) for f in rig.decode) == 1
    parts = got.body.split(b"\n\n")
    assert [b'"text"' in part for part in parts] == [True, True, False, False, False]
    error = json.loads(parts[2][6:])["error"]
    assert "broke off" in error["message"]
    assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503), "as in a body"
    assert parts[3] == b"data: [DONE]"
    assert got.whole


@each_stock
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_silent_server_is_an_error_not_a_hang(how: Any, role: str) -> None:
    async with forwarding(*how, silence_s=0.2) as rig:
        for fake in getattr(rig, role):
            fake.stalls = asyncio.Event()
        got = await rig.ask(stream=True)
        assert got.status == 504
        assert got.json["error"]["code"] == 504
        assert "sent nothing for 0.2 s" in got.message


@each_stock
async def test_a_frontend_that_leaves_tells_all_its_clients(how: Any) -> None:
    async with forwarding(*how) as rig:
        rig.decode[0].stops = True
        got = rig.begin(headers=ID, stream=True)
        await soon(lambda: got.parts)
        assert len(got.parts) == 1, "each event comes at once"
        rig.servers.fail_all("this frontend stops")
        await got.ended()
        assert b"this frontend stops" in got.parts[-1]
        assert got.parts[-1].startswith(b'data: {"error"')
        assert got.body.endswith(b"data: [DONE]\n\n")
        assert (await rig.ask()).status == 503


@each_stock
@pytest.mark.parametrize("says", [(400, "max_tokens is wrong"), (429, "too many")])
async def test_a_refusal_has_the_words_of_the_server(how: Any, says: tuple[int, str]) -> None:
    async with forwarding(*how, prefill=2, decode=2) as rig:
        for fake in rig.all:
            fake.refuse = says
        got = await rig.ask()
        assert (got.status, got.message) == says
        assert says[0] == 429 or sum(len(fake.requests) for fake in rig.prefill) == 1
        assert (await rig.ask(b"{")).status == 400


@each_alone
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "choices"),
        ({"prompt": ["a", "b"]}, "prompts"),
        ({"prompt": [[1], [2]]}, "prompts"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
    ],
)
async def test_what_one_prefill_cannot_stand_for_has_none(
    how: Any, fields: dict[str, Any], reason: str
) -> None:
    async with forwarding(*how) as rig:
        got = await rig.ask(**fields)
        record = rig.requests.get(got.json["id"])
        assert record.reason == reason
        assert not rig.prefill[0].requests


@pytest.mark.parametrize("how", ["staged", "parallel"])
async def test_a_request_that_can_have_no_prefill_is_refused_if_decode_servers_need_one(
    how: str,
) -> None:
    """P2pNcclConnector would wait for its KV without end, with all of the engine."""
    async with forwarding(how, "p2p") as rig:
        got = await rig.ask(n=2)
        assert got.status == 400
        assert (
            "need a prefill for each request, and this one can have none (choices)" in got.message
        )
        assert (await rig.ask(b"{")).status == 400
        assert not rig.decode[0].requests
        rig.prefill[0].alive = False
        await rig.states(failing=1)
        got = await rig.ask()
        assert (got.status, rig.stock.trouble()) == (503, got.message)
        assert f"no stock prefill server is ready: {rig.prefill[0].url} is failing" in got.message
        assert not rig.decode[0].requests


async def test_a_stream_of_messages_that_breaks_off_ends_as_anthropic_clients_expect() -> None:
    async with forwarding() as rig:
        rig.decode[0].breaks = 1
        got = await rig.ask(path="/v1/messages", stream=True)
    kind, told = got.body.split(b"\n\n")[1].split(b"\n")
    assert kind == b"event: error"
    assert "broke off" in json.loads(told[6:])["error"]["message"]


@pytest.mark.parametrize(
    ("lack", "told"),
    [
        ({"connector": ""}, "returned no kv_transfer_params: start it with --kv-transfer-config"),
        ({"leaves_out": "remote_block_ids"}, "without remote_block_ids"),
    ],
)
async def test_a_prefill_without_its_place_never_reaches_a_decode_server(
    lack: dict[str, str], told: str
) -> None:
    async with forwarding() as rig:
        vars(rig.prefill[0]).update(lack)
        got = await rig.ask()
        assert got.status == 500
        assert rig.prefill[0].url in got.message
        assert told in got.message
        again = await rig.ask()
        assert again.status == 503
        assert told in again.message
        assert len(rig.prefill[0].requests) == 1
        assert not rig.decode[0].requests


# ------------------------------------------- errors of vLLM 0.32 with its NixlConnector, as scripts


@pytest.mark.parametrize("stream", [True, False])
async def test_kv_that_cannot_be_read_is_tried_once_more_then_explained(stream: bool) -> None:
    async with forwarding() as rig:
        rig.decode[0].refuse, rig.decode[0].late = (500, "Internal server error"), True
        got = await rig.ask(stream=stream)
        assert (got.status, len(rig.decode[0].requests)) == (500, 2)
    assert "answers 500: Internal server error" in got.message
    assert "look whether it reaches http://127.0.0.1" in got.message
    assert "at 127.0.0.1:5600; if it has another connector, start it with --kv" in got.message


@pytest.mark.parametrize("blocks", [[], [[]]])
async def test_a_prompt_without_a_whole_block_is_computed_by_the_decode_server(
    blocks: object,
) -> None:
    """Older releases hand over whole blocks only. Later ones end at parameters without any."""
    async with forwarding() as rig:
        rig.prefill[0].blocks = blocks
        got = await rig.ask()
        assert got.status == 200
        assert "kv_transfer_params" not in rig.decode[0].requests[0][2]
        record = rig.requests.get(got.json["id"])
        assert record.reason == "no_kv"
        assert len(rig.servers.ready("prefill")) == 1


@pytest.mark.parametrize("code", ["utf-8", "utf-16"])
@pytest.mark.parametrize("odd", ["[NaN, -Infinity, 1e999]", r'["half a pair: \ud800", NaN]'])
async def test_parameters_in_a_body_that_only_vllm_can_read_are_dropped(
    code: str, odd: str
) -> None:
    text = f'{{"prompt":"x","odd":{odd},"kv_transfer_params":{{"do_remote_prefill":true}}}}'
    async with forwarding() as rig:
        await rig.ask(text.encode(code))
        ((_, _, body),) = rig.decode[0].requests
    assert body.pop("kv_transfer_params")["remote_engine_id"] == "e", "not the client's"
    assert json.dumps(body.pop("odd")) == odd.replace("1e999", "Infinity")
    assert body == {"prompt": "x"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_server_waits_no_longer_for_the_kv_of_a_server_that_is_lost(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill server that hangs keeps its connections open. vLLM would wait for ever."""
    async with forwarding() as rig:
        prefill, decode = rig.prefill[0], rig.decode[0]
        decode.stalls = asyncio.Event()
        asked = rig.begin(stream=stream)
        await soon(lambda: decode.open)
        prefill.alive = False
        await rig.states(failing=1)
        await asyncio.sleep(0.2)
        assert (len(decode.requests), decode.left) == (1, 0), "it has the KV, and computes"
        decode.metrics = "vllm:num_requests_waiting{} 1.0\n"
        await soon(lambda: decode.left)
        decode.stalls.set()
        assert (await asked.ended()).status == 200
        assert "kv_transfer_params" not in decode.requests[-1][2], "it computes the prompt itself"


# ---------------------------------------------------- servers that cannot be used, and their load


ASKED = """\
vllm:request_success_total{finished_reason="abort",model_name="m"} 5.0
vllm:request_success_total{finished_reason="length",model_name="m"} %s
vllm:prefix_cache_queries_total{model_name="m"} %s
vllm:external_prefix_cache_queries_total{model_name="m"} %s
"""
"""Requests that were served, tokens looked up in the cache, and asked for at a connector."""


NO_MODELS = "its /v1/models lists no models as vLLM does"
SILENT = "nobody answers at its KV address 127.0.0.1:1 ("


@pytest.mark.parametrize(
    ("protocol", "role", "wrong", "told"),
    [
        ("nixl", "decode", {"models": None}, NO_MODELS),
        ("nixl", "decode", {"models": [5]}, NO_MODELS),
        ("nixl", "decode", {"models": [{"id": ["m"]}]}, NO_MODELS),
        ("nixl", "decode", {"models": [{"id": "m", "root": "/other"}]}, "serves /other as m, and"),
        ("nixl", "decode", {"models": [{"id": "other"}]}, "start it with --served-model-name m"),
        ("nixl", "decode", {"key": "secret"}, "the same one as [frontend] stock_key_file"),
        ("p2p", "prefill", {"kv": ""}, "register it with its KV address"),
        ("p2p", "prefill", {"kv": "127.0.0.1:1"}, SILENT),
        (
            "p2p", "decode", {"kv": "host:127.0.0.1,handshake:1,notify:2"},
            "nobody answers at its KV address host:127.0.0.1,handshake:1,notify:2 (",
        ),
        (
            "p2p", "decode", {"kv": "host:127.0.0.1,handshake:8998"},
            "cannot read its KV address 'host:127.0.0.1,handshake:8998': register it with HOST:P",
        ),
        ("p2p", "prefill", {"kv": "127.0.0.1"}, "'127.0.0.1': register it with HOST:PORT"),
        ("mooncake", "prefill", {"kv": ""}, "register it with its bootstrap address"),
        ("mooncake", "prefill", {"kv": "127.0.0.1:1"}, SILENT),
        ("mooncake", "prefill", {"kv": "HERE/health"}, "is no Mooncake bootstrap service: regis"),
    ],
)  # fmt: skip
async def test_a_server_that_does_not_fit_is_refused_until_it_does(
    protocol: str, role: str, wrong: dict[str, Any], told: str
) -> None:
    async with forwarding("staged", protocol, known=False) as rig:
        fake = (rig.prefill if role == "prefill" else rig.decode)[0]
        kv = wrong.get("kv", fake.kv).replace("HERE", fake.kv)
        changed = {name: value for name, value in wrong.items() if name != "kv"}
        good = {name: getattr(fake, name) for name in changed}
        vars(fake).update(changed)
        rig.servers.set([sources.make(role, fake.url, kv)])
        await rig.states(refused=1)
        (line,) = rig.servers.troubles()
        assert told in line
        assert (await rig.ask()).status == 503
        vars(fake).update(good)
        rig.servers.set([sources.make(role, fake.url, fake.kv)])
        await rig.states(ready=1)


async def test_a_server_that_is_taken_out_ends_its_requests_and_gets_no_more() -> None:
    async with forwarding(decode=2) as rig:
        first, second = rig.decode
        first.stalls, second.stalls = asyncio.Event(), asyncio.Event()
        asked = [rig.begin(prompt=f"p{n}") for n in range(2)]
        await soon(lambda: first.open and second.open)
        rig.servers.set(list(rig.servers.known)[:-1])
        await rig.states(ready=2)
        first.stalls.set()
        second.stalls.set()
        assert [(await got.ended()).status for got in asked] == [200, 200]
        assert (await rig.ask()).status == (await rig.ask()).status == 200
        assert [len(fake.requests) for fake in rig.decode] == [3, 1]
        assert second.left == 0


@pytest.mark.essential
async def test_servers_get_only_those_headers_of_a_client_that_vllm_reads() -> None:
    secret = [
        b"authorization", b"x-api-key", b"api-key", b"cookie", b"proxy-authorization", b"forwarded",
        b"x-forwarded-for", b"x-forwarded-access-token", b"x-amzn-oidc-data", b"x-pullfill-proof",
    ]  # fmt: skip
    wanted = {"traceparent": "00-1-2-01", "x-session-id": "s", "x-vllm-priority": "-1"}
    sent = [(name, b"secret") for name in secret]
    wanted["x-request-id"] = "r1"
    sent += [(name.encode(), value.encode()) for name, value in wanted.items()]
    async with forwarding(key="ours", wait=False) as rig:
        for fake in rig.all:
            fake.key = "ours"
        await rig.states(ready=2)
        assert (await rig.ask(headers=sent)).status == 200
        for fake in rig.all:
            ((_, headers, _),) = fake.requests
            assert wanted.items() <= headers.items()
            assert headers["authorization"] == "Bearer ours"
            assert "secret" not in headers.values()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["staged", "parallel"])
async def test_a_decode_server_waits_no_longer_for_a_prefill_server_without_a_connector(
    how: str, stream: bool
) -> None:
    """P2pNcclConnector returns nothing that would show it before, and waits without end."""
    async with forwarding(how, "p2p") as rig:
        prefill, decode = rig.prefill[0], rig.decode[0]
        prefill.connector = ""
        got = rig.begin(stream=stream)
        await soon(lambda: decode.open and prefill.requests)
        prefill.metrics = ASKED % ("1.0", "64.0", "0.0")
        await got.ended()
        assert got.status == 503
        assert f"decode server {decode.url} waits for KV, and prefill server" in got.message
        assert f"{prefill.url} is refused: it has no KV connector" in got.message
        assert "start it with --kv-transfer-config" in got.message


async def test_a_server_that_broke_off_gets_no_request_until_its_health_is_good() -> None:
    async with forwarding(decode=2, look_s=60.0) as rig:
        rig.decode[0].breaks = 0
        for number in range(4):
            assert (await rig.ask(prompt=f"p{number}")).status == 200
        assert len(rig.decode[0].requests) == 1
        await rig.states(failing=1)


SERVES = [
    ASKED % ("1.0", "64.0", "8.0"),
    ASKED % ("0.0", "64.0", "0.0"),  # its first request may still wait for blocks
    ASKED % ("1.0", "0.0", "0.0"),  # it has no prefix cache, so vLLM counts neither
    (ASKED % ("1.0", "64.0", "0.0")).replace("external_", "other_"),
]


@pytest.mark.parametrize("metrics", SERVES)
@pytest.mark.essential
async def test_a_server_without_a_connector_is_refused_until_it_is_started_with_one(
    metrics: str,
) -> None:
    async with forwarding() as rig:
        decode = rig.decode[0]
        decode.metrics = ASKED % ("1.0", "64.0", "0.0")
        await rig.states(refused=1)
        (line,) = rig.servers.troubles()
        assert f"stock decode server {decode.url} is refused: it has no KV connector" in line
        assert "--kv-transfer-config" in line
        assert "NixlConnector" in line
        got = await rig.ask()
        told = line.removeprefix("stock decode server ")
        assert (got.status, got.message) == (503, f"no stock decode server is ready: {told}")
        decode.metrics = metrics
        await rig.states(ready=2)
        assert (await rig.ask()).status == 200


async def test_a_server_whose_metrics_nobody_may_read_serves() -> None:
    """A gateway in front of the server may not let anybody read them."""
    async with forwarding(wait=False) as rig:
        for server in rig.all:
            server.metrics_status = 401
        await rig.states(ready=2)
        assert (await rig.ask()).status == 200
        await asyncio.sleep(0.1)
        await rig.states(ready=2)


# ---------------------------------------------------------------------------
# Mixed fleets: which share stock servers get, and which of them by each policy.


async def stock_of(rig: ForwardRig, requests: int) -> int:
    """How many of so many requests the stock servers get. The others get an answer, too."""
    before = len(rig.decode[0].requests), rig.app.requests
    for _ in range(requests):
        assert (await rig.ask()).status == 200
    stock, pull = len(rig.decode[0].requests) - before[0], rig.app.requests - before[1]
    assert stock + pull == requests
    return stock


@pytest.mark.essential
async def test_a_fleet_is_moved_over_in_steps_and_back() -> None:
    async with forwarding() as rig:
        rig.workers = True
        steps = (0.0, 0.25, 0.5, 0.75, 1.0)
        for share in (*steps, *reversed(steps)):
            rig.share = share
            # A share that was due before the step may come after it.
            assert await stock_of(rig, 20) == pytest.approx(20 * share, abs=1)
        rig.share = 0.1
        assert await stock_of(rig, 40) == pytest.approx(4, abs=1)


async def test_a_side_that_can_take_no_request_leaves_all_to_the_other() -> None:
    async with forwarding() as rig:
        rig.workers, rig.share = True, 0.5
        rig.decode[0].alive = False
        await rig.states(failing=1)
        assert await stock_of(rig, 4) == 0
        rig.decode[0].alive = True
        await rig.states(ready=2)
        rig.workers = False
        assert await stock_of(rig, 4) == 4
        rig.share = 0.0
        assert await stock_of(rig, 4) == 4
        rig.workers = True
        assert await stock_of(rig, 4) == 0


async def test_requests_wait_a_moment_for_a_server_that_comes_back() -> None:
    async with forwarding() as rig:
        rig.decode[0].alive = False
        await rig.states(failing=1)
        gate = Admission(rig.layer, rig.layer.trouble, 9, wait_s=0.1)
        refused = await Client(gate).say().ended()
        assert (refused.status, refused.message) == (503, rig.stock.trouble())
        gate.wait_s = PATIENCE_S
        waiting = Client(gate).say()
        await asyncio.sleep(0.1)
        assert not waiting.sent
        rig.decode[0].alive = True
        assert (await waiting.ended()).status == 200


async def test_decode_workers_get_what_stock_servers_cannot_serve() -> None:
    async with forwarding("staged", "p2p") as rig:
        rig.workers = True
        assert (await rig.ask(n=2)).status == 200
        assert (rig.app.requests, len(rig.decode[0].requests)) == (1, 0)
        assert (await rig.ask()).status == 200
        assert (rig.app.requests, len(rig.decode[0].requests)) == (1, 1)


@pytest.mark.parametrize("how", [("staged", "nixl"), ("parallel", "p2p")])
@pytest.mark.parametrize("policy", [DecodePolicy.LEAST_LOADED, DecodePolicy.KV])
async def test_servers_are_chosen_by_load_or_prefix(
    policy: DecodePolicy, how: tuple[str, str]
) -> None:
    async with forwarding(*how, prefill=2, decode=2) as rig:
        rig.policy = policy
        if policy is DecodePolicy.LEAST_LOADED:
            for fake in (rig.prefill[0], rig.decode[0]):
                waiting = 'vllm:num_requests_waiting{engine="%s"} %s\n'
                fake.metrics = waiting % (0, 20.0) + waiting % (1, 30.0)
            loads = rig.servers.known.values()
            await soon(lambda: sum(bool(s.load and s.load.waiting == 50) for s in loads) == 2)
        # Three conversations take turns.
        for turn in range(8):
            for talk in "abc":
                assert (await rig.ask(prompt=f"{talk} " * 400 + "more " * turn)).status == 200
        for fakes in (rig.prefill, rig.decode):
            busy, other = ({b["prompt"][0] for _, _, b in fake.requests} for fake in fakes)
            if policy is DecodePolicy.LEAST_LOADED:
                assert not busy
            else:
                assert not busy & other, "away from its prefix"
                assert busy | other == {*"abc"}
                assert min(busy, other)


# ---------------------------------------------------------------------------
# Stock servers that send heartbeats to a frontend, over a real ZMQ socket.


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.essential
async def test_servers_that_send_heartbeats_over_zmq_serve_until_they_are_silent() -> None:
    dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)  # as connectors have one

    async def beats() -> None:
        while True:
            for role, fake in (("P", rig.prefill[0]), ("D", rig.decode[0])):
                said = {"type": role, "http_address": fake.kv, "zmq_address": fake.kv, "tp_size": 1}
                await dealer.send(msgspec.msgpack.encode(said))
            await asyncio.sleep(0.1)

    async with forwarding("staged", "p2p", known=False) as rig:
        socket = bind_heartbeats("tcp://127.0.0.1:*", ())
        heard = Heartbeats(socket, (), rig.servers.set, 1.0)
        dealer.connect(heard.url)
        async with running(heard.run()):
            for odd in (b"\xc1", b"", b"x" * 4000, msgspec.msgpack.encode(["P"])):
                await dealer.send(odd)
            async with running(beats()):
                await rig.states(ready=2)
                assert (await rig.ask()).status == 200
            await soon(lambda: not rig.servers.known)
            assert "no stock decode server is known" in rig.layer.trouble()
            await dealer.send(b"x" * 5000)  # ends its connection. A DEALER connects again by itself
            async with running(beats()):
                await rig.states(ready=2)
        dealer.close(linger=0)
        socket.close()
