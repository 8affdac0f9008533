"""A frontend's live page with a made-up cluster behind it, for browser tests and for screenshots.

The routes, the structs and the history are the real ones. Workers, requests and what happens to
them are scripted: eight workers, a burst of long prompts, an outage of NATS, a drain. The numbers
are made up, and the same each time.
"""

from __future__ import annotations

import asyncio
import math
import random
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
from pullfill.frontend.live.history import Series
from pullfill.snapshot import (
    HISTORY_S,
    RECENT,
    STEP_S,
    Ended,
    Flow,
    LiveSnapshot,
    Mark,
    Stage,
    WorkerPoint,
    WorkerRow,
)
from pullfill.wire import (
    DecodeChoice,
    Expected,
    ExplainRecord,
    PredictedMs,
    QueueStatus,
    ServerStatus,
    Timings,
)

DECODE = [f"decode-{n}-{tag}" for n, tag in enumerate(("7f3a", "91c2", "d05e", "44b8", "e1f6"))]
PREFILL = [f"prefill-{n}-{tag}" for n, tag in enumerate(("a2d9", "6c1b", "f870"))]
DRAINING = DECODE[4]
BURST = (-430.0, -300.0)
"""Seconds before now in which long prompts come close together."""
OUTAGE = (-600.0, -571.0)
LOCAL = ("short", "short", "short", "prefix_hit", "queue_wait")
EVIL = "cmpl-<img src=x onerror=window.hacked=1>"


class ScriptedLive:
    """Has the methods of `LiveView` that the page needs. Times are relative to its beginning.

    evil: the name of one request attacks the page.
    closed: ends all streams within a second."""

    def __init__(self, *, evil: bool = True) -> None:
        self.closed = False
        self._evil = 20 if evil else -1
        self._random = random.Random(7)
        self._series = Series()
        self._began = time.time()
        self._ended: list[Ended] = []
        for step in range(-int(HISTORY_S / STEP_S), 1):
            ago = step * STEP_S
            for _ in range(round(10 * self._busy(ago)) + 2):
                self._end(ago - STEP_S * self._random.random())
            self._sample(ago, STEP_S)

    async def watch(self) -> AsyncIterator[bytes]:
        whole = True
        while not self.closed:
            yield msgspec.json.encode(self.snapshot(whole))
            whole = False
            yield b""  # a comment, as between the snapshots of many workers
            await asyncio.sleep(1.0)

    # ---------------------------------------------------------------- the script

    def _busy(self, ago: float) -> float:
        """How busy the cluster is, 0 to 1. ago: seconds since the script began; may be negative."""
        wave = 0.42 + 0.12 * math.sin(ago / 70) + 0.05 * math.sin(ago / 11)
        return min(0.97, wave + (0.42 if BURST[0] < ago < BURST[1] else 0.0))

    def _sample(self, ago: float, seconds: float) -> None:
        busy = self._busy(ago)
        rate = 900 * busy + 40 * self._random.random()
        points = {}
        for number, name in enumerate(DECODE):
            share = min(0.99, busy * (0.8 + 0.1 * number))
            points[name] = WorkerPoint(share, round(22 * share), round(6 * busy**3), rate / 5)
        for number, name in enumerate(PREFILL):
            points[name] = WorkerPoint(0.6 * busy, max(0, round(6 * busy) - number), 0, 5200.0)
        backlog = None if OUTAGE[0] < ago < OUTAGE[1] else max(0.1, 9 * (busy - 0.45))
        self._series.sampled(self._began + ago, seconds, rate * seconds, backlog, points)

    def _end(self, ago: float) -> Ended:
        """Note a request that ended at that time."""
        rnd, busy, away = self._random, self._busy(ago), OUTAGE[0] < ago < OUTAGE[1]
        remote = rnd.random() < 0.45 and not away
        prompt = rnd.randrange(2000, 8000) if remote else rnd.randrange(60, 400)
        queue, prefill = 2.0 + 1500 * max(0.0, busy - 0.5) * rnd.random(), prompt / 5.4
        ttft = queue + prefill + 22 if remote else 30 + prompt / 3.1
        itl, made = 17 + 26 * busy**2 + rnd.random() * 6, rnd.randrange(40, 400)
        reason = "long_prompt" if remote else "queue_unavailable" if away else rnd.choice(LOCAL)
        row = Ended(
            id=f"chatcmpl-{rnd.getrandbits(48):012x}", at=self._began + ago,
            path="remote" if remote else "local", reason=reason, prompt=prompt, made=made,
            ttft_ms=ttft, itl_ms=itl, total_ms=ttft + itl * made, good=ttft < 1500 and itl < 40,
            predicted_ms=ttft * 0.97, decode=rnd.choice(DECODE[:4]),
            prefill=rnd.choice(PREFILL) if remote else "",
            stages={"queue": queue, "prefill": prefill, "tail": 8.0} if remote else {},
        )  # fmt: skip
        self._series.ended(row)
        self._ended = [*self._ended, row][-RECENT:]
        return row

    def _flow(self, number: int, age_s: float) -> Flow:
        """A request that goes through the stages in 14 s, again and again."""
        begins = {Stage.PROMPT: 0.0, Stage.QUEUE: 0.25, Stage.PREFILL: 3.0, Stage.KV: 6.5,
                  Stage.DECODE: 7.7}  # fmt: skip
        stage, begin = [pair for pair in begins.items() if pair[1] <= age_s][-1]
        with_prefill = stage in (Stage.PREFILL, Stage.KV)
        return Flow(
            id=EVIL if number == self._evil else f"chatcmpl-{number * 7919:05x}b{number:02d}",
            stage=stage, stage_s=age_s - begin, age_s=age_s, tokens=2600 + 311 * number,
            made=round(40 * (age_s - begin)) if stage is Stage.DECODE else 0,
            done=(age_s - begin) / 3.5 if with_prefill else None, decode=DECODE[number % 4],
            prefill=PREFILL[number % 3] if with_prefill else "", attempt=int(with_prefill),
            queue_s=2.75 if with_prefill else None, prefill_s=3.5 if with_prefill else None,
        )  # fmt: skip

    def snapshot(self, whole: bool) -> LiveSnapshot:
        now, began = time.time(), self._began
        fresh = self._end(now - began)
        self._sample(now - began, 1.0)
        points = self._series.points(now, None if whole else 2)
        last = points[-1]
        flows = [self._flow(n, (now - began + n * 14 / 26) % 14) for n in range(26)]
        figures = self._series.now(now, last.tokens_per_s or 0.0)
        return LiveSnapshot(
            at=now,
            frontend="frontend-0-5d21",
            model="demo-8b",
            since=began - 1,
            whole=whole,
            targets_ms=(1500.0, 40.0),
            servers={name: ServerStatus(up=True, since_s=900.0) for name in ("nats", "etcd")},
            queue=QueueStatus(depth_jobs=6, depth_tokens=23_480),
            now=msgspec.structs.replace(figures, backlog_s=last.backlog_s, in_flight=26),
            workers=tuple(_worker(n, last.workers[n]) for n in (*DECODE, *PREFILL)),
            flows=tuple(sorted(flows, key=lambda flow: -flow.age_s)),
            ended=tuple(self._ended) if whole else (fresh,),
            points=points,
            marks=(
                Mark(at=began + OUTAGE[0], until=began + OUTAGE[1], kind="outage", who="nats",
                     text="nats://10.0.0.4:4222: connection refused"),
                Mark(at=began - 340, kind="joined", who=PREFILL[2], text="prefill"),
                Mark(at=began - 75, kind="drain", who=DRAINING),
            ),
        )  # fmt: skip

    def record(self, request_id: str) -> ExplainRecord:
        return ExplainRecord(
            request_id=request_id,
            path="remote",
            reason="long_prompt",
            prompt_tokens=6144,
            prefix_hit_tokens=1024,
            remote_tokens=5119,
            decode_instance=DECODE[0],
            prefill_instance=PREFILL[1],
            attempts=1,
            kv_bytes=671_088_640,
            transport="shm",
            expected_s=Expected(
                queue=0.31, prefill=0.98, kv_write=0.4, claim_timeout=10.0, timeout=30.0
            ),
            timings_ms=Timings(
                route=3.1, queue=402.0, claim=2.2, prefix_read=18.4, prefill=921.0, kv_write=455.0,
                tail=31.0, commit=1.4, first_token=1404.0,
            ),
            choice="remote",
            predicted_ms=PredictedMs(local=2210.0, local_chunked=3480.0, remote=1330.0),
            outcome_ms=1391.0,
            decode_choice=DecodeChoice(
                policy="kv", matched_tokens=1024, score=5120.0, reason="least_cost"
            ),
        )  # fmt: skip


