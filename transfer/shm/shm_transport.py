"""Same host, CPU memory: the peer maps the KV file of a rank and copies under the fence.

A session owns one mapping of the KV file and one open file description of the fence file. Neither
survives a fork: connect after forking.
"""

from __future__ import annotations

import os

from pullfill.errors import BadMessage, PeerUnavailable
from pullfill.net.this_host import host_id
from pullfill.runtime.pages import make_present
from pullfill.transfer.contract import LocalMemory, PeerSession, Rect
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.layout import both_sides
from pullfill.transfer.session import Copier, MappedSession
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.shm.files import Mapping, ShmEndpoint, open_same
from pullfill.wire import RegionDescriptor


class ShmTransport:
    """PeerTransport for regions of this host and this user. Stateless."""

    name = "shm"

    def __init__(self, copier: Copier = copy_batch) -> None:
        """copier: copies each batch (tests make it fail)."""
        self._copier = copier

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Opens the two files; maps nothing."""
        if descriptor.host_id != host_id():
            return "it is on another host, or does not share /dev/shm with us"
        try:
            endpoint = ShmEndpoint.decode(descriptor.endpoints.get(self.name, ""))
            for path, expected in (
                (endpoint.kv, endpoint.kv_inode),
                (endpoint.fence, endpoint.fence_inode),
            ):
                os.close(open_same(path, expected))
        except BadMessage as exc:
            return str(exc)
        except OSError as exc:
            return f"its memory cannot be opened: {exc}"
        return None

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        """See PeerTransport. An old descriptor never reaches the memory of a new process: inode,
        size and incarnation must be those that it names."""
        ours, theirs = both_sides(local, descriptor, part)
        endpoint = ShmEndpoint.decode(descriptor.endpoints.get(self.name, ""))
        if descriptor.host_id != host_id():
            raise PeerUnavailable(f"{descriptor.instance_id} is on another host")
        if endpoint.nbytes != descriptor.nbytes:
            raise BadMessage(
                f"descriptor of {descriptor.nbytes} bytes, endpoint of {endpoint.nbytes}"
            )
        try:
            fence_fd = open_same(endpoint.fence, endpoint.fence_inode)
            hold = ShmHold(fence_fd, descriptor.incarnation)
            try:
                mapping = Mapping(endpoint.kv, endpoint.kv_inode, endpoint.nbytes)
            except BaseException:
                hold.close()
                raise
        except OSError as exc:
            raise PeerUnavailable(
                f"the KV memory of {descriptor.instance_id} cannot be mapped: {exc}"
            ) from exc
        # Else the first write to each page is a page fault: 20 ms for 25 MB. The first job waits
        # for this.
        make_present(mapping.address, endpoint.nbytes, parts=descriptor.num_layers, within_s=0.1)
        return MappedSession(
            self.name, ours, theirs, mapping.address, hold,
            copier=self._copier, on_close=mapping.close,
        )  # fmt: skip
