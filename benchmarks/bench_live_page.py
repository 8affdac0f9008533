"""What the live page costs a frontend: `make bench-live-page`.

A frontend's part that makes the page runs alone: its HTTP server, its view of --workers workers, a
request that ends every 50 ms, 32 requests under way. The workers' probe servers and the viewers are
other processes. Prints the CPU of the frontend's process in percent of a core, without viewers and
with 1 and 4.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response

from pullfill.frontend.cluster_view import ClusterView
from pullfill.frontend.live import page as live_page
from pullfill.frontend.live.page import LiveView
from pullfill.frontend.request_log import RequestLog, RequestRecord
from pullfill.runtime.health import ServerHealth
from pullfill.runtime.probe import ProbeServer
from pullfill.wire import ExplainRecord, Timings, WorkerRecord

FLIGHTS = 32
ENDS_S = 0.05
VIEWERS = (0, 1, 4)


def report(role: str) -> dict[str, Any]:
    """What a worker answers to /status: as long as that of a real one."""
    load: dict[str, Any] = {
        "running": 9, "waiting": 2, "requests": 11, "remote_prefills": 2, "kv_reads": 0,
        "quarantined_blocks": 0, "open_jobs": 4, "read_leases": 0, "kv_free_blocks": 900,
        "kv_blocks": 2048, "prefill_workers": ["prefill-0a1b2c3d"] * 4,
        "prefill_workers_pulling": 4, "self_checks": [], "prefix": {"blocks": 900, "sent": 12345},
        "demand": {"backlog_s": 0.4, "prefill_demand": 1.2, "tokens_per_s": 5000.0, "prompts": 70},
    }  # fmt: skip
    if role == "prefill":
        load = {
            "jobs": 2, "tokens": 8192, "completed": 7, "failed": 0, "decode_workers": 4,
            "kv_free_blocks": 90, "kv_blocks": 2048, "kv_credits": {"limit": 1, "used": 0},
            "unclaimed": 0, "tokens_per_s": 5000.0,
        }  # fmt: skip
    up = {"up": True, "since_s": 500.0, "error": None}
    queue = {"depth_jobs": 4, "depth_tokens": 9000, "in_flight": 2, "oldest_age_s": 1, "age_s": 0}
    return {"state": "ready", "load": load, "servers": {"nats": up, "etcd": up}, "queue": queue}


def jobs(role: str, number: int) -> dict[str, Any]:
    ids = [f"job-{number}-{i}" for i in range(4)]
    if role == "prefill":
        return {"held": [{"job_id": f"job-{number % 4}-{i}", "computed": 0.5} for i in range(2)]}
    more = {"state": "granted", "tokens": 3000, "attempt": 1, "open_s": 1.0, "stage_s": 0.5}
    return {"jobs": [{"job_id": i, "request_id": f"w-{i}", **more} for i in ids]}


def roles(workers: int) -> list[str]:
    return ["decode" if number % 2 == 0 else "prefill" for number in range(workers)]


def serve_probes(workers: int, pipe: Connection) -> None:
    """The workers' probe servers. Ends with the pipe."""

    async def serve() -> None:
        urls = []
        for number, role in enumerate(roles(workers)):
            said, its_jobs = report(role), jobs(role, number)
            probe = ProbeServer(
                "127.0.0.1", lambda: (True, {}), partial(dict, said), jobs=partial(dict, its_jobs)
            )
            await probe.start()
            urls.append(probe.url)
        pipe.send(urls)
        with suppress(EOFError):
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


def watch(url: str, seconds: float) -> None:
    """A viewer."""
    until = time.monotonic() + seconds
    with httpx.stream("GET", f"{url}/pullfill/ui/events", timeout=30.0) as stream:
        for _ in stream.iter_lines():
            if time.monotonic() > until:
                return


def record(worker: str, role: str, http: str) -> WorkerRecord:
    return WorkerRecord(
        instance_id=worker, incarnation="i", role=role, state="ready",  # type: ignore[arg-type]
        model="m", host="127.0.0.1", host_id="h", pid=1, started_at=0.0, http=http,
    )  # fmt: skip


