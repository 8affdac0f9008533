"""What the nccl planes need of NCCL and of a GPU, so that all of it can be tested without one.

`Nccl` has the names of `cupy.cuda.nccl`; `cuda.py` brings the real ones. Addresses are of the GPU's
memory. Errors of NCCL and CUDA are exceptions of any class.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pullfill.transfer.contract import LocalMemory

Addresses = NDArray[np.uint64]


class Comm(Protocol):
    """cupy.cuda.nccl.NcclCommunicator. Point to point is first in, first out, without tags; both
    sides must name the same number of bytes."""

    def send(self, ptr: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """Queue on `stream`. May block until the two sides are connected."""
        ...

    def recv(self, ptr: int, count: int, datatype: int, peer: int, stream: int) -> None: ...

    def check_async_error(self) -> None:
        """Raises if something went wrong in the background."""
        ...

    def abort(self) -> None:
        """End everything under way, on the GPU too, and free. The communicator is gone: nobody
        may be about to use it, but a call that blocks in another thread ends with an error."""
        ...


class Nccl(Protocol):
    """The module cupy.cuda.nccl."""

    NCCL_UINT8: int

    def get_unique_id(self) -> bytes: ...

    def get_version(self) -> int: ...

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> Comm:
        """Blocks until all ranks are there, without a limit."""
        ...

    def groupStart(self) -> None: ...

    def groupEnd(self) -> None: ...


class Stream(Protocol):
    """A CUDA stream of one communicator."""

    @property
    def ptr(self) -> int: ...

    @property
    def done(self) -> bool:
        """Whether everything queued is done. Raises when CUDA failed."""
        ...

    def synchronize(self) -> None:
        """Wait for it. Raises when CUDA failed: then nothing is known about what was queued."""
        ...

    def close(self) -> None: ...


class Copier(Protocol):
    """Copies within the GPU, many runs at a time: gather and scatter."""

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        """Returns when all of it is done. Raises TransferFailed; then nothing is known."""
        ...

    def close(self) -> None: ...


class Gpu(Protocol):
    """One GPU as one plane uses it."""

    @property
    def nccl(self) -> Nccl: ...

    @property
    def uuid(self) -> str: ...

    def activate(self) -> None:
        """Make it the calling thread's device."""
        ...

    def stream(self) -> Stream: ...

    def copier(self) -> Copier: ...

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...


class Gpus(Protocol):
    """The GPUs of this process."""

    def why_not(self) -> str | None:
        """Why NCCL cannot be used in this process, for people."""
        ...

    def version(self) -> int:
        """NCCL's, as it writes it: 22903 is 2.29.3."""
        ...

    def shared(self) -> bool:
        """Whether two ranks may be on one GPU."""
        ...

    def uuids(self) -> list[str]: ...

    def of(self, memory: LocalMemory) -> Gpu | None:
        """The Gpu that holds `memory`; None when it is not on one."""
        ...
