"""Which network devices NIXL's UCX may use, and so where it listens.

UCX opens a TCP port on every device it may use, and knows nothing of our login. So its devices are
chosen before the first agent is made: those of the address that this worker binds, and RDMA cards,
which open no such port. An operator who sets UCX_NET_DEVICES has chosen already.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

ENV = "UCX_NET_DEVICES"
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
    here = [
        device.partition(":")[0]  # an address may have a label, as in eth0:1
        for device, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if found.family in (socket.AF_INET, socket.AF_INET6)
        and ipaddress.ip_address(found.address.partition("%")[0]) == address
    ]
    if not here:
        return None
    cards = sorted(f"{port.parts[-3]}:{port.name}" for port in rdma.glob("*/ports/*"))
    return ",".join([*here, *cards])
