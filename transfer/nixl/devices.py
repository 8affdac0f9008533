"""Which network devices NIXL's UCX may use, and so where it listens.

UCX opens a TCP port on every device it may use, and knows nothing of our login. So its devices are
chosen before the first agent is made: those of the address this worker binds, and RDMA cards, which
open no such port. Whoever has set UCX_NET_DEVICES has chosen already.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

log = logging.getLogger(__name__)

ENV = "UCX_NET_DEVICES"
_SIOCGIFADDR = 0x8915
_RDMA = Path("/sys/class/infiniband")


def confine(host: str) -> None:
    """Set UCX_NET_DEVICES for this process, unless it is set. Warns when nothing can be set."""
    if os.environ.get(ENV):
        return
    devices = devices_for(host)
    if devices is not None:
        os.environ[ENV] = devices
        return
    log.warning(
        "nixl listens on every network device, without a login (none has the address %s): set %s",
        host,
        ENV,
    )


def devices_for(host: str, rdma: Path = _RDMA) -> str | None:
    """UCX's names of the devices that serve `host`, a literal address or localhost. None: not
    known, or all of them (0.0.0.0)."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        return None
    if address.is_loopback:
        return "lo"
    here = [name for _, name in socket.if_nameindex() if address in _addresses(name)]
    if not here:
        return None
    cards = sorted(f"{port.parts[-3]}:{port.name}" for port in rdma.glob("*/ports/*"))
    return ",".join([*here, *cards])


def _addresses(device: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            asked = struct.pack("256s", device.encode()[:15])
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, asked)
            found.add(ipaddress.IPv4Address(answer[20:24]))
        except OSError:
            pass  # it has none
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for fields in map(str.split, lines):
        if fields[-1] == device:
            found.add(ipaddress.IPv6Address(int(fields[0], 16)))
    return found
