"""What the registry decides without a server: names, URLs, leases, watch state, settings."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill.errors import ConfigError, RegistryUnavailable
from pullfill.registry import keys, settings
from pullfill.registry.client import Header, KeepAlive, KeyValue, prefix_end
from pullfill.registry.gateway import parse_url, redact
from pullfill.registry.lease import Lease, LeaseEnd, LeaseJudge
from pullfill.registry.watch import Delete, Put, _Event, _Known
from pullfill.wire import QueueSettings, RouterConfig

STORE = Header(cluster_id=7, member_id=1, revision=10, raft_term=2)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


# ------------------------------------------------------------------ names


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_prefix_end_bounds_exactly_the_prefixed_keys(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    inside = key >= prefix and (end == b"\0" or key < end)
    assert inside == key.startswith(prefix)


def test_worker_key_round_trip_and_strangers() -> None:
    key = keys.worker("ns", "decode", "decode-1a2b").encode()
    assert key == b"/pullfill/ns/workers/decode/decode-1a2b"
    assert keys.parse_worker("ns", key) == ("decode", "decode-1a2b")
    for other in (b"/pullfill/ns2/workers/decode/x", b"/pullfill/ns/workers/decode", key + b"/y",
                  b"/pullfill/ns/workers/decode/\xff"):  # fmt: skip
        assert keys.parse_worker("ns", other) is None
    assert keys.descriptor("ns", "decode-1", 3) == "/pullfill/ns/descriptors/decode-1/3"
    with pytest.raises(ConfigError, match="instance id"):
        keys.worker("ns", "decode", "a/b")


def test_urls() -> None:
    assert parse_url("127.0.0.1:99")[0] == [("http", "127.0.0.1", 99)]
    endpoints, credentials = parse_url("https://me:p%40ss@a:1,https://b")
    assert endpoints == [("https", "a", 1), ("https", "b", 2379)]
    assert credentials == ("me", "p@ss")
    assert "p%40ss" not in redact("https://me:p%40ss@a:1")
    for bad in ("", "ftp://x", "http://x/path", "http://:2379", "http://x:port"):
        with pytest.raises(ConfigError):
            parse_url(bad)


# ------------------------------------------------------------------ leases


def judge() -> LeaseJudge:
    return LeaseJudge(ttl_s=6.0, last_ok=1000.0, header=STORE)


def test_gone_in_a_continuous_conversation_is_revoked() -> None:
    later = Header(cluster_id=7, member_id=2, revision=12, raft_term=2)
    assert judge().gone(1002.0, later) is LeaseEnd.REVOKED


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
    assert judge().gone(1002.0, header) is LeaseEnd.OUTAGE


def test_gone_after_a_break_is_an_outage_until_a_later_keep_alive() -> None:
    rule = judge()
    rule.broke(1001.0)
    assert rule.gone(1002.0, STORE) is LeaseEnd.OUTAGE
    rule.alive(1000.5, STORE)  # sent before the break: proves nothing about after it
    assert rule.gone(1002.0, STORE) is LeaseEnd.OUTAGE
    rule.alive(1001.5, STORE)
    assert rule.gone(1002.0, STORE) is LeaseEnd.REVOKED


def test_gone_after_this_process_slept_over_the_ttl_is_an_outage() -> None:
    assert judge().gone(1006.0, STORE) is LeaseEnd.OUTAGE


@pytest.mark.parametrize("etcd_s", [6.0, 3600.0, -1.0], ids=["ttl", "hour", "set back"])
def test_gone_while_every_clock_of_this_machine_stood_still_is_an_outage(etcd_s: float) -> None:
    """A paused virtual machine: no second passed here, but etcd's clock went on."""
    rule = judge()
    rule.alive(1000.0, msgspec.structs.replace(STORE, date=100.0))
    later = msgspec.structs.replace(STORE, date=100.0 + etcd_s)
    assert rule.gone(1001.0, later) is LeaseEnd.OUTAGE


def test_etcds_clock_in_step_with_ours_leaves_a_revoke_a_revoke() -> None:
    rule = judge()
    rule.alive(1000.0, msgspec.structs.replace(STORE, date=100.0))
    later = msgspec.structs.replace(STORE, date=102.0)
    assert rule.gone(1001.5, later) is LeaseEnd.REVOKED


