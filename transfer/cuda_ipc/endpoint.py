"""What an owner publishes of the GPU memory of a rank."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pullfill.transfer.gpu.cuda import HANDLE_BYTES
from pullfill.transfer.shm.files import Endpoint

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


class IpcEndpoint(Endpoint, frozen=True, kw_only=True):
    """The GPU memory of one rank."""

    transport = "cuda_ipc"
    memory: Exported
