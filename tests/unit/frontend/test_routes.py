"""What a frontend's own routes add to the reports of the workers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from pullfill.engine import front_wire
from pullfill.frontend.routes import Admin
from pullfill.frontend.routing.prefixes import Prefixes
from pullfill.snapshot import Cluster, WorkerRow
from tests.support.frontend_rig import FakeDecode, Rig, rig
from tests.support.waiting import soon

LOAD = front_wire.LoadReport(
    running=1, waiting=2, uncached_tokens_queued=3, active_blocks=4, free_blocks=5
)


class _View:
    """Reports of a decode worker that is connected, of one that is not, and of a prefill worker."""

    def records(self) -> list[Any]:
        return []

    async def reasons(self) -> list[str]:
        return []

    async def status(self) -> Cluster:
        roles = {"decode-1": "decode", "decode-2": "decode", "prefill-1": "prefill"}
        rows = (
            WorkerRow(instance_id=name, role=role, state="ready", troubles=("old",))
            for name, role in roles.items()
        )
        return Cluster(workers=tuple(rows))


def admin(r: Rig) -> Admin:
    parts: dict[str, Any] = {
        "view": _View(), "requests": SimpleNamespace(), 
        "refused": list, "page": SimpleNamespace(),
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
        (row, *_) = (await body(admin(r).status(request)))["workers"]
        ready = await body(admin(r).ready(request))
    assert row["routing"]["prefix"]["state"] == "cold"
    assert [t for t in row["troubles"] if "its cached blocks are not known" in t]
    assert ready["ready"], "it is served like any other"
    assert ready["degraded"]
    assert [why for why in ready["reasons"] if why.startswith("decode-1: its cached blocks")]
