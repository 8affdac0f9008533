"""Who still copies by GPU: records in the fence file, and what ends of processes prove."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from pullfill.errors import PeerUnavailable
from pullfill.transfer.cuda_ipc.writers import (
    RECORDS,
    WriterRecord,
    has_ended,
    process_word,
    quiet,
    why_no_proof,
)
from pullfill.transfer.shm import lock
from tests.support.fake_gpu import FakeDriver


@pytest.fixture
def fence(tmp_path: Path) -> Path:
    path = tmp_path / "x.fence"
    path.write_bytes(bytes(8192))
    return path


@pytest.fixture
def fds(fence: Path) -> Iterator[list[int]]:
    """Three open file descriptions of the fence file."""
    opened = [os.open(fence, os.O_RDWR) for _ in range(3)]
    yield opened
    for fd in opened:
        os.close(fd)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_has_ended_when_the_kernel_says_so_and_before_it_is_waited_for(
    child: subprocess.Popen[bytes],
) -> None:
    word = process_word(child.pid)
    assert not has_ended(word)
    assert has_ended(word + (1 << 22)), "another process with its number, started at another time"
    child.send_signal(signal.SIGSTOP)
    assert not has_ended(word), "a stopped process is not a dead one"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(word), "a zombie has let go of everything"
    child.wait()
    assert has_ended(word)
    with pytest.raises(ProcessLookupError):
        process_word(child.pid)


def test_not_being_able_to_look_is_no_proof(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    word = process_word(child.pid)
    child.kill()
    child.wait()
    refuse = Mock(side_effect=OSError(24, "Too many open files"))
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not has_ended(word)


def test_many_descriptors_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """select() cannot look at descriptors above 1023."""
    real = os.pidfd_open

    def high(pid: int) -> int:
        fd = real(pid)
        os.dup2(fd, 1500, inheritable=False)
        os.close(fd)
        return 1500

    monkeypatch.setattr(os, "pidfd_open", high)
    assert not has_ended(process_word(os.getpid()))


def test_a_process_that_proc_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may be mounted so that it shows no processes of other users (hidepid=2)."""
    word = process_word(os.getpid())
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=FileNotFoundError))
    assert not has_ended(word)


def mapped(fd: int) -> memoryview:
    """The fence file, as its owner sees it."""
    return memoryview(mmap.mmap(fd, 8192)).cast("Q")


def holders(fence: Path) -> list[int]:
    """The processes in the first two records."""
    return [struct.unpack_from("<Q", fence.read_bytes(), 1024 + 16 * i)[0] for i in (0, 1)]


def test_a_dead_writers_record_is_taken_back_once_its_end_is_proved(
    fence: Path, fds: list[int]
) -> None:
    code = (
        "import os, sys; from pullfill.transfer.cuda_ipc.writers import WriterRecord; "
        "r = WriterRecord(os.open(sys.argv[1], os.O_RDWR)); r.begin(7); print(flush=True); input()"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(fence)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline()
    theirs, ours = process_word(writer.pid), process_word(os.getpid())
    words = mapped(fds[0])
    assert not quiet(words, 7)
    writer.kill()
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
    # Nobody takes the record before its owner has seen the end of who had it.
    mine = WriterRecord(fds[1])
    assert holders(fence) == [theirs, ours]
    assert quiet(words, 7)
    again = WriterRecord(fds[2])
    assert holders(fence) == [ours, ours]
    writer.communicate()
    mine.begin(0)
    assert not quiet(words, 0), "each record counts, not the first alone"
    mine.end()
    assert quiet(words, 0)
    again.close()
    mine.close()


def test_no_record_is_left_for_more_sessions_than_there_are(fds: list[int]) -> None:
    assert lock.try_exclusive(fds[2], 1024 + 16, 16 * (RECORDS - 1)), "others have all but one"
    record = WriterRecord(fds[0])
    with pytest.raises(PeerUnavailable, match="already"):
        WriterRecord(fds[1])
    record.close()
    WriterRecord(fds[1]).close()


def test_a_kernel_that_does_not_tell_of_ends_gives_no_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse = Mock(side_effect=OSError(38, "Function not implemented"))
    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert "pidfd_open: [Errno 38]" in (why_no_proof(FakeDriver(), 0) or "")
