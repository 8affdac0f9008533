"""Blocks cut into pieces, for two workers whose blocks hold different numbers of tokens. Pure.

The pieces of both workers hold as many tokens: the largest number that divides both block sizes. A
piece has a number of its own: block 7, cut into 3 pieces, has the pieces 21, 22 and 23. So block
ids of a layout that is cut are numbers of pieces.

The bytes of a piece are not contiguous in its page. A page consists of sections. A section consists
of rows. A row holds the same bytes of each piece, one piece after another. For example, vLLM's CPU
attention stores K as one row for each number of a head, and V as a single row:

    page of 2 pieces, heads of 3 numbers      K K  K K  K K  VVV VVV
                                              0 1  0 1  0 1   0   1
    sections                                  (3 rows of 1), (1 row of 3)

Each section is planned like a cache of its own (`of_sections`). So a plan is made for each section.
Rows are short, so pieces are copied more slowly than blocks. Where both workers have the same block
size, nothing of this module is used but one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from pullfill.errors import IncompatibleError
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.runs import BATCH_BYTES, BATCH_RUNS, RUN_BYTES, Batch, CopyPlan, Planner

WHOLE = (1, 1)
"""`pieces_of` two workers whose blocks are not cut."""


def pieces_of(ours: KvLayout, theirs: KvLayout) -> tuple[int, int]:
    """Return into how many pieces a block of each side is cut.

    Raises IncompatibleError when the blocks differ and cannot be cut."""
    if ours.units == theirs.units:
        return WHOLE
    if ours.sections != theirs.sections or not ours.sections:
        raise IncompatibleError(
            "blocks of both workers hold different numbers of tokens, and their pages are not cut "
            "alike: use the same --block-size",
            field="block_size",
        )
    common = gcd(ours.units, theirs.units)
    return ours.units // common, theirs.units // common


def cut(layout: KvLayout, pieces: int) -> KvLayout:
    """The same layout, with each block cut into pieces. Raises IncompatibleError."""
    if pieces < 1 or layout.units % pieces or not layout.sections:
        raise IncompatibleError(
            f"a block of {layout.units} units cannot be cut into {pieces} pieces",
            field="block_size",
        )
    return replace(
        layout,
        pieces=pieces,
        num_blocks=layout.num_blocks * pieces,
        page_bytes=layout.page_bytes // pieces,
    )


def cut_memory(memory: LocalMemory, pieces: int) -> LocalMemory:
    """The same memory, with each block cut into pieces."""
    return replace(memory, layout=cut(memory.layout, pieces))


def of_sections(layout: KvLayout) -> list[KvLayout]:
    """One layout for each section of a layout that is cut. Otherwise the layout itself."""
    if not layout.pieces:
        return [layout]
    found, at = [], layout.base_offset
    for rows, nbytes in layout.sections:
        page = nbytes * (layout.units // layout.pieces)
        found.append(replace(layout, base_offset=at, page_bytes=page, rows=rows))
        at += rows * nbytes * layout.units
    return found


@dataclass(frozen=True, slots=True)
class CutPlan:
    """As CopyPlan: one plan for each section, of the same pieces."""

    parts: list[CopyPlan]

    @property
    def blocks(self) -> int:
        """Number of pieces."""
        return self.parts[0].blocks

    @property
    def runs(self) -> int:
        return sum(part.runs for part in self.parts)

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts)

    def batches(
        self,
        max_bytes: int = BATCH_BYTES,
        max_runs: int = BATCH_RUNS,
        run_bytes: int = RUN_BYTES,
    ) -> Iterator[Batch]:
        for part in self.parts:
            yield from part.batches(max_bytes, max_runs, run_bytes)


class CutPlanner:
    """As Planner, for two layouts that are cut."""

    def __init__(self, source: KvLayout, target: KvLayout) -> None:
        pairs = zip(of_sections(source), of_sections(target), strict=True)
        self._planners = [Planner(*pair) for pair in pairs]

    def plan(self, source_pieces: Sequence[int], target_pieces: Sequence[int]) -> CutPlan:
        return CutPlan([one.plan(source_pieces, target_pieces) for one in self._planners])


def planner(source: KvLayout, target: KvLayout) -> Planner | CutPlanner:
    """Return what plans copies between two layouts. Both are cut, or neither."""
    return (CutPlanner if source.pieces else Planner)(source, target)
