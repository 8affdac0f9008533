"""The promises of `frontend/forward/layer.py`, for each forwarder and protocol."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.frontend_rig import events, forwarding
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
    async with forwarding(*how) as rig:
        await rig.ask(max_tokens=3, temperature=0.5, kv_transfer_params={"mine": 1})
        ((_, _, first),) = rig.prefill[0].requests
        ((_, _, second),) = rig.decode[0].requests
        assert rig.decode[0].remote == 1
    assert first["max_tokens"] == 1
    assert second["max_tokens"] == 3
    assert first["temperature"] == second["temperature"] == 0.5
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["kv_transfer_params"]["do_remote_prefill"] is True
    assert "mine" not in second["kv_transfer_params"]


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
