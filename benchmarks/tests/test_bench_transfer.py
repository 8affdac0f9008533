"""The transfer benchmark on tiny sizes: what it moves and what it compares."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks import bench_transfer as bench
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import plan
from tests.support.transfer_rigs import shm_rig

SIZES = bench.Sizes(moved=256 << 10, pages=(4 << 10, 16 << 10))


class TestCases:
    def test_each_moves_as_much_to_other_places(self) -> None:
        made = list(bench.cases(SIZES))
        assert [c.name for c in made] == [
            "4 KiB scattered", "4 KiB contiguous", "16 KiB scattered", "16 KiB contiguous"
        ]  # fmt: skip
        for case in made:
            assert len(set(case.target)) == len(case.target) == len(case.source)
            assert len(case.target) * case.page * bench.LAYERS == SIZES.moved
            assert max(*case.source, *case.target) < case.blocks
            steps = set(np.diff(case.target).tolist()) | set(np.diff(case.source).tolist())
            assert (steps == {1}) == case.contiguous

    def test_the_plain_loop_moves_what_the_plan_does(self) -> None:
        for case in bench.cases(SIZES):
            layout = dense_layout(bench.LAYERS, case.blocks, 1, case.page)
            planned = set()
            todo = plan(layout, layout, case.source, case.target)
            for batch in (b.flat() for b in todo.batches()):
                for s, t, n in zip(batch.source, batch.target, batch.nbytes, strict=True):
                    planned |= {(int(s + i), int(t + i)) for i in range(0, int(n), case.page)}
            assert set(bench.pairs_of(case)) == planned


def test_the_raw_pair_delivers_the_bytes() -> None:
    receiver = bench.RawReceiver()
    for case in bench.cases(SIZES):
        local = bench.local_of(case)
        receiver.target = np.zeros(SIZES.moved, np.uint8)
        sender = bench.RawSender(receiver.port, local, case, SIZES.moved)
        sender()
        sender.close()
        if case.contiguous:
            expected = local.data[: SIZES.moved]
        else:
            runs = [local.data[s : s + case.page] for s, _ in bench.pairs_of(case)]
            expected = np.concatenate(runs)
        np.testing.assert_array_equal(receiver.target, expected)
    receiver.close()


def test_tcp_reaches_another_process() -> None:
    rows = bench.tcp_rows(SIZES, 1)
    assert len(rows) == 4
    assert all((row.value or 0) > 0 and (row.peer_value or 0) > 0 for row in rows)


def test_rows_in_one_process(tmp_path: Path) -> None:
    rig = shm_rig(tmp_path)
    rows = bench.write_rows(rig, SIZES, 1) + bench.fence_rows(rig, 1)
    assert [bool(row.target) for row in rows] == [True, False, *[True] * 3, False, *[True] * 2,
                                                  False, True]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
