"""How a worker's process ends when it fails."""

from __future__ import annotations

import pytest

from pullfill.engine.host import EngineHost
from pullfill.engine.life import EngineLife
from pullfill.errors import ConfigError, NotNow
from pullfill.runtime import log
from pullfill.worker import main


@pytest.mark.parametrize(("debug", "kind", "code"), [("", ConfigError, 2), ("1", NotNow, 1)])
async def test_a_worker_that_ends_shows_where_if_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    debug: str,
    kind: type[ConfigError],
    code: int,
) -> None:
    async def serve() -> int:
        raise kind("no good")

    codes: list[int] = []
    monkeypatch.setenv(log.DEBUG_ENV, debug)
    monkeypatch.setattr(main, "leave", codes.append)
    monkeypatch.setattr(main.check, "require_version", lambda: "")
    await main._serve("decode", serve)
    told = capsys.readouterr().err
    assert codes == [code]
    assert told.endswith("error: no good\n")
    assert ("in serve" in told) == bool(debug)


async def test_memory_that_a_dying_process_still_holds_is_no_mistake() -> None:
    def make() -> EngineHost:
        raise ValueError("Free memory on device cuda:0 (3/80 GiB) is less than desired\nmore")

    thread = EngineLife(make, lambda host, core: None)
    thread.start()
    with pytest.raises(NotNow, match=r"^the engine did not start: Free memory .* desired$"):
        await thread.ready
    await thread.stop()
