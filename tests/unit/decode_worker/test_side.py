"""The decode side as worker/process.py sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pullfill.decode_worker.side import DecodeSide
from pullfill.options import WorkerOptions


async def test_a_stuck_engine_that_goes_on_does_not_end_a_drain() -> None:
    async def call(work: Any, until: Any) -> None:
        pass

    outlook = SimpleNamespace(draining=False)
    # Every part does nothing.
    part: Any = SimpleNamespace(
        host=SimpleNamespace(submit=lambda _: None, call=call), dead=None, dismiss=bool,
        reopen=lambda: None, ledger=SimpleNamespace(give_up_all=lambda *_, **__: None),
    )  # fmt: skip
    side = DecodeSide(
        *[part] * 9, outlook, None, part, WorkerOptions(model="m"), lambda _: None  # type: ignore[arg-type]
    )  # fmt: skip
    said = []
    for stuck in (True, False):
        side.engine_stuck(stuck)
        said.append(outlook.draining)
    await side.stop_taking()
    for stuck in (True, False):
        side.engine_stuck(stuck)
        said.append(outlook.draining)
    assert said == [True, False, True, True]
    await side.resume()
    side.engine_stuck(False)
    assert not outlook.draining
