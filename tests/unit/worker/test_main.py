"""How a worker's process ends when it fails."""

from __future__ import annotations

import pytest

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
