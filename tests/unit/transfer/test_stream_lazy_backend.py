"""The thread that asks what is idle: there only while something is watched."""

from __future__ import annotations

import logging
import threading

import pytest

from pullfill.transfer.stream.backends import Reaper
from tests.support.waiting import eventually


class Thing:
    def __init__(self, error: Exception | None = None) -> None:
        self.asked = 0
        self.error = error

    def release_if_idle(self, now: float) -> None:
        self.asked += 1
        if self.error:
            raise self.error


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kv-idle"}


def test_asks_everything_watched_until_it_is_forgotten() -> None:
    others = threads()  # of earlier tests: any of them may end meanwhile
    reaper = Reaper(0.002)
    one, two = Thing(), Thing()
    reaper.watch(one)
    reaper.watch(one)
    reaper.watch(two)
    assert len(threads() - others) == 1
    eventually(lambda: one.asked > 1 and two.asked > 1, "nobody is asked")
    reaper.forget(one)
    seen = one.asked
    eventually(lambda: two.asked > seen + 10, "nobody is asked any more")
    assert one.asked <= seen + 1, "at most the call that was under way"
    reaper.forget(two)
    reaper.forget(two)
    eventually(lambda: not threads() - others, "the thread goes on for nothing")
    reaper.watch(one)
    eventually(lambda: one.asked > seen + 2, "not watched again")
    reaper.forget(one)
    eventually(lambda: not threads() - others, "the thread goes on for nothing")


def test_one_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    reaper = Reaper(0.002)
    bad, good = Thing(RuntimeError("cannot")), Thing()
    with caplog.at_level(logging.CRITICAL):
        reaper.watch(bad)
        reaper.watch(good)
        eventually(lambda: bad.asked > 2 and good.asked > 2, "one failure ended it")
        reaper.forget(bad)
        reaper.forget(good)


def test_a_thread_that_could_not_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reaper, thing = Reaper(0.002), Thing()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        reaper.watch(thing)
    monkeypatch.undo()
    reaper.watch(thing)
    eventually(lambda: thing.asked > 0, "what is idle stays for ever")
    reaper.forget(thing)