def flights() -> list[Any]:
    return [
        SimpleNamespace(
            wire_id=f"w-job-0-{number}", tokens=[],
            record=RequestRecord(f"cmpl-{number}", route_ms=1.0, prompt_tokens=3000),
            worker=SimpleNamespace(instance_id="decode-0"),
        )
        for number in range(FLIGHTS)
    ]  # fmt: skip


async def end_requests(requests: RequestLog) -> None:
    """A request ends every ENDS_S seconds."""
    number = 0
    while True:
        await asyncio.sleep(ENDS_S)
        number += 1
        record = RequestRecord(f"cmpl-x{number}", 1.0, 80.0, arrived_at=time.time() - 1.0)
        record.answer_ms, record.answer_tokens = 1000.0, 40
        requests.begin(record)
        timings = Timings(queue=5.0, prefill=40.0, tail=2.0)
        told = ExplainRecord(
            request_id=f"x{number}", path="remote", reason="long_prompt", prompt_tokens=3000,
            prefix_hit_tokens=0, remote_tokens=2999, decode_instance="decode-0",
            prefill_instance="prefill-1", timings_ms=timings,
        )  # fmt: skip
        requests.tell(record, told)


class Counted(ClusterView):
    """A view that counts its rounds of questions to the workers. It fails if a worker is silent."""

    looks = 0

    async def reports(self) -> Any:
        self.looks += 1
        found = await super().reports()
        assert all(report is not None for _, report in found)
        return found


async def measure(urls: list[str], seconds: float) -> dict[int, tuple[float, float]]:
    """Return percent of a core and snapshots per second, by number of viewers."""
    names = [f"{role}-{number}" for number, role in enumerate(roles(len(urls)))]
    records = {n: record(n, n.split("-")[0], u) for n, u in zip(names, urls, strict=True)}

    def workers(role: str) -> dict[str, WorkerRecord]:
        return {name: r for name, r in records.items() if r.role == role}

    directory: Any = SimpleNamespace(age_s=0.0, workers=workers)
    etcd = ServerHealth("etcd", "bench")
    etcd.ok()
    requests, under_way = RequestLog(), flights()
    view = Counted(directory, etcd, "bench")
    live = LiveView(
        view, requests, lambda: under_way, lambda: (1000.0, 50.0),
        frontend="frontend-0", model="m", since=time.time(),
    )  # fmt: skip

    async def nothing(_: Any) -> Response:
        return Response()

    app = Starlette(routes=live_page.routes(live, nothing))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    ending = asyncio.create_task(end_requests(requests))
    context, found = multiprocessing.get_context("spawn"), dict[int, tuple[float, float]]()
    for viewers in VIEWERS:
        many = [context.Process(target=watch, args=(url, seconds + 4.0)) for _ in range(viewers)]
        for one in many:
            one.start()
        while live.viewers < viewers:  # noqa: ASYNC110 - counted by whole connections
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        before, began, looks = time.process_time(), time.monotonic(), view.looks
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        found[viewers] = 100 * (time.process_time() - before) / took, (view.looks - looks) / took
        for one in many:
            await asyncio.to_thread(one.join)
    ending.cancel()
    server.should_exit = True
    await serving
    await view.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    probes = context.Process(target=serve_probes, args=(options.workers, there))
    probes.start()
    there.close()
    found = asyncio.run(measure(here.recv(), options.seconds))
    here.close()
    probes.join(10)
    print(f"{options.workers} workers, {1 / ENDS_S:.0f} requests/s, {FLIGHTS} under way")
    base, _ = found[0]
    for viewers, (percent, rate) in found.items():
        page = "" if viewers == 0 else f", of it the page {percent - base:.2f} %"
        print(f"{viewers} viewers: {percent:.2f} % of a core{page}; {rate:.1f} snapshots/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
