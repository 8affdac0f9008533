"""What a frontend's own routes add to the reports of the workers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from pullfill.frontend.routes import Admin
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.snapshot import Cluster, WorkerRow
from tests.support.frontend_rig import FakeDecode, Rig, rig
from tests.support.waiting import soon


class _View:
    """The report of a decode worker."""

    def records(self) -> list[Any]:
        return []

    async def reasons(self) -> list[str]:
        return []

    async def status(self) -> Cluster:
        row = WorkerRow(instance_id="decode-1", role="decode", state="ready", troubles=("old",))
        return Cluster(workers=(row,))


def admin(r: Rig) -> Admin:
    parts: dict[str, Any] = {
        "view": _View(), "requests": SimpleNamespace(), 
        "refused": list, "page": SimpleNamespace(), "trouble": r.pool.trouble,
    }  # fmt: skip
    return Admin(cast(Any, None), r.pool, **parts)


async def body(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await answer).body)
    return found


async def test_a_worker_whose_blocks_are_not_known_is_a_trouble_and_a_reason() -> None:
    worker, request = FakeDecode("decode-1", prefix_block_size=16), cast(Any, None)
    now = asyncio.get_running_loop().time
    async with rig(worker, prefixes=Prefixes(9, missing_s=0.05)) as r:
        await soon(lambda: bool(r.pool.prefixes.troubles(now())))
        (row,) = (await body(admin(r).status(request)))["workers"]
        ready = await body(admin(r).ready(request))
    assert row["routing"]["prefix"]["state"] == "cold"
    assert [t for t in row["troubles"] if "its cached blocks are not known" in t]
    assert ready["ready"], "it is served like any other"
    assert ready["degraded"]
    assert [why for why in ready["reasons"] if why.startswith("decode-1: its cached blocks")]
