"""How a worker's process ends when it fails."""

from __future__ import annotations

import pytest

from pullfill.errors import ConfigError
from pullfill.runtime import log
from pullfill.worker import run


@pytest.mark.parametrize("debug", ["", "1"])
async def test_a_worker_that_ends_shows_where_if_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], debug: str
) -> None:
    async def serve() -> int:
        raise ConfigError("no good")

    codes: list[int] = []
    monkeypatch.setenv(log.DEBUG_ENV, debug)
    monkeypatch.setattr(run, "leave", codes.append)
    monkeypatch.setattr(run.check, "require_version", lambda: "")
    await run._serve("decode", serve)
    told = capsys.readouterr().err
    assert codes == [2]
    assert told.endswith("error: no good\n")
    assert ("in serve" in told) == bool(debug)
