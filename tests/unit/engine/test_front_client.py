"""vLLM's side of the frontend: what it tells the dispatcher."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pullfill.engine import request_limits
from pullfill.engine.front_wire import DecodeWelcome, LoadReport
from tests.support.late import Late
from tests.support.said import blank

front_client: Any = Late("pullfill.engine.front_client")


def config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096), cache_config=SimpleNamespace(),
        watermark_config=None,
    )  # fmt: skip


def client_of(configured: Any = None, processor: Any = None, renderer: Any = None) -> Any:
    port: Any = SimpleNamespace(abort=lambda *_, **__: None)
    return front_client.DecodeClient(
        configured or config(), processor, renderer, lambda _: port, cast("Any", None)
    )


def welcome(name: str, max_model_len: int) -> DecodeWelcome:
    return blank(DecodeWelcome, decode_instance=name, max_model_len=max_model_len, num_gpu_blocks=9)


def test_prompts_are_limited_by_the_smallest_worker_that_is_there() -> None:
    configured = config()
    renderer, cached = SimpleNamespace(), "default_chat_tok_params"
    client = client_of(configured, renderer=renderer)
    seen = []
    for change in (
        lambda: client.joined(welcome("a", 4096)),
        lambda: client.joined(welcome("small", 512)),
        lambda: client.joined(welcome("b", 8192)),
        lambda: client.left("small"),
        lambda: client.left("a"),
        lambda: client.left("b"),
    ):
        setattr(renderer, cached, "of the limit before")
        before = configured.model_config.max_model_len
        change()
        seen.append(configured.model_config.max_model_len)
        assert hasattr(renderer, cached) is (seen[-1] == before)
    assert seen == [4096, 512, 512, 4096, 4096, 4096]


async def test_prompts_times_n_of_an_http_request_are_bounded_before_any_is_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "128")
    llm = front_client.FrontLLM.__new__(front_client.FrontLLM)
    request_limits.begin([])
    for number in range(1024):  # as many prompts as vLLM takes
        llm.generate("p", SimpleNamespace(n=1, output_kind=None), f"r-{number}")
    with pytest.raises(front_client.VLLMValidationError, match="more than 1024 answers"):
        llm.generate("p", SimpleNamespace(n=1, output_kind=None), "r-1024")
    request_limits.begin([])
    for number in range(8):
        llm.generate("p", SimpleNamespace(n=128, output_kind=None), f"s-{number}")
    with pytest.raises(front_client.VLLMValidationError, match="more than 1024 answers"):
        llm.generate("p", SimpleNamespace(n=2, output_kind=None), "s-8")


async def test_a_request_whose_adapter_was_unloaded_is_refused_and_not_sent() -> None:
    told: list[Any] = []
    states = {"r": SimpleNamespace(queue=SimpleNamespace(put=told.append), parent_req=None)}
    processor = SimpleNamespace(
        request_states=states, abort_requests=lambda ids, internal: [ids.pop(), states.clear()][:1]
    )
    client = client_of(processor=processor)
    request = SimpleNamespace(
        request_id="r", abort_immediately=False, sampling_params=None,
        lora_request=SimpleNamespace(lora_name="x"),
    )  # fmt: skip
    await client.add_request_async(request)
    refused = told[0].cause
    assert (refused.status_code, str(refused)) == (400, "LoRA adapter x was unloaded")


async def test_a_request_without_a_watermark_can_migrate() -> None:
    """vLLM 0.31 leaves its default True in all requests."""
    client, sent = client_of(), list[Any]()
    client.port.submit = sent.append
    params = SimpleNamespace(watermarking=True, extra_args=None)
    await client.add_request_async(
        SimpleNamespace(abort_immediately=False, sampling_params=params, lora_request=None)
    )
    assert not sent[0].sampling_params.watermarking


async def test_vllms_gauges_are_the_sum_of_the_workers_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_client, "LEVELS_S", 0.001)
    client = client_of(renderer=SimpleNamespace())

    async def told() -> tuple[int, int, float]:
        stats = (await asyncio.wait_for(client.get_output_async(), 5)).scheduler_stats
        return stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage

    def load(running: int, waiting: int, active: int) -> LoadReport:
        return LoadReport(
            running=running, waiting=waiting, uncached_tokens_queued=0, active_blocks=active,
            free_blocks=10 - active,
        )  # fmt: skip

    client.loaded("a", load(4, 3, 5))
    assert await told() == (4, 3, 0.5)
    stats: Any = front_client.SchedulerStats(num_running_reqs=9)
    client.loaded("b", load(1, 2, 1))
    client.outputs("b", SimpleNamespace(scheduler_stats=stats))
    assert await told() == (5, 5, 0.3), "also with what a step has counted"
    assert await told() == (5, 5, 0.3)
    client.left("a")
    assert await told() == (1, 2, 0.1)
    client.left("b")
    assert await told() == (0, 0, 0.0)
    client.left("never said anything")
    await asyncio.sleep(0.01)
    assert client._queue.empty()
