"""A frontend's live page with a made-up cluster behind it, for tests in a browser and of
`pullfill top`. The routes and the structs are the real ones. What they show does not change."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from pullfill.frontend.http_auth import HttpAuth
from pullfill.frontend.live import page as live_page
from pullfill.snapshot import (
    Ended,
    Flow,
    LiveSnapshot,
    Now,
    Stage,
    WorkerRow,
)
from pullfill.wire import Expected, ExplainRecord, PredictedMs, QueueStatus, ServerStatus, Timings
from tests.support.certificates import Certificates

DECODE = [f"decode-{n}-7f3a" for n in range(5)]
PREFILL = [f"prefill-{n}-a2d9" for n in range(3)]
DRAINING = DECODE[4]
EVIL = "cmpl-<img src=x onerror=window.hacked=1>"


class ScriptedLive:
    """Has the methods of `LiveView` that the page needs. `closed` ends all streams."""

    closed, viewers = False, 0

    async def watch(self) -> AsyncIterator[bytes]:
        while not self.closed:
            yield msgspec.json.encode(self.snapshot())
            yield b""  # a comment, as between the snapshots of many workers
            await asyncio.sleep(1.0)

    def snapshot(self) -> LiveSnapshot:
        now = time.time()
        return LiveSnapshot(
            at=now,
            frontend="frontend-0-5d21",
            model="demo-8b",
            targets_ms=(1500.0, 40.0),
            servers={name: ServerStatus(up=True, since_s=900.0) for name in ("nats", "etcd")},
            queue=QueueStatus(depth_jobs=6, depth_tokens=23_480),
            now=Now(
                ttft_ms=(400.0, 900.0), itl_ms=(20.0, 31.0), tokens_per_s=700.0, done_per_s=3.0,
                good_per_s=2.5, backlog_s=1.5, in_flight=26,
            ),
            workers=tuple(_worker(name) for name in (*DECODE, *PREFILL)),
            flows=tuple(_flow(number) for number in range(26)),
            ended=tuple(_ended(now, number) for number in reversed(range(30))),
        )  # fmt: skip

    def record(self, request_id: str) -> ExplainRecord:
        return ExplainRecord(
            request_id=request_id, path="remote", reason="long_prompt", prompt_tokens=6144,
            prefix_hit_tokens=1024, remote_tokens=5119, decode_instance=DECODE[0],
            prefill_instance=PREFILL[1], attempts=1, kv_bytes=671_088_640, transport="shm",
            expected_s=Expected(
                queue=0.31, prefill=0.98, kv_write=0.4, claim_timeout=10.0, timeout=30.0
            ),
            timings_ms=Timings(
                route=3.1, queue=402.0, claim=2.2, prefix_read=18.4, prefill=921.0, kv_write=455.0,
                tail=31.0, commit=1.4, first_token=1404.0,
            ),
            choice="remote", predicted_ms=PredictedMs(local=2210.0, remote=1330.0),
            outcome_ms=1391.0,
        )  # fmt: skip


def _worker(name: str) -> WorkerRow:
    decode = name in DECODE
    return WorkerRow(
        instance_id=name, role=name.partition("-")[0], model="demo-8b", host="10.0.0.7", pid=4242,
        state="draining" if name == DRAINING else "ready", kv=0.5, running=11, waiting=1,
        tokens_per_s=140.0, backlog_s=0.3 if decode else None, pressure=0.5 if decode else None,
        load={"kv_blocks": 4096, "open_jobs": 3},
    )  # fmt: skip


def _flow(number: int) -> Flow:
    stages = (Stage.PROMPT, Stage.QUEUE, Stage.PREFILL, Stage.KV, Stage.DECODE)
    stage = stages[number % len(stages)]
    held = stage in (Stage.PREFILL, Stage.KV)
    return Flow(
        id=EVIL if number == 20 else f"chatcmpl-{number}", stage=stage, stage_s=0.5,
        age_s=10.0 - 0.1 * number, tokens=2600, made=40 if stage is Stage.DECODE else 0,
        done=0.5 if held else None, decode=DECODE[number % 4], attempt=int(held),
        prefill=PREFILL[number % 3] if held else "", queue_s=2.75 if held else None,
    )  # fmt: skip


def _ended(now: float, number: int) -> Ended:
    remote = number % 2 == 0
    return Ended(
        id=f"chatcmpl-{number:012}", at=now - number, path="remote" if remote else "local",
        reason="long_prompt" if remote else "short", prompt=3000, made=100, ttft_ms=400.0,
        itl_ms=20.0, total_ms=2400.0, good=True, predicted_ms=390.0, decode=DECODE[number % 4],
        prefill=PREFILL[number % 3] if remote else "",
        stages={"queue": 90.0, "prefill": 300.0, "tail": 8.0} if remote else {},
    )  # fmt: skip


@contextmanager
def serving(
    port: int = 0, admin: tuple[str, ...] = (), tls: Certificates | None = None
) -> Iterator[str]:
    """The scripted frontend in a thread, behind the admission of a real one. Yields its URL.

    port: 0: any. admin: keys of administrators. tls: what it shows, with HTTPS."""
    live = ScriptedLive()

    async def request(found: Request) -> Response:
        body = msgspec.json.encode(live.record(found.path_params["request_id"]))
        return Response(body, media_type="application/json")

    app = Starlette(routes=live_page.routes(live, request))  # type: ignore[arg-type]
    guarded: Any = HttpAuth(app, (), admin)  # type: ignore[arg-type]
    shown = {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)} if tls else {}
    config = uvicorn.Config(guarded, port=port, log_level="error", lifespan="off", **shown)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        where = server.servers[0].sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{where}"
    finally:
        live.closed = server.should_exit = True
        thread.join(10)
