"""Admission: what passes, what is refused and how, and that every slot comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pullfill.frontend import admission as gates
from pullfill.frontend.admission import MOST_COMMAS, MOST_VALUES, Admission, why_too_much
from tests.support.asgi import Client


class App:
    """Reads the request, waits for `go`, answers; notices a client that leaves, as Starlette."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.bodies: list[bytes] = []
        self.fail = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            body, more = b"", True
            while more:
                message = await receive()
                body += message["body"]
                more = message["more_body"]
            self.bodies.append(body)
            done = asyncio.ensure_future(self.go.wait())
            gone = asyncio.ensure_future(receive())
            await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            gone.cancel()
            if self.fail:
                raise RuntimeError("the app broke")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def served(body: bytes) -> Client:
    """A request with this body, answered by an app that takes each, or refused before."""
    app = App()
    app.go.set()
    client = await Client(Admission(app, str, 1)).say(body).ended()
    assert (client.status == 200) is bool(app.bodies)
    return client


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.essential
async def test_beyond_the_limit_is_429_until_one_has_ended() -> None:
    app = App()
    gate = Admission(app, str, 2)
    inside = [Client(gate).say() for _ in range(2)]
    await settle()
    assert gate.in_flight == 2
    refused = await Client(gate).say().ended()
    assert refused.status == 429
    assert refused.headers[b"retry-after"] == b"1"
    assert refused.json["error"]["type"] == "RateLimitError"
    assert "--max-inflight" in refused.message
    look = await Client(gate, "/metrics", "GET").ended()
    assert look.status == 200, "what needs no engine always passes"
    inside[0].leave()
    await settle()
    assert gate.in_flight == 1, "a client that goes away frees its slot"
    app.go.set()
    last = Client(gate).say()
    await asyncio.gather(inside[1].task, last.task)
    assert (last.status, gate.in_flight) == (200, 0)


async def test_every_way_out_frees_the_slot() -> None:
    app = App()
    gate = Admission(app, str, 1)
    app.fail = True
    broken = Client(gate).say()
    await settle()
    broken.leave()
    with pytest.raises(RuntimeError):
        await broken.task
    cancelled = Client(gate).say()
    await settle()
    cancelled.task.cancel()
    await asyncio.gather(cancelled.task, return_exceptions=True)
    lonely = Admission(app, lambda: "nobody", 1, wait_s=0.01)
    nobody = await Client(lonely).say().ended()
    assert (nobody.status, nobody.headers[b"retry-after"]) == (503, b"1")
    assert (nobody.message, lonely.in_flight) == ("nobody", 0)
    early = Client(gate).say(b"{", more=True)
    early.leave()
    await early.task
    assert early.sent == []
    assert gate.in_flight == 0


async def test_all_bodies_together_are_bounded_until_their_answers_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "ALL_BYTES", 8)
    app = App()
    gate = Admission(app, str, 9)
    served = Client(gate).say(b"1234")
    read = Client(gate).say(b"1234", more=True)
    await settle()
    refused = await Client(gate).say(b"5", more=True).ended()
    assert (refused.status, refused.headers[b"retry-after"]) == (429, b"1")
    read.leave()
    await read.task
    app.go.set()
    await served.task
    last = await Client(gate).say(b"12345678").ended()
    assert (served.status, last.status, gate.in_flight) == (200, 200, 0)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_what_needs_the_tokenizer_is_bounded_too_but_needs_no_worker(path: str) -> None:
    app = App()
    app.go.set()
    gate = Admission(app, lambda: "nobody", 1)
    assert (await Client(gate, path).say().ended()).status == 200
    first = Client(gate, path).say(b"{", more=True)
    await settle()
    assert (await Client(gate, path).ended()).status == 429
    first.leave()
    await first.task
    assert gate.in_flight == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/api/v1/completions"])
async def test_a_root_path_is_no_way_around(path: str) -> None:
    app = App()
    gate = Admission(app, str, 0)
    refused = await Client(gate, path, root_path="/api").ended()
    assert refused.status == 429


