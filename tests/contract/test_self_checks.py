"""Kept results of self-checks against one real etcd."""

from __future__ import annotations

from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.self_checks import SelfChecks, clear, kept
from pullfill.wire import SelfCheck
from tests.support.workers import eventually


def result(passed: bool) -> SelfCheck:
    return SelfCheck(
        passed=passed, kv_difference=0.0 if passed else 0.4, kv_tolerance=1e-3,
        logprob_difference=None, logprob_tolerance=1e-2,
        decode_instance="d", prefill_instance="p",
    )  # fmt: skip


async def test_a_failure_stays_until_it_is_cleared(client: EtcdClient) -> None:
    checks = await SelfChecks.started(client, "kept")
    other = await SelfChecks.started(client, "kept")
    heard: list[tuple[str, bool | None]] = []
    other.on_change = lambda pair, found: heard.append((pair, found and found.passed))
    try:
        checks.keep("a", result(passed=True))
        await eventually(lambda: other.current.get("a") == result(passed=True))
        checks.keep("a", result(passed=False))
        await eventually(lambda: other.current.get("a") == result(passed=False))
        checks.keep("a", result(passed=True))
        checks.keep("b", result(passed=True))
        await eventually(lambda: "b" in other.current)
        assert other.current["a"] == result(passed=False)
        assert await clear(client, "kept") == ["a"]
        await eventually(lambda: "a" not in other.current)
        assert heard == [("a", True), ("a", False), ("b", True), ("a", None)]
        assert await kept(client, "kept") == {"b": result(passed=True)}
    finally:
        await checks.close()
        await other.close()


async def test_what_cannot_be_read_is_no_result(client: EtcdClient) -> None:
    await client.put(keys.self_check("odd", "a"), b"{}")
    await client.put(keys.self_check("odd", "b"), b'{"decode_instance":"\x80"}')
    checks = await SelfChecks.started(client, "odd")
    try:
        assert checks.current == {}
        assert await kept(client, "odd") == {}
    finally:
        await checks.close()