def _worker(name: str, point: WorkerPoint) -> WorkerRow:
    decode, draining = name in DECODE, name == DRAINING
    return WorkerRow(
        instance_id=name, role=name.partition("-")[0], state="draining" if draining else "ready",
        model="demo-8b", host="10.0.0.7", pid=4242, kv=0.08 if draining else point.kv,
        running=2 if draining else point.running, waiting=0 if draining else point.waiting,
        tokens_per_s=point.tokens_per_s, backlog_s=0.3 if decode else None,
        pressure=point.kv if decode else None, load={"kv_blocks": 4096, "open_jobs": 3},
    )  # fmt: skip


def app(live: ScriptedLive) -> Starlette:
    async def request(found: Request) -> Response:
        body = msgspec.json.encode(live.record(found.path_params["request_id"]))
        return Response(body, media_type="application/json")

    return Starlette(routes=live_page.routes(live, request))  # type: ignore[arg-type]


@contextmanager
def serving(port: int = 0, admin: tuple[str, ...] = (), evil: bool = True) -> Iterator[str]:
    """The scripted frontend in a thread, behind the admission of a real one. Yields its URL.

    port: 0: any. admin: keys of administrators. evil: a request's name attacks the page."""
    live = ScriptedLive(evil=evil)
    guarded: Any = HttpAuth(app(live), (), admin)  # type: ignore[arg-type]
    config = uvicorn.Config(guarded, port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        live.closed = server.should_exit = True
        thread.join(10)
