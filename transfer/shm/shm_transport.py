"""Same host, CPU memory: the peer maps the KV file of a rank and copies under the fence.

A session owns one mapping of the KV file and one open file description of the fence file. Neither
survives a fork: connect after forking.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from pullfill.errors import BadMessage, PeerUnavailable
from pullfill.runtime.pages import make_present
from pullfill.transfer.contract import LocalMemory, PeerSession, Rect
from pullfill.transfer.layout import both_sides
from pullfill.transfer.session import MappedSession
from pullfill.transfer.shm.fence import ShmHold
from pullfill.transfer.shm.files import Mapping, ShmEndpoint, open_same
from pullfill.wire import RegionDescriptor


class ShmTransport:
    """PeerTransport for regions of this host and this user. Stateless."""

    name = "shm"

    def can_reach(self, descriptor: RegionDescriptor) -> str | None:
        """See PeerTransport. Opens the two files; maps nothing."""
        try:
            endpoint = ShmEndpoint.of(descriptor)
            os.close(open_same(endpoint.kv, endpoint.kv_inode))
            os.close(open_same(endpoint.fence, endpoint.fence_inode))
        except (BadMessage, PeerUnavailable) as exc:
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
        endpoint = ShmEndpoint.of(descriptor)
        if endpoint.nbytes != descriptor.nbytes:
            raise BadMessage(
                f"descriptor of {descriptor.nbytes} bytes, endpoint of {endpoint.nbytes}"
            )
        with ExitStack() as undo:
            try:
                fd = open_same(endpoint.fence, endpoint.fence_inode)
                hold = ShmHold(fd, descriptor.incarnation)
                undo.callback(hold.close)
                mapping = Mapping(endpoint.kv, endpoint.kv_inode, endpoint.nbytes)
            except OSError as exc:
                raise PeerUnavailable(
                    f"the KV memory of {descriptor.instance_id} cannot be mapped: {exc}"
                ) from exc
            undo.pop_all()
        # Else the first write to each page is a page fault: 20 ms for 25 MB. The first job waits
        # for this.
        make_present(mapping.address, endpoint.nbytes, parts=descriptor.num_layers, within_s=0.1)
        return MappedSession(self.name, ours, theirs, mapping.address, hold, on_close=mapping.close)