async def test_gone_after_this_machine_slept_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux stops CLOCK_MONOTONIC while the machine sleeps, and CLOCK_BOOTTIME goes on."""
    slept_s, real = 0.0, time.clock_gettime

    def boot_clock(which: int) -> float:
        return real(which) + (slept_s if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", boot_clock)
    lease = await Lease.grant(FakeApi(FakeClock(), 0), 3)
    slept_s = 3600.0
    lease.start()
    lease.check_now()
    assert await asyncio.wait_for(lease.wait(), 10) is LeaseEnd.OUTAGE


class FakeApi:
    """Answers keep-alives from a script; an exception is raised, the last answer repeats."""

    def __init__(self, clock: FakeClock, *script: int | Exception) -> None:
        self.clock, self.script, self.sent = clock, list(script), 0

    async def grant_lease(self, ttl_s: int) -> tuple[int, int, Header]:
        return 1, ttl_s, STORE

    async def revoke_lease(self, lease_id: int) -> None:
        raise RegistryUnavailable("gone away")

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> KeepAlive:
        self.sent += 1
        self.clock.now += 1.0
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        return KeepAlive(STORE, answer)


async def end_of(*script: int | Exception) -> tuple[LeaseEnd, FakeApi]:
    clock = FakeClock()
    api = FakeApi(clock, *script)
    lease = await Lease.grant(api, 3, clock=clock)
    lease.start()
    while not lease._task or not lease._task.done():
        lease.check_now()
        await asyncio.sleep(0)
    return await lease.wait(), api


async def test_lease_ends() -> None:
    down = RegistryUnavailable("down")
    assert (await end_of(3, 3, 0))[0] is LeaseEnd.REVOKED
    assert (await end_of(3, down, 0))[0] is LeaseEnd.OUTAGE
    assert (await end_of(3, down, 3, 0))[0] is LeaseEnd.REVOKED
    ended, api = await end_of(3, down)
    assert ended is LeaseEnd.OUTAGE
    assert api.sent == 3  # answered: sent at 0 s; failures seen at 2 and 3 s: the TTL is 3


async def test_revoking_without_etcd_does_not_raise() -> None:
    lease = await Lease.grant(FakeApi(FakeClock(), 3), 3, clock=FakeClock())
    lease.start()
    await lease.revoke()


# ------------------------------------------------------------------ watch state


def kv(key: bytes, mod: int, value: bytes = b"") -> KeyValue:
    return KeyValue(key, value, mod, mod, 1, 0)


def test_known_diff_tells_what_changed_and_no_more() -> None:
    known = _Known({})
    assert known.diff([kv(b"a", 2), kv(b"b", 3)], 3) == [Put(b"a", b"", 2), Put(b"b", b"", 3)]
    # Another life of the store: b looks the same but is not, a is gone.
    assert known.diff([kv(b"b", 2)], 2) == [Delete(b"a", b"", 2), Put(b"b", b"", 2)]
    assert known.diff([kv(b"b", 2)], 5) == []
    assert known.rev == 5


def test_known_apply_drops_what_was_seen() -> None:
    known = _Known({}, rev=4)
    events = [_Event(kv(b"a", 4)), _Event(kv(b"a", 5, b"x")), _Event(kv(b"a", 6), "DELETE")]
    assert known.apply(events) == [Put(b"a", b"x", 5), Delete(b"a", b"", 6)]
    assert (known.keys, known.rev) == ({}, 6)


# ------------------------------------------------------------------ settings


def test_settings_parse() -> None:
    assert settings.parse(b"{}", RouterConfig) == RouterConfig()
    assert settings.parse(b'{"max_prefill_queue_size":3}', RouterConfig).max_prefill_queue_size == 3
    for bad, told in {
        b'{"policy":"sometimes"}': "policy.*always_local",
        b'{"remote_timeout_s":0}': "remote_timeout_s.*more than 0",
        b'{"max_local_prefill_length":"7"}': "max_local_prefill_length.*whole number",
        b'{"polcy":"conditional"}': "polcy",
        b"\xff": "router settings",
    }.items():
        with pytest.raises(ConfigError, match=told):
            settings.parse(bad, RouterConfig)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("policy", "always_remote", "always_remote"), ("remote_timeout_s", " 2.5 ", 2.5),
     ("max_prefill_queue_size", "0", 0)],
)  # fmt: skip
def test_settings_text(name: str, text: str, value: object) -> None:
    assert settings._from_text(RouterConfig, name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("policy", "Conditional"), ("remote_timeout_s", "nan"), ("remote_timeout_s", "inf"),
     ("remote_timeout_s", "-1"), ("max_prefill_queue_size", "1.5"),
     ("max_local_prefill_length", ""), ("max_local_prefill_length", "null")],
)  # fmt: skip
def test_settings_bad_text_names_the_setting_and_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"router.{name}.*must be"):
        settings._from_text(RouterConfig, name, text)


def test_setting_one_field_repairs_a_bad_key() -> None:
    stored = b'{"policy":"nonsense","max_prefill_queue_size":9,"who":1}'
    assert settings._good_fields(stored, RouterConfig) == {"max_prefill_queue_size": 9}
    assert settings._good_fields(b"[]", RouterConfig) == {}
    with pytest.raises(ConfigError, match=r"router\.policy"):
        settings.find("router.colour")


def test_queue_settings_are_all_unset_until_somebody_sets_them() -> None:
    assert set(msgspec.to_builtins(settings.parse(b"{}", QueueSettings)).values()) == {None}
    assert settings.parse(b'{"replicas":3}', QueueSettings) == QueueSettings(replicas=3)


def test_a_queue_setting_is_only_found_by_its_whole_name() -> None:
    assert settings.find("queue.replicas") == (QueueSettings, "replicas")
    assert settings.find("policy") == settings.find("router.policy") == (RouterConfig, "policy")
    for key in ("replicas", "router.replicas", "queue.policy"):
        with pytest.raises(ConfigError, match=r"no setting.*queue\.max_bytes"):
            settings.find(key)


@pytest.mark.parametrize(
    ("name", "text"),
    [("replicas", "0"), ("replicas", "6"), ("max_bytes", "-1"), ("max_bytes", "1G"),
     ("max_jobs", "0"), ("ack_wait_s", "0.1"), ("ack_wait_s", "nan"), ("max_deliver", "none"),
     ("max_deliver", "null"), ("publish_timeout_s", "0"), ("publish_timeout_s", "61")],
)  # fmt: skip
def test_queue_settings_refuse_bad_text(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"queue.{name}.*must be .*unset"):
        settings._from_text(QueueSettings, name, text)
