"""The transfer benchmark on tiny sizes: what it moves, what it compares, what it draws."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks import bench_transfer, bench_transfer_overlap, report
from benchmarks import bench_transfer_copies as copies
from benchmarks import bench_transfer_remote as remote
from benchmarks.live import BenchError
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import plan
from tests.support.transfer_rigs import shm_rig

SIZES = copies.Sizes(moved=256 << 10, pages=(4 << 10, 16 << 10))


class TestRows:
    def test_lower_limits_are_kept_inclusive(self) -> None:
        assert report.versus("m", 0.9, "GB/s", "peer", 1.0, at_least=0.9).ok
        missed = report.versus("m", 0.89, "GB/s", "peer", 1.0, at_least=0.9)
        assert (missed.ok, missed.target) == (False, "ratio >= 0.9")
        assert not report.row("m", 2.0, "x", at_least=3).ok

    def test_what_was_not_measured_says_so_and_fails_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(report, "RESULTS", tmp_path)
        rows = [report.missing("m", "NIXL", "not installed")]
        assert report.finish("it", rows, quiet=True, save=True, title="It") == 0
        assert "| m |  | not measured: not installed | NIXL |" in (tmp_path / "it.md").read_text()
        assert report.read_rows("it") == rows


class TestCases:
    def test_each_moves_as_much_to_other_places(self) -> None:
        made = list(copies.cases(SIZES))
        assert [c.name for c in made] == [
            "4 KiB scattered", "4 KiB contiguous", "16 KiB scattered", "16 KiB contiguous"
        ]  # fmt: skip
        for case in made:
            assert len(set(case.target)) == len(case.target) == len(case.source)
            assert len(case.target) * case.page * copies.LAYERS == SIZES.moved
            assert max(*case.source, *case.target) < case.blocks
            steps = set(np.diff(case.target).tolist()) | set(np.diff(case.source).tolist())
            assert (steps == {1}) == case.contiguous

    def test_the_plain_loop_moves_what_the_plan_does(self) -> None:
        for case in copies.cases(SIZES):
            layout = dense_layout(copies.LAYERS, case.blocks, 1, case.page)
            planned = set()
            todo = plan(layout, layout, case.source, case.target)
            for batch in (b.flat() for b in todo.batches()):
                for s, t, n in zip(batch.source, batch.target, batch.nbytes, strict=True):
                    planned |= {(int(s + i), int(t + i)) for i in range(0, int(n), case.page)}
            assert set(copies.pairs_of(case)) == planned

    def test_medians_are_of_interleaved_rounds(self) -> None:
        order: list[str] = []
        ticks = itertools.count()
        ways = {name: lambda name=name: order.append(name) for name in "abc"}
        took = copies.interleaved(ways, 9, lambda: float(next(ticks)))
        assert took == {"a": 1.0, "b": 1.0, "c": 1.0}
        rounds = [order[at : at + 3] for at in range(0, 30, 3)]
        assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
        assert len(set(map(tuple, rounds))) > 2, "not always the same one second"


class TestCopies:
    def test_rows_of_every_part(self, tmp_path: Path) -> None:
        rig = shm_rig(tmp_path)
        rows = copies.write_rows(rig, SIZES, 1, time.perf_counter)
        assert [r.target for r in rows] == ["ratio >= 0.9", "", *["ratio >= 0.9"] * 3, "",
                                            *["ratio >= 0.9"] * 2]  # fmt: skip
        rows += copies.fence_rows(rig, 1, time.perf_counter)
        assert all(r.value > 0 for r in rows)
        assert list(tmp_path.iterdir()) == []

    def test_without_targets_nothing_is_missed(self, tmp_path: Path) -> None:
        before = sys.getswitchinterval()
        with copies.busy_thread():
            assert sys.getswitchinterval() == copies.SWITCH_INTERVAL_S
            rows = copies.write_rows(
                shm_rig(tmp_path), SIZES, 1, time.perf_counter, ", busy", targets=False
            )
        assert sys.getswitchinterval() == before
        assert all(r.ok and r.metric.endswith(", busy") for r in rows)


def test_the_raw_pair_delivers_the_bytes() -> None:
    receiver = remote.RawReceiver()
    for case in copies.cases(SIZES):
        local = remote._local(case)
        receiver.target = np.zeros(SIZES.moved, np.uint8)
        sender = remote.RawSender(receiver.port, local, case, SIZES.moved)
        sender()
        sender.close()
        if case.contiguous:
            expected = local.data[: SIZES.moved]
        else:
            runs = [local.data[s : s + case.page] for s, _ in copies.pairs_of(case)]
            expected = np.concatenate(runs)
        np.testing.assert_array_equal(receiver.target, expected)
    receiver.close()


def test_tcp_and_shm_reach_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "nixl_api", lambda: None)
    with remote.other_process() as other:
        rows = remote.tcp_rows(other, SIZES, 1)
        rows += remote.nixl_rows(other, SIZES, 1)
    assert len(rows) == 8
    assert all(r.value > 0 and r.peer_value > 0 for r in rows[:4])
    assert all(r.value is None and "not installed" in r.unit for r in rows[4:])


def test_beside_nixl_stands_what_the_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "nixl_api", lambda: True)
    monkeypatch.setattr(remote, "NixlWriter", lambda *_: lambda: None)
    with remote.other_process() as other:
        region = other.region
        monkeypatch.setattr(other, "region", lambda c, nixl: region(c, nixl=False) | {"nixl": {}})
        rows = remote.nixl_rows(other, SIZES, 1)
    for at, case in enumerate(copies.cases(SIZES)):
        three = rows[3 * at : 3 * at + 3]
        assert [r.metric for r in three] == [
            f"{what}, {case.name}" for what in ("shm write", "memmove per run", "one memcpy")
        ]
        assert [r.target for r in three] == ["ratio >= 3", "", ""]
        assert len({r.peer_value for r in three}) == 1
        assert all(r.peer == "NIXL/UCX" and r.value for r in three)


def test_plain_ways_move_the_runs_and_all_at_once() -> None:
    case = next(copies.cases(SIZES))
    local = remote._local(case)
    target = np.zeros_like(local.data)
    loop, once = copies.plain_ways(case, local.memory.address, target.ctypes.data, SIZES.moved)
    loop()
    expected = np.zeros_like(target)
    for s, t in copies.pairs_of(case):
        expected[t : t + case.page] = local.data[s : s + case.page]
    np.testing.assert_array_equal(target, expected)
    target[:] = 0
    once()
    np.testing.assert_array_equal(target[: SIZES.moved], local.data[: SIZES.moved])
    assert not target[SIZES.moved :].any()


class TestOverlap:
    @staticmethod
    def record(chunks: int, tail: float, write: float, path: str = "remote") -> dict[str, Any]:
        timings = {"tail": tail, "kv_write": write, "prefill": 100.0 * chunks}
        return {"path": path, "kv_bytes": chunks << 26, "timings_ms": timings}

    def test_the_tail_is_held_against_one_chunk(self) -> None:
        long = [self.record(5, tail, 60.0) for tail in (12.0, 13.0, 90.0)]
        short = [self.record(1, 1.0, write) for write in (9.0, 10.0, 11.0)]
        rows = bench_transfer_overlap.overlap_rows(long, short)
        assert (rows[-1].value, rows[-1].peer_value, rows[-1].ratio) == (13.0, 10.0, 1.3)
        assert rows[-1].ok
        assert rows[0].value == 64
        long[1] = self.record(5, 13.1, 60.0)
        assert not bench_transfer_overlap.overlap_rows(long, short)[-1].ok

    def test_a_local_prefill_is_no_result(self) -> None:
        with pytest.raises(BenchError, match="not prefilled remotely"):
            bench_transfer_overlap.overlap_rows(
                [self.record(5, 1.0, 1.0)], [self.record(1, 1.0, 1.0, path="local")]
            )


def test_parts_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "tpc"])
    with pytest.raises(SystemExit):
        bench_transfer.main()
    assert "no part tpc" in capsys.readouterr().err


def test_results_on_file_can_be_read() -> None:
    assert report.read_rows("transfer")
    assert msgspec.json.decode((report.RESULTS / "transfer.json").read_bytes())["machine"]
