"""Answers in every form a client can ask for, read as they come: streamed or not, completion or
chat. Whatever the form, `Heard` is what was heard in the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import openai

from tests.support import web
from tests.support.cluster import MODEL, Cluster


@dataclass
class Heard:
    """One answer, filled while it comes. done: it has ended. error: empty if it is complete."""

    request_id: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int = 0
    error: str = ""
    status: int = 200
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, data: Any) -> None:
        """A chunk of a stream, or a whole answer."""
        self.request_id = data.id
        if data.usage is not None:
            self.completion_tokens = data.usage.completion_tokens
        for choice in data.choices:
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            self.text += (choice.text if part is None else part.content) or ""
            self.tokens += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None and part is None:
                self.logprobs += choice.logprobs.token_logprobs
            elif choice.logprobs is not None:
                self.logprobs += [entry.logprob for entry in choice.logprobs.content or ()]
            self.finish_reason = choice.finish_reason or self.finish_reason


class Asked(Protocol):
    """What is asked: a cluster, or something else that has a client."""

    def client(self) -> openai.OpenAI: ...


def ask_for(cluster: Asked, prompt: Sequence[Any], max_tokens: int, **options: Any) -> Heard:
    """Ask in a thread of its own. A text, or parts of a message, are asked as chat.

    options: of the OpenAI call. What the client does not know goes into the body. Without them the
    answer is greedy, and goes on after an end of text."""
    heard = Heard()
    client, stream = cluster.client(), options.pop("stream", True)
    known = {"n", "stop", "seed", "logprobs", "top_logprobs", "response_format"}
    call: dict[str, Any] = {name: options.pop(name) for name in known & options.keys()}
    call |= {"model": options.pop("model", MODEL), "max_tokens": max_tokens, "stream": stream}
    call["temperature"] = options.pop("temperature", 0)
    call["extra_body"] = {"ignore_eos": True, "return_token_ids": True, **options}
    if stream:
        call["stream_options"] = {"include_usage": True}
    create: Any
    if not isinstance(prompt[0], int):
        create = client.chat.completions.create
        call["messages"] = [{"role": "user", "content": prompt}]
    else:
        create, call["prompt"] = client.completions.create, list(prompt)

    def run() -> None:
        try:
            answer = create(**call)
            for part in answer if stream else (answer,):
                heard.take(part)
        except openai.APIError as exc:
            heard.error = exc.message
            heard.status = getattr(exc, "status_code", None) or exc.body["code"]  # type: ignore
        finally:
            heard.done.set()

    threading.Thread(target=run, daemon=True).start()
    return heard


def chat_tokens(cluster: Cluster, message: str) -> list[int]:
    """The prompt that a chat of one message becomes."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": message}]}
    answer = web.post(f"{cluster.frontend_url}/tokenize", json=body)
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens
