"""A batch in a GPU's memory as NCCL messages: from the blocks, or by way of a staging ring."""

from __future__ import annotations

import numpy as np

from pullfill.transfer.iovecs import Iovec, messages
from pullfill.transfer.nccl.contract import Copier, Gpu
from pullfill.transfer.stream.contract import Runs


class Staging:
    """Device memory for messages that are not contiguous, grown as needed. Owned by its plane."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._address, self._nbytes = 0, 0
        self._copier: Copier | None = None

    def of(self, nbytes: int) -> int:
        """The address of at least `nbytes`. Nothing may be in use."""
        if nbytes > self._nbytes:
            self._free()
            self._gpu.activate()
            self._address, self._nbytes = self._gpu.allocate(nbytes), nbytes
        return self._address

    def copy(self, target: Iovec, source: Iovec) -> None:
        """Runs of pairwise equal lengths. Returns when done."""
        if self._copier is None:
            self._copier = self._gpu.copier()
        self._copier.copy(
            *(np.ascontiguousarray(a) for a in (target[:, 0], source[:, 0], source[:, 1]))
        )

    def close(self) -> None:
        self._free()
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    def _free(self) -> None:
        if self._address:
            self._gpu.free(self._address)
        self._address, self._nbytes = 0, 0


class Laid:
    """A batch as messages: what is sent from or received into where, and what is copied between
    the blocks and the staging ring."""

    def __init__(self, runs: Runs, step: int, staging: Staging) -> None:
        pieces = messages(runs.iovec, step)
        staged = [piece for piece in pieces if len(piece) > 1]
        self.blocks: Iovec = np.concatenate(staged) if staged else runs.iovec[:0]
        self.ring = self.blocks.copy()
        at = staging.of(int(self.blocks[:, 1].sum())) if staged else 0
        if staged:
            ends = np.cumsum(self.blocks[:, 1])
            self.ring[:, 0] = np.uint64(at) + ends - self.blocks[:, 1]
        self.places: list[tuple[int, int]] = []
        for piece in pieces:
            nbytes = int(piece[:, 1].sum())
            if len(piece) == 1:
                self.places.append((int(piece[0, 0]), nbytes))
            else:
                self.places.append((at, nbytes))
                at += nbytes
