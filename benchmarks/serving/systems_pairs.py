"""Rivals made of two plain vLLM servers, one core for each engine.

Owner: the `with` block. Its exit ends servers and proxy, also after a failed start.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.live import BenchError, child, wait_for
from benchmarks.serving import model
from benchmarks.serving.contract import Running
from benchmarks.serving.systems_vllm import (
    ApiServer,
    Cores,
    environment,
    pin_server,
    starting,
)
from pullfill.deploy.local_servers import free_port
from tests.support import web

PROXY_LIMIT_S = 30.0


class Skipped(BenchError):
    """What the system needs is not installed here."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the servers of a system."""

    name: str
    cores: Cores
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None


@contextmanager
def servers(parts: Sequence[Part], flags: Sequence[str], base: Path) -> Iterator[list[ApiServer]]:
    """All of them ready; they start at the same time. Raises BenchError."""
    directory = model.model_directory()
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                starting(part.name, directory, base, [*flags, *part.flags], part.cores, part.env)
            )
            for part in parts
        ]
        yield [server.ready() for server in started]


@contextmanager
def proxy(kind: str, arguments: Sequence[str], cores: Sequence[int], log: Path) -> Iterator[Proxy]:
    """One of `benchmarks.serving.proxies`, ready, on these cores. Raises BenchError."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.serving.proxies", kind, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with child([*command, *arguments], log) as process:
        psutil.Process(process.pid).cpu_affinity(list(cores))

        def up() -> bool:
            if process.poll() is not None:
                raise BenchError(f"the proxy ended:\n{log.read_text()[-2000:]}")
            return web.get(f"{url}/health", timeout=5.0).status_code == 200

        wait_for(up, PROXY_LIMIT_S, f"the {kind} proxy answers", 0.05)
        yield Proxy(url, process.pid)


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str
    pid: int


@contextmanager
def round_robin(
    name: str, cores: Sequence[int], flags: Sequence[str], base: Path
) -> Iterator[Running]:
    """A plain server for each core named, wholly on it; requests take turns."""
    begin = time.monotonic()
    parts = [Part(f"vllm-{n}", Cores((core,), (core,))) for n, core in enumerate(cores)]
    with servers(parts, flags, base) as both:
        arguments = [part for server in both for part in ("--server", server.url)]
        with proxy("round-robin", arguments, sorted(set(cores)), base / "proxy.log") as front:
            yield Running(
                name=name,
                url=front.url,
                model=model.NAME,
                pids={**{s.pid: s.name for s in both}, front.pid: "proxy"},
                ready_s=time.monotonic() - begin,
            )


def nixl_problem() -> str:
    """Why NIXL cannot be used, "" when it can."""
    if importlib.util.find_spec("nixl") is None:
        return "nixl is not installed: make install-nixl, or put its folder on PYTHONPATH"
    return ""


@contextmanager
def nixl(
    name: str,
    cores: tuple[int, int],
    flags: Sequence[str],
    base: Path,
) -> Iterator[Running]:
    """A decode and a prefill server with vLLM's NixlConnector. Raises Skipped without NIXL."""
    if problem := nixl_problem():
        raise Skipped(problem)
    begin = time.monotonic()
    decode, prefill = cores
    parts = [
        _nixl_part("decode", "kv_consumer", Cores((decode,), (decode,))),
        _nixl_part("prefill", "kv_producer", Cores((prefill,), (prefill,))),
    ]
    with servers(parts, flags, base) as (consumer, producer):
        arguments = ["--prefill", producer.url, "--decode", consumer.url]
        with proxy("nixl", arguments, (prefill,), base / "proxy.log") as front:
            # NIXL moved the threads of both engines to the last core when it started.
            for server, part in ((consumer, parts[0]), (producer, parts[1])):
                pin_server(server, part.cores)
            yield Running(
                name=name,
                url=front.url,
                model=model.NAME,
                pids={
                    consumer.pid: "vllm-decode",
                    producer.pid: "vllm-prefill",
                    front.pid: "proxy",
                },
                ready_s=time.monotonic() - begin,
            )


def _nixl_part(name: str, role: str, cores: Cores) -> Part:
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    env = {
        **environment(cores.engine),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": os.environ.get("UCX_TLS", "shm,tcp,self"),
    }
    return Part(f"vllm-{name}", cores, (f"--kv-transfer-config={json.dumps(config)}",), env)
