"""Fixtures and rules for all tests. Helpers that start processes are in tests/support/."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pullfill.deploy.accelerator import gpu_count
from pullfill.options import UpOptions
from tests.support.checkpoint import tiny_checkpoint
from tests.support.forks import Forks
from tests.support.late import READ_WITH_TESTS, loaded_large, uses_late
from tests.support.oracle import Oracle
from tests.support.zygote import zygote

# Tests name their clusters themselves; one of the developer's must not leak in.
for _name in ("PULLFILL_STATE_DIR", "PULLFILL_FAILPOINTS", "PULLFILL_DEBUG", "PULLFILL_LOG_LEVEL"):
    os.environ.pop(_name, None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# What is made while tests are collected stays until the end: collecting garbage in it finds none.
gc.disable()
atexit.register(gc.unfreeze)  # nanobind calls everything a leak that is still frozen then

# The same examples in each run, however long one takes on a busy machine. FUZZ=N: random ones.
settings.register_profile(
    "ours",
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ours")

# A run that is told to end still ends what it started.
signal.signal(signal.SIGTERM, signal.default_int_handler)

_ORDER = ("unit", "benchmarks", "contract", "integration", "chaos", "netns", "gpu")
_FORKED_ORDER = ("contract", "benchmarks", "unit")
_QUICK = {"unit", "contract"}
_CLUSTERS = ("integration", "chaos", "netns")
_SHARED = ("keeper", "shared_cluster")
"""Session fixtures that hold a cluster for several files. With `--forks`, one process runs these
files one after the other, and then ends the cluster: an idle one takes 5 % of a core."""
_LONGEST = (
    "keeper shared_cluster test_both_sides test_up_keeps test_tensor_parallel test_offloading "
    "test_stock_cluster test_speculation test_hosts test_cli test_suspects test_spine "
    "test_failed_step test_lora test_two_decode_workers test_models test_live_page test_outages "
    "test_security test_modes test_multimodal test_cut_off test_frontend_http"
).split()
"""The engine tests that take longest. A name is a file, or a cluster: then it stands for all files
that share it. With `--forks` they run first. Else one process would end with a long file, and the
others would have nothing left to do."""
_shared_by: dict[Path, str] = {}
"""Which of `_SHARED` a file uses."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N processes")


def _together(item: pytest.Item) -> str | None:
    """Return a name for the tests that one process runs with `--forks`. None: any process.

    The tests of an engine test file share a cluster, so one process runs the whole file, and all
    files that use the same one of `_SHARED`. All quick tests that import large modules run in one
    process, which imports these once."""
    if _QUICK.isdisjoint(item.path.parts):
        return _shared_by.get(item.path, item.path.stem)
    return "large" if uses_late(getattr(item, "module", None)) else None


def pytest_configure(config: pytest.Config) -> None:
    if forks := config.getoption("forks"):
        config.pluginmanager.register(Forks(forks, _together))
        # Idle compute threads of several processes would take turns at spinning on the same cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if any(name in argument for argument in config.args for name in _CLUSTERS):
            zygote()  # one for all processes; it imports while tests are collected


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name the test that has failed also where its failure cannot be shown.

    `ast.parse` of Python 3.11.7 fails if another thread parses, too (python/cpython#106905)."""
    try:
        return (yield)
    except SystemError as exc:
        text = f"{call.excinfo}\nIts lines cannot be shown: {exc}"
        when = call.when
        assert when != "collect"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, when)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick tests first, whatever the order of the folders on the command line. With `--forks`, the
    longest first."""
    forked = bool(config.getoption("forks"))
    order, longest = _FORKED_ORDER if forked else _ORDER, [*_LONGEST, "large"]
    for item in items:
        for name in set(_SHARED).intersection(getattr(item, "fixturenames", ())):
            _shared_by[item.path] = name

    def rank(item: pytest.Item) -> int:
        if forked and (name := _together(item)) in longest:
            return longest.index(name) - len(longest)
        return next((i for i, name in enumerate(order) if name in item.path.parts), len(order))

    items.sort(key=rank)
    if not gpu_count():  # transports into GPU memory have nothing to write to here
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[READ_WITH_TESTS] = loaded_large()
    gc.enable()
    gc.freeze()


def _close_after_the_last_turns(loop: BaseSelectorEventLoop) -> None:
    """A transport that is closed lets go of its socket in the loop's next turn. One that a test, or
    what it cancelled, closed last gets it here. One that is open even then is a leak of this test:
    left alone, it would be reported whenever the collector comes by, in some later test."""
    if not loop.is_closed() and not loop.is_running():
        for _ in range(3):
            loop.run_until_complete(asyncio.sleep(0))
    open_ones = [t for t in getattr(loop, "_transports", {}).values() if t._sock is not None]
    told = [f"{t!r} {t._sock!r}" for t in open_ones]
    for transport in open_ones:
        transport._sock.close()
        transport._sock = None
    _close(loop)
    assert not told, f"a loop was closed with open sockets: {told}"


_close = BaseSelectorEventLoop.close
setattr(BaseSelectorEventLoop, "close", _close_after_the_last_turns)  # noqa: B010 (mypy)


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that every `pullfill` command of the test finds by itself."""
    directory = tmp_path / "state"
    monkeypatch.setenv("PULLFILL_STATE_DIR", str(directory))
    return directory


@pytest.fixture
def ups(monkeypatch: pytest.MonkeyPatch) -> list[UpOptions]:
    """The options of each call of `pullfill up`. Such a call starts nothing."""
    calls: list[UpOptions] = []
    monkeypatch.setattr("pullfill.deploy.up.up", lambda options, *_, **__: calls.append(options))
    return calls


@pytest.fixture(scope="session")
def model_path() -> Path:
    """A tiny checkpoint with random weights whose answers depend on every token of the prompt."""
    return tiny_checkpoint()


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Iterator[Oracle]:
    """One aggregated engine for the whole run: what it answers is right."""
    with Oracle(model_path) as engine:
        yield engine
