"""What the nccl backends need of NCCL and of a GPU, so that all of it can be tested without one.

`Library` is libnccl with its C names and ctypes arguments. `nccl_cuda.py` brings the real one, and
`tests/support/fake_nccl.py` one that keeps the rules of NCCL's manual. Addresses are of the GPU's
memory. Errors of CUDA are exceptions of any class.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]


class Library(Protocol):
    """libnccl as ctypes shows it. Each function but the two for texts returns an ncclResult_t."""

    def ncclGetVersion(self, version: Any) -> int: ...

    def ncclGetErrorString(self, result: int) -> bytes: ...

    def ncclGetLastError(self, comm: Any) -> bytes | None: ...

    def ncclGetUniqueId(self, unique_id: Any) -> int: ...

    def ncclCommInitRankConfig(
        self, comm: Any, nranks: int, unique_id: Any, rank: int, config: Any
    ) -> int: ...

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int: ...

    def ncclGroupStart(self) -> int: ...

    def ncclGroupEnd(self) -> int:
        """Keeps the GIL: for groups that return at once."""
        ...

    def ncclGroupEndOfAborts(self) -> int:
        """ncclGroupEnd without the GIL: a group of aborts waits for the GPU."""
        ...

    def ncclSend(
        self, address: Any, count: Any, datatype: int, peer: int, comm: Any, stream: Any
    ) -> int: ...

    def ncclRecv(
        self, address: Any, count: Any, datatype: int, peer: int, comm: Any, stream: Any
    ) -> int: ...

    def ncclCommRevoke(self, comm: Any, flags: int) -> int: ...

    def ncclCommAbort(self, comm: Any) -> int: ...


class Stream(Protocol):
    """A CUDA stream of one communicator."""

    @property
    def handle(self) -> int: ...

    @property
    def done(self) -> bool:
        """Whether everything queued is done. Raises when CUDA failed: then nothing is known about
        what was queued."""
        ...

    def close(self) -> None: ...


class Copier(Protocol):
    """Copies within the GPU, many runs at a time: gather and scatter. Thread-safe."""

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        """Returns when all of it is done. Raises TransferFailed when nothing of it goes on."""
        ...


class Gpu(Protocol):
    """One GPU of this process."""

    @property
    def uuid(self) -> str: ...

    def library(self) -> Library: ...

    def activate(self) -> None:
        """Make it the calling thread's device."""
        ...

    def stream(self) -> Stream: ...

    def copier(self) -> Copier: ...

    def allocate(self, nbytes: int) -> int:
        """For as long as the process lives: giving device memory back waits for everything that
        runs on the GPU, also for a kernel that waits for another worker."""
        ...
