"""Packets between test hosts, over wires that tests break: cut, loss, delay, rate, per direction.

Each host has one TUN device. One thread reads the IPv4 packets of all devices and writes each to
the device of its destination, as the wire between the two hosts allows. Linux' own netem does the
same, but not every kernel has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_HEADER = 0x0001 | 0x1000
_LARGEST = 65_536
_BURST = 32
"""Packets that are read of one device before the others get a turn."""
QUEUE_S = 0.2
"""A packet that would wait longer than this for a slow wire is dropped, as a switch does."""


@dataclass(slots=True)
class Wire:
    """One direction between two hosts.

    rate: bytes per second, 0 for no limit.
    stopped: number of packets that it did not deliver: cut, lost, or too many for a slow wire.
    delayed: number of packets that it delivered later, for `delay_s` or `rate`."""

    cut: bool = False
    loss: float = 0.0
    delay_s: float = 0.0
    rate: float = 0.0
    free_at: float = 0.0
    stopped: int = 0
    delayed: int = 0


class Wires:
    """Owns the devices and the thread. `close` ends both; a closed device is gone."""

    def __init__(self, seed: int = 1) -> None:
        self._devices: dict[bytes, int] = {}
        self._wires: dict[tuple[bytes, bytes], Wire] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="wires", daemon=True)

    def attach(self, address: str, name: str) -> None:
        """Make a TUN device `name` in the calling thread's network namespace. Before `start`."""
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN_NO_HEADER))
        self._devices[socket.inet_aton(address)] = device
        self._selector.register(device, selectors.EVENT_READ, socket.inet_aton(address))

    def start(self) -> None:
        self._thread.start()

    def wire(self, source: str, target: str) -> Wire:
        """The direction from one address to another; what is set in it acts on the next packet."""
        return self._wire(socket.inet_aton(source), socket.inet_aton(target))

    def heal(self) -> None:
        """All wires as new. Their counts begin at 0; a `Wire` that a test holds keeps its own."""
        self._wires.clear()

    def close(self) -> None:
        self._ended = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._selector.close()
        for device in self._devices.values():
            os.close(device)

    def _wire(self, source: bytes, target: bytes) -> Wire:
        found = self._wires.get((source, target))
        return found or self._wires.setdefault((source, target), Wire())

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._ended:
            wait = 0.1
            if self._late:
                wait = min(wait, max(0.0, self._late[0][0] - time.monotonic()))
            for key, _ in self._selector.select(wait):
                self._drain(key.fd, key.data)
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, _, device, packet = heapq.heappop(self._late)
                self._deliver(device, packet)

    def _drain(self, device: int, source: bytes) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(device, _LARGEST)
            except BlockingIOError:
                return
            target = packet[16:20]
            if packet[0] >> 4 == 4 and target in self._devices:
                self._send(self._wire(source, target), self._devices[target], packet)

    def _send(self, wire: Wire, device: int, packet: bytes) -> None:
        if wire.cut or (wire.loss and self._random.random() < wire.loss):
            wire.stopped += 1
            return
        at = now = time.monotonic()
        if wire.rate:
            at = max(now, wire.free_at) + len(packet) / wire.rate
            if at - now > QUEUE_S:
                wire.stopped += 1
                return
            wire.free_at = at
        at += wire.delay_s
        if at <= now:
            self._deliver(device, packet)
        else:
            wire.delayed += 1
            heapq.heappush(self._late, (at, next(self._order), device, packet))

    def _deliver(self, device: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a device that is full or down loses packets
            os.write(device, packet)
