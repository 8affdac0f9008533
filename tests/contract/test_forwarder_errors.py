"""What real servers do on errors, as scripts: found with vLLM 0.32 and its NixlConnector."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.forward_rig import forwarding, until


@pytest.mark.parametrize("stream", [True, False])
async def test_kv_that_cannot_be_read_is_tried_once_more_then_explained(stream: bool) -> None:
    async with forwarding() as rig:
        rig.decode[0].refuse, rig.decode[0].late = (500, "Internal server error"), True
        got = await rig.ask(stream=stream)
        assert (got.status, len(rig.decode[0].requests)) == (500, 2)
    assert "answers 500: Internal server error" in got.message
    assert "could not read the KV of http://127.0.0.1" in got.message
    assert "at 127.0.0.1:5600" in got.message


async def test_an_engine_that_ends_at_the_parameters_is_explained() -> None:
    async with forwarding() as rig:
        rig.decode[0].refuse = (500, "EngineCore encountered an issue.")
        got = await rig.ask()
    assert "EngineCore encountered an issue. If it has another connector, start it" in got.message


async def test_the_error_of_a_server_that_then_ends_is_the_one_that_is_told() -> None:
    async with forwarding() as rig:
        decode = rig.decode[0]
        decode.refuse, decode.breaks = (500, "EngineCore encountered an issue."), 0
        answer = decode._answer

        async def once(*request: Any) -> Any:
            if len(decode.requests) == 2:
                decode.refuse = None
            return await answer(*request)

        decode._answer = once  # type: ignore[method-assign]
        got = await rig.ask()
        assert len(decode.requests) == 2
    assert got.status == 500
    assert "EngineCore encountered an issue. If it has another connector, start it" in got.message


async def test_a_stream_that_begins_with_an_error_goes_to_another_pair() -> None:
    async with forwarding(prefill=2, decode=2) as rig:
        rig.decode[0].refuse, rig.decode[0].late = (500, "Internal server error"), True
        for _ in range(2):
            got = await rig.ask(stream=True)
            assert got.status == 200
            assert b"error" not in got.body
        failed = [headers["x-request-id"] for _, headers, _ in rig.decode[0].requests]
        assert failed
        for server in rig.prefill:
            assert set(failed) <= {headers["x-request-id"] for _, headers, _ in server.requests}


async def test_kv_that_cannot_be_read_and_then_a_server_that_breaks_off_is_one_fault() -> None:
    """So a prefill server ends: the KV that it has made is lost, then it answers nobody."""
    async with forwarding(prefill=2, decode=2, look_s=1.0) as rig:
        rig.decode[0].refuse = (500, "Internal server error")
        rig.prefill[1].breaks = 0
        for _ in range(2):
            got = await rig.ask()
            assert got.status == 200, got.message


@pytest.mark.parametrize("fields", [{}, {"stop_token_ids": [7]}])
async def test_a_prompt_whose_answer_is_empty_gets_it(fields: dict[str, Any]) -> None:
    """The prefill server seems to have no connector, if its one token ends the answer."""
    async with forwarding() as rig:
        rig.prefill[0].ends = True
        assert (await rig.ask(**fields)).status == 200
        ((_, _, second),) = rig.decode[0].requests
        assert rig.decode[0].remote == 1
    assert "ignore_eos" not in second
    assert second.get("stop_token_ids") == fields.get("stop_token_ids")


async def test_a_decode_server_that_waits_for_kv_too_long_names_where_it_should_come_from() -> None:
    async with forwarding("batch", "mooncake", "serial", silence_s=0.2) as rig:
        rig.decode[0].stalls = asyncio.Event()
        got = await rig.ask(stream=True)
    assert got.status == 504
    where = f"{rig.prefill[0].url} at {rig.prefill[0].kv}"
    assert got.message.endswith(f"it waits for KV, look whether it reaches {where}")


async def test_a_prefill_without_its_place_never_reaches_a_decode_server() -> None:
    async with forwarding() as rig:
        rig.prefill[0].leaves_out = "remote_block_ids"
        got = await rig.ask()
        assert got.status == 500
        assert "without remote_block_ids" in got.message
        assert not rig.decode[0].requests


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
        assert record is not None
        assert record.reason == "no_kv"
        assert len(rig.servers.ready("prefill")) == 1


async def test_servers_of_releases_that_send_no_remote_request_id() -> None:
    async with forwarding() as rig:
        rig.prefill[0].leaves_out = "remote_request_id"
        assert (await rig.ask()).status == 200
        assert rig.decode[0].remote == 1


@pytest.mark.parametrize("code", ["utf-8", "utf-16"])
async def test_parameters_in_a_body_that_only_vllm_can_read_are_dropped(code: str) -> None:
    text = '{"prompt":"x","odd":NaN,"kv_transfer_params":{"do_remote_prefill":true}}'
    async with forwarding() as rig:
        await rig.ask(text.encode(code))
        ((_, _, body),) = rig.decode[0].requests
    assert json.dumps(body) == '{"prompt": "x", "odd": NaN}'


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_server_waits_no_longer_for_the_kv_of_a_server_that_is_lost(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill server that hangs keeps its connections open. vLLM would wait for ever."""
    async with forwarding() as rig:
        prefill, decode = rig.prefill[0], rig.decode[0]
        decode.stalls = asyncio.Event()
        asking = asyncio.create_task(rig.ask(stream=stream))
        await until(lambda: decode.open)
        prefill.alive = False
        await rig.states(failing=1)
        await asyncio.sleep(0.2)
        assert (len(decode.requests), decode.left) == (1, 0), "it has the KV, and computes"
        decode.metrics = "vllm:num_requests_waiting{} 1.0\n"
        await until(lambda: decode.left)
        decode.stalls.set()
        assert (await asking).status == 200
        assert "kv_transfer_params" not in decode.requests[-1][2], "it computes the prompt itself"
