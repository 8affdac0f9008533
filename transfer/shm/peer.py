"""The prefill worker's side of shm: maps a decode worker's region and copies under its fence.

A session owns one mapping of the KV file and one open file description of the fence file; `close`
gives both back. Nothing here survives a fork: connect after forking.
"""

from __future__ import annotations

import os

from pullfill.errors import BadMessage, PeerUnavailable
from pullfill.net.this_host import host_id
from pullfill.runtime.pages import make_present
from pullfill.transfer.contract import LocalMemory, Part, PeerSession
from pullfill.transfer.copying import copy_held
from pullfill.transfer.layout import layout_of
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.shm.files import Mapping, ShmEndpoint, open_same
from pullfill.wire import RegionDescriptor

_MAP_S = 0.1
"""A first job waits so long at most until the memory is mapped page by page."""


class ShmTransport:
    """PeerTransport for regions of this host and this user. Stateless."""

    name = "shm"

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Looks at the two files, maps nothing."""
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
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Part | None = None
    ) -> PeerSession:
        """See PeerTransport. An old descriptor never reaches a new process's memory: inode, size
        and incarnation must all be the ones it names. Raises PeerUnavailable when the region is
        gone, BadMessage when the descriptor contradicts itself, IncompatibleError."""
        layout = layout_of(descriptor)
        endpoint = ShmEndpoint.decode(descriptor.endpoints.get(self.name, ""))
        if descriptor.host_id != host_id():
            raise PeerUnavailable(f"{descriptor.instance_id} is on another host")
        if endpoint.nbytes != descriptor.nbytes:
            raise BadMessage(
                f"descriptor of {descriptor.nbytes} bytes, endpoint of {endpoint.nbytes}"
            )
        try:
            fence_fd = open_same(endpoint.fence, endpoint.fence_inode)
            gate = ShmHold(fence_fd, descriptor.incarnation)
            try:
                mapping = Mapping(endpoint.kv, endpoint.kv_inode, endpoint.nbytes)
            except BaseException:
                gate.close()
                raise
        except OSError as exc:
            raise PeerUnavailable(
                f"the KV memory of {descriptor.instance_id} cannot be mapped: {exc}"
            ) from exc
        # Else each page costs a fault of its own when it is first written, 20 ms for 25 MB.
        make_present(mapping.address, endpoint.nbytes, parts=layout.num_layers, within_s=_MAP_S)
        try:
            return MappedSession(
                self.name, local, layout, mapping.address, gate, part=part, now=copy_held,
                on_close=mapping.close,
            )  # fmt: skip
        except BaseException:
            mapping.close()
            gate.close()
            raise
