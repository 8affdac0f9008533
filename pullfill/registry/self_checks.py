"""Results of self-checks at `self_checks/{pair}`. All workers watch them.

A pair names two kinds of workers, not two processes. So the keys have no lease: a result outlives
the workers that made it. Decode workers make the results (decode_worker/self_check.py).

Life: `start` → `current` follows etcd by itself → `close`. Subscribers are called after each
change. `kept` and `clear` are for the command line.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Delete, Follower, Put
from pullfill.runtime import log
from pullfill.wire import SelfCheck

_log = log.get("registry.self_checks")


def pair_of(compat_hash: str, decode_computes: str, prefill_computes: str) -> str:
    """Return the name of two kinds of workers. The last two: their `WorkerRecord.computes`.

    Empty: their prefills are never compared, because one of them has no model."""
    if not decode_computes or not prefill_computes:
        return ""
    text = f"{compat_hash} {decode_computes} {prefill_computes}"
    return blake2b(text.encode(), digest_size=8).hexdigest()


class SelfChecks(Follower):
    """See the module. current: the results, by pair."""

    def __init__(self, client: EtcdClient, namespace: str) -> None:
        super().__init__(client, keys.record(namespace, "self_checks"), "the self-checks")
        self.current: dict[str, SelfCheck] = {}

    def why_not(self, pair: str, decode_instance: str, prefill_instance: str) -> str:
        """Why the prefill worker must not bring KV to the decode worker. Empty: it may.

        pair: their kinds."""
        if not pair:
            return ""
        if (result := self.current.get(pair)) is None:
            return f"self_check_pending: not compared with the prefills of {decode_instance} yet"
        return "" if result.passed else result.advice(prefill_instance, decode_instance)

    def keep(self, pair: str, result: SelfCheck) -> None:
        """Write a result. While etcd is away, try again.

        A success never replaces a failure in etcd: somebody has to clear the failure."""
        self.current.setdefault(pair, result)
        self.write(lambda _: self._store(pair, result), f"self-check {pair}")
        self._tell()

    async def _store(self, pair: str, result: SelfCheck) -> None:
        key, value = self._prefix + pair, msgspec.json.encode(result)
        while (found := await self._client.get(key)) is None or not result.passed:
            revision = found.mod_revision if found is not None else 0
            if await self._client.put_if(key, value, mod_revision=revision):
                return

    def _on_change(self, event: Put | Delete) -> None:
        pair = event.key.decode("utf-8", "replace").removeprefix(self._prefix)
        before = self.current.get(pair)
        result: SelfCheck | None = None
        if isinstance(event, Put):
            try:
                result = msgspec.json.decode(event.value, type=SelfCheck)
            except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
                _log.error("the result of self-check %s is ignored: %s", pair, exc)
        if result is not None:
            self.current[pair] = result
        elif before is not None and before.passed:
            # Nobody clears a success, so etcd has lost its data.
            self.keep(pair, before)
        else:
            self.current.pop(pair, None)
        self._tell()


async def kept(client: EtcdClient, namespace: str) -> dict[str, SelfCheck]:
    """Return all readable results, by pair."""
    checks = await SelfChecks(client, namespace).start()
    await checks.close()
    return checks.current


async def clear(client: EtcdClient, namespace: str) -> list[str]:
    """Remove all failed results, so that workers check again. Returns their pairs."""
    failed = [pair for pair, r in (await kept(client, namespace)).items() if not r.passed]
    for pair in failed:
        await client.delete(keys.record(namespace, "self_checks", pair))
    return failed
