"""What an owner publishes of the GPU memory of a rank."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pullfill.errors import BadMessage
from pullfill.transfer.gpu.gpu_contract import HANDLE_BYTES

_Size = Annotated[int, Meta(ge=0, le=1 << 62)]


class Exported(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """GPU memory of one process as any other of this host can map it: the IPC handle of the whole
    allocation, and which part of it is meant. device: UUID. pid, pid_space: who exported it."""

    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: _Size
    nbytes: _Size
    device: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=1)]
    pid_space: Annotated[str, Meta(max_length=64)]


class IpcEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`RegionDescriptor.endpoints["cuda_ipc"]`, as JSON."""

    v: int = 1
    memory: Exported
    fence: str
    fence_inode: tuple[int, int]

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> IpcEndpoint:
        """Raises BadMessage."""
        try:
            endpoint = msgspec.json.decode(text, type=IpcEndpoint)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise BadMessage(f"not a cuda_ipc endpoint: {exc}") from exc
        if endpoint.v != 1:
            raise BadMessage(f"cuda_ipc endpoint of version {endpoint.v}, this is version 1")
        return endpoint