async def test_a_body_that_would_be_checked_for_seconds_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it comes, and whatever it is said to be. All streams would wait."""
    monkeypatch.setattr(gates, "MOST_VALUES", 4)
    app = App()
    gate = Admission(app, str, 2)
    client = Client(gate, headers=[(b"content-type", b"multipart/form-data")])
    client.say(b'{"messages": [1, 1,', more=True).say(b"1, 1]}")
    await client.task
    assert (client.status, app.bodies) == (413, [])
    assert "send it in parts" in client.message


@pytest.mark.essential
async def test_a_body_that_never_ends_is_408_and_one_too_large_413(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App()
    gate = Admission(app, str, 1, body_s=0.05)
    slow = await Client(gate).say(b"{", more=True).ended()
    assert slow.status == 408
    monkeypatch.setattr(gates, "BODY_BYTES", 8)
    large = await Client(gate).say(b"{" * 9, more=True).ended()
    assert (large.status, app.bodies) == (413, [])


@pytest.mark.parametrize(
    ("body", "half"),
    [
        (rb'{"stop": "\ud800"}', r"\ud800"),
        (rb'{"stop": "\udc00"}', r"\udc00"),
        (rb'{"stop": "\uDBFFx"}', r"\uDBFF"),
        (rb'{"stop": "\ud83d\ude00\ude00"}', r"\ude00"),
        (rb'{"stop": "\\\ud83d"}', r"\ud83d"),
        (b'{"stop": "\xed\xa0\x80"}', r"\ud800"),
        (r'{"stop": "\ud800"}'.encode("utf-16"), r"\ud800"),
        ('{"stop": "\ud800"}'.encode("utf-32-be", "surrogatepass"), r"\ud800"),
    ],
)
async def test_half_a_surrogate_pair_is_400(body: bytes, half: str) -> None:
    client = await served(body)
    assert client.status == 400
    assert half in client.message


@pytest.mark.parametrize(
    "body",
    [
        rb'{"stop": "\ud83d\ude00"}',
        rb'{"stop": "\uD83D\uDE00 \\ud800"}',
        rb'{"stop": "\\\\ud800"}',
        '{"stop": "\ud55c\U0001f600"}'.encode(),
    ],
)
async def test_whole_pairs_and_escaped_backslashes_pass(body: bytes) -> None:
    assert (await served(body)).status == 200


# ------------------------------------------------- bodies that vLLM would check for seconds


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MANY = MOST_VALUES + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [1] * MANY}),
        (CHAT, {"messages": [{}] * MANY}),
        (CHAT, {"messages": [1] * MANY, "x": float("nan")}),  # which only Python reads
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "q"}] * MANY}]}),
        (CHAT, {"messages": [{"prompt": [[1]]}] * MANY}),
        (TEXT, {"prompt": [1, *["a"] * MANY]}),
        (TEXT, {"prompt": [[1], *[["a"]] * MANY]}),
        (TEXT, {"prompt": [1.5] * MANY}),
        (TEXT, {"prompt": "p", "stop": [1] * MANY}),
        (TEXT, {"prompt": "p", "echo": ["a"] * MANY}),
        (TEXT, {"prompt": "p", "logit_bias": {str(n): "x" for n in range(MANY)}}),
        (TEXT, {str(n): 1 for n in range(MANY)}),
        (TEXT, [[]] * MANY),
    ],
)
def test_too_many_values(path: str, body: Any) -> None:
    assert "send it in parts" in why_too_much(path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [1] * 8 * MANY}),
        (TEXT, {"prompt": ["a, [b], {c}"] * MANY}),
        (TEXT, {"prompt": [[1, 2]] * MANY}),
        (TEXT, {"prompt": "{[,]}" * MANY}),
        (TEXT, {"prompt": "p", "stop": ["a"] * MANY, "bad_words": ["b"] * MANY}),
        (TEXT, {"prompt": "p", "logit_bias": {str(n): 1.0 for n in range(MANY)}}),
        ("/inference/v1/generate", {"sampling_params": {"allowed_token_ids": [1] * MANY}}),
        (CHAT, {"messages": [{"role": "user", "content": "a, b, c"}] * (MOST_VALUES // 4)}),
        ("/v1/completions/derender", {"logprobs": [{"a": 1}] * MANY}),
    ],
)
def test_tokens_prompts_and_texts_do_not_count(path: str, body: Any) -> None:
    assert why_too_much(path, json.dumps(body).encode()) == ""


def test_no_body_is_read_for_long() -> None:
    assert "commas" in why_too_much(TEXT, b"," * (MOST_COMMAS + 1))


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_cannot_be_read_is_left_to_vllm(body: bytes) -> None:
    assert why_too_much(CHAT, body) == ""
