"""A frontend's live page with a made-up cluster behind it, for browser tests and for screenshots.

The routes, the structs and the history are the real ones. Workers, requests and what happens to
them are scripted: eight workers, a burst of long prompts, an outage of NATS, a drain. The numbers
are made up, and the same each time. Run it to look at the page:

    python -m tests.support.live_script [PORT]
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
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

    def __init__(self, seed: int = 7, *, evil: bool = True) -> None:
        self.closed = False
        self._evil = 20 if evil else -1
        self._random = random.Random(seed)
        self._series = Series()
        self._began = time.time()
        self._ended: list[Ended] = []
        self._past()

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

    def _past(self) -> None:
        steps = int(HISTORY_S / STEP_S)
        for index in range(-steps, 1):
            ago = index * STEP_S
            away = OUTAGE[0] < ago < OUTAGE[1]
            busy = self._busy(ago)
            for _ in range(round(10 * busy + self._random.random() * 4)):
                at = self._began + ago - self._random.random() * STEP_S
                self._end(self._request(at, busy, away))
            self._sample(self._began + ago, busy, away)

    def _sample(self, at: float, busy: float, away: bool, seconds: float = STEP_S) -> None:
        rate = 900 * busy + 40 * self._random.random()
        backlog = None if away else max(0.0, 9 * (busy - 0.45) + self._random.random() * 0.4)
        points = {}
        for number, name in enumerate(DECODE):
            share = min(0.99, busy * (0.8 + 0.1 * number) + self._random.random() * 0.04)
            points[name] = WorkerPoint(share, round(22 * share), round(6 * busy**3), rate / 5)
        for number, name in enumerate(PREFILL):
            jobs = min(4, round(6 * busy - number + self._random.random()))
            points[name] = WorkerPoint(0.6 * busy, max(0, jobs), 0, 5200 + 300 * number)
        self._series.sampled(at, seconds, rate * seconds, backlog, points)

    def _request(self, at: float, busy: float, away: bool) -> Ended:
        rnd = self._random
        remote = rnd.random() < 0.45 and not away
        prompt = (
            round(rnd.lognormvariate(8.3, 0.5)) if remote else round(rnd.lognormvariate(5, 0.7))
        )
        queue = max(2.0, 1500 * max(0.0, busy - 0.5) * rnd.random() + rnd.random() * 9)
        prefill = prompt / 5.4
        ttft = queue + prefill + 22 if remote else 30 + prompt / 3.1 * (0.7 + 0.6 * rnd.random())
        itl = 17 + 26 * busy**2 + rnd.random() * 6
        made = rnd.randrange(40, 400)
        path, reason = ("remote", "long_prompt") if remote else ("local", rnd.choice(LOCAL))
        if away and not remote:
            reason = "queue_unavailable"
        return Ended(
            id=f"chatcmpl-{rnd.getrandbits(48):012x}",
            at=at,
            path=path,
            reason=reason,
            prompt=prompt,
            made=made,
            ttft_ms=ttft,
            itl_ms=itl,
            total_ms=ttft + itl * made,
            good=ttft < 1500 and itl < 40,
            predicted_ms=ttft * (0.9 + 0.25 * rnd.random()),
            decode=rnd.choice(DECODE[:4]),
            prefill=rnd.choice(PREFILL) if remote else "",
            stages={"queue": queue, "prefill": prefill, "tail": 8.0} if remote else {},
        )

    def _end(self, row: Ended) -> None:
        self._series.ended(row)
        self._ended = [*self._ended, row][-RECENT:]

    def _flows(self, now: float, busy: float) -> list[Flow]:
        """Requests that go through the stages again and again."""
        flows = []
        for number in range(26):
            phase = (now - self._began + number * 14 / 26) % 14
            common = {
                "id": EVIL if number == self._evil
                else f"chatcmpl-{number * 7919:05x}b{number:02d}",
                "age_s": phase, "tokens": 2600 + 311 * number, "decode": DECODE[number % 4],
            }  # fmt: skip
            prefill = PREFILL[number % 3]
            if phase < 0.25:
                flow = Flow(stage=Stage.PROMPT, stage_s=phase, **common)
            elif phase < 3.0:
                flow = Flow(stage=Stage.QUEUE, stage_s=phase - 0.25, **common)
            elif phase < 6.5:
                done = (phase - 3.0) / 3.5
                flow = Flow(
                    stage=Stage.PREFILL, stage_s=phase - 3.0, done=done, prefill=prefill,
                    queue_s=2.75, prefill_s=phase - 3.0, attempt=1, **common,
                )  # fmt: skip
            elif phase < 7.7:
                flow = Flow(
                    stage=Stage.KV, stage_s=phase - 6.5, done=0.86, prefill=prefill, queue_s=2.75,
                    prefill_s=3.5, attempt=1, **common,
                )  # fmt: skip
            else:
                made = round(40 * (phase - 7.7))
                flow = Flow(stage=Stage.DECODE, stage_s=phase - 7.7, made=made, **common)
            flows.append(flow)
        return sorted(flows, key=lambda flow: -flow.age_s)

    def snapshot(self, whole: bool) -> LiveSnapshot:
        now = time.time()
        busy = self._busy(now - self._began)
        fresh = [self._request(now, busy, False)]
        for row in fresh:
            self._end(row)
        self._sample(now, busy, False, 1.0)
        points = self._series.points(now, None if whole else 2)
        workers = tuple(
            self._worker(name, points[-1].workers[name]) for name in (*DECODE, *PREFILL)
        )
        backlog = points[-1].backlog_s
        figures = self._series.now(now, points[-1].tokens_per_s or 0.0)
        began = self._began
        return LiveSnapshot(
            at=now,
            frontend="frontend-0-5d21",
            model="demo-8b",
            since=began - 1,
            whole=whole,
            targets_ms=(1500.0, 40.0),
            servers={name: ServerStatus(up=True, since_s=900.0) for name in ("nats", "etcd")},
            queue=QueueStatus(depth_jobs=6, depth_tokens=23_480),
            now=msgspec.structs.replace(figures, backlog_s=backlog, in_flight=26),
            workers=workers,
            flows=tuple(self._flows(now, busy)),
            ended=tuple(self._ended if whole else fresh),
            points=points,
            marks=(
                Mark(
                    at=began + OUTAGE[0], until=began + OUTAGE[1], kind="outage", who="nats",
                    text="nats://10.0.0.4:4222: connection refused",
                ),
                Mark(at=began - 340, kind="joined", who=PREFILL[2], text="prefill"),
                Mark(at=began - 75, kind="drain", who=DRAINING),
            ),
        )  # fmt: skip

    def _worker(self, name: str, point: WorkerPoint) -> WorkerRow:
        role = name.partition("-")[0]
        draining = name == DRAINING
        return WorkerRow(
            instance_id=name,
            role=role,
            state="draining" if draining else "ready",
            model="demo-8b",
            host="10.0.0.7",
            pid=4242,
            kv=0.08 if draining else point.kv,
            running=2 if draining else point.running,
            waiting=0 if draining else point.waiting,
            tokens_per_s=point.tokens_per_s,
            backlog_s=0.3 if role == "decode" else None,
            pressure=point.kv if role == "decode" else None,
            load={"kv_blocks": 4096, "open_jobs": 3},
        )

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


if __name__ == "__main__":
    uvicorn.run(app(ScriptedLive()), port=int(sys.argv[1]) if sys.argv[1:] else 8899)
