"""The results of self-checks (remote compared with local prefills), for `doctor` and `recheck`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from rich.console import Console

from pullfill.config import ClusterRef
from pullfill.deploy.machine import FAIL, OK, WARN, Finding
from pullfill.deploy.members import Members
from pullfill.errors import PullfillError
from pullfill.registry import self_checks
from pullfill.wire import SelfCheck


def findings(ref: ClusterRef) -> Iterator[Finding]:
    """Yield a line for each failed check. If none has failed, say how many pairs have passed."""
    try:
        results = asyncio.run(_kept(ref))
    except PullfillError as exc:
        yield Finding(WARN, f"self-checks cannot be read: {exc}", "see etcd above")
        return
    failed = [result for result in results if not result.passed]
    for result in failed:
        what, _, advice = result.advice().partition(". ")
        yield Finding(FAIL, what, advice)
    if results and not failed:
        yield Finding(OK, f"self-check passed for {len(results)} kind(s) of worker pairs")


def recheck(ref: ClusterRef) -> int:
    """Remove all failures. Connected workers compare again at once."""
    cleared = asyncio.run(_clear(ref))
    text = "no self-check has failed: nothing to do"
    if cleared:
        text = f"forgot {len(cleared)} failed self-check(s); the workers compare again now"
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


async def _kept(ref: ClusterRef) -> list[SelfCheck]:
    async with Members(ref, wait_s=2.0) as members:
        return list((await self_checks.kept(members.client, ref.namespace)).values())


async def _clear(ref: ClusterRef) -> list[str]:
    async with Members(ref) as members:
        return await self_checks.clear(members.client, ref.namespace)
