"""What a client sees of a request that killed decode workers: the real frontend, fake workers."""

from __future__ import annotations

import asyncio

from pullfill.config import ClusterRef
from pullfill.deploy import operate
from tests.support.fake_decode import FakeDecode
from tests.support.frontend_http import Served, workers


async def test_a_client_gets_400_and_status_shows_the_suspect(served: Served) -> None:
    prompt = {"model": "m", "prompt": [66, 67, 68], "max_tokens": 4, "temperature": 0}
    fakes = [
        FakeDecode(f"decode-{i}", model="m", max_model_len=512, fatal_token=66) for i in range(3)
    ]
    async with workers(served, *fakes) as http:
        first = await http.post("/v1/completions", json=prompt)
        assert first.status_code == 400
        assert "2 decode workers died" in first.json()["error"]["message"]
        (row,) = (await http.get("/pullfill/status")).json()["suspects"]
        assert (row["state"], row["deaths"], row["prompt_tokens"]) == ("refused", 2, 3)
        again = await http.post("/v1/completions", json={**prompt, "user": "me"})
        assert again.status_code == 400
        assert row["fingerprint"] in again.json()["error"]["message"]
        async with http.stream("POST", "/v1/completions", json={**prompt, "stream": True}) as reply:
            text = "".join([chunk async for chunk in reply.aiter_text()])
        assert "are refused for another" in text
        good = await http.post("/v1/completions", json={**prompt, "prompt": [70, 71]})
        assert good.status_code == 200
        assert sum(bool(fake.killed_by) for fake in fakes) == 2
        ref = ClusterRef("t", served.etcd.url, "nats://127.0.0.1:1")
        await asyncio.to_thread(operate.clear_suspects, ref, row["fingerprint"])
        async with asyncio.timeout(15):
            while (await http.get("/pullfill/status")).json()["suspects"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
