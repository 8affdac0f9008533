"""A lease that is gone: revoked by somebody, or lost in an outage."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from pullfill.registry.client import Answer, Header
from pullfill.registry.membership import EtcdLease, LeaseJudge

STORE = Header(cluster_id=7, revision=10, raft_term=2)


def judge() -> LeaseJudge:
    return LeaseJudge(ttl_s=6.0, last_ok=1000.0, header=STORE)


@pytest.mark.parametrize(
    "header",
    [
        Header(cluster_id=8, revision=12, raft_term=2),
        Header(cluster_id=7, revision=12, raft_term=3),
        Header(cluster_id=7, revision=9, raft_term=2),
    ],
    ids=["other cluster", "restarted", "went back"],
)
def test_gone_from_another_store_is_an_outage(header: Header) -> None:
    assert not judge().revoked(1002.0, header)


def test_gone_after_a_break_is_an_outage_until_a_later_keep_alive() -> None:
    rule = judge()
    rule.broke(1001.0)
    assert not rule.revoked(1002.0, STORE)
    rule.alive(1000.5, STORE)  # sent before the break: proves nothing about after it
    assert not rule.revoked(1002.0, STORE)
    rule.alive(1001.5, STORE)
    assert rule.revoked(1002.0, STORE)


@pytest.mark.parametrize("etcd_s", [6.0, 3600.0, -1.0], ids=["ttl", "hour", "set back"])
def test_gone_while_every_clock_of_this_machine_stood_still_is_an_outage(etcd_s: float) -> None:
    """A paused virtual machine: no second passed here, but etcd's clock went on."""
    rule = judge()
    rule.alive(1000.0, msgspec.structs.replace(STORE, date=100.0))
    later = msgspec.structs.replace(STORE, date=100.0 + etcd_s)
    assert not rule.revoked(1001.0, later)


async def test_gone_after_this_machine_slept_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux stops CLOCK_MONOTONIC while the machine sleeps, and CLOCK_BOOTTIME goes on."""
    slept_s, real = 0.0, time.clock_gettime

    def boot_clock(which: int) -> float:
        return real(which) + (slept_s if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", boot_clock)
    lease = await EtcdLease.grant(Client(), 3)
    slept_s = 3600.0
    lease.check_now()
    assert not await asyncio.wait_for(lease.was_revoked(), 10)


class Client:
    """An etcd that does not know its leases any more."""

    async def grant_lease(self, ttl_s: int) -> Answer:
        return Answer(STORE, id=1, ttl=ttl_s)

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> Answer:
        return Answer(STORE)
