"""Single questions and orders about workers, for joins and for the command line."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pullfill.errors import BadMessage, IncompatibleError, OtherVersion
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient, LeaseNotFound
from pullfill.wire import RoleMove, RoleOrder, WorkerRecord, WorkerRole, decode, encode

_KV_ROLES = frozenset({"decode", "prefill"})


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A registered worker. create_revision: when its key was made."""

    record: WorkerRecord
    lease_id: int
    create_revision: int


def decode_worker_record(namespace: str, key: bytes, value: bytes) -> WorkerRecord:
    """The record at `key`. Raises BadMessage, also if it is of another worker."""
    name = keys.parse_worker(namespace, key)
    record = decode(value, WorkerRecord)
    if name != (record.role, record.instance_id):
        raise BadMessage(
            f"the record says {record.role}/{record.instance_id}, its key something else"
        )
    return record


async def live_workers(client: EtcdClient, namespace: str) -> list[LiveWorker]:
    """All registered workers, oldest first. Unreadable ones are left out."""
    found = []
    for kv in (await client.get_prefix(keys.workers_prefix(namespace)))[0]:
        with suppress(BadMessage):
            record = decode_worker_record(namespace, kv.key, kv.value)
            found.append(LiveWorker(record, kv.lease, kv.create_revision))
    return sorted(found, key=lambda worker: worker.create_revision)


async def revoke_worker(
    client: EtcdClient, namespace: str, instance_id: str
) -> WorkerRecord | None:
    """Revoke the lease of one worker, which makes it drain. None: no such worker."""
    for worker in await live_workers(client, namespace):
        if worker.record.instance_id == instance_id:
            try:
                await client.revoke_lease(worker.lease_id)
            except LeaseNotFound:
                return None
            return worker.record
    return None


async def order_role(
    client: EtcdClient, namespace: str, instance_id: str, role: WorkerRole
) -> bool:
    """Order an elastic worker to change its role. False: it is not registered."""
    for worker in await live_workers(client, namespace):
        if worker.record.instance_id == instance_id:
            key, order = keys.role_order(namespace, instance_id), encode(RoleOrder(role=role))
            with suppress(LeaseNotFound):
                await client.put(key, order, worker.lease_id)
                return True
    return False


async def last_move(client: EtcdClient, namespace: str) -> tuple[RoleMove | None, int]:
    """Return a planner's last order, and the revision of its key for `note_move`. None: no order
    that can be read."""
    found = await client.get(keys.planner(namespace))
    if found is None:
        return None, 0
    with suppress(BadMessage):
        return decode(found.value, RoleMove), found.mod_revision
    return None, found.mod_revision


async def note_move(client: EtcdClient, namespace: str, move: RoleMove, revision: int) -> bool:
    """Note a planner's order before it is given. False: another planner was faster.

    revision: of the key, when this planner decided."""
    return await client.put_if(keys.planner(namespace), encode(move), mod_revision=revision)


async def refuse_if_incompatible(
    client: EtcdClient,
    namespace: str,
    record: WorkerRecord,
    *,
    registered: bool = False,
) -> None:
    """Raise IncompatibleError, naming the first field that differs from a live KV worker's.

    A namespace has one wire version, and one model, which is one of the fields.

    registered: our key is in etcd. Only workers whose key is older than ours count."""
    found, _ = await client.get_prefix(keys.workers_prefix(namespace))
    for kv in sorted(found, key=lambda kv: kv.create_revision):
        try:
            theirs = decode_worker_record(namespace, kv.key, kv.value)
        except OtherVersion as exc:
            who = " ".join(keys.parse_worker(namespace, kv.key) or ())
            raise IncompatibleError(
                f"{record.role} {record.instance_id} cannot join namespace {namespace!r}: {who} "
                f"lives there with {exc}, or use another --namespace",
                field="wire",
            ) from exc
        except BadMessage:
            continue
        if theirs.instance_id == record.instance_id:
            if registered:
                return
            continue
        if record.compat is None or record.role not in _KV_ROLES:
            continue
        if theirs.compat is None or theirs.role not in _KV_ROLES:
            continue
        if differences := record.compat.differs_from(theirs.compat):
            field, our_value, their_value = differences[0]
            raise IncompatibleError(
                f"{record.role} worker {record.instance_id} cannot join namespace {namespace!r}: "
                f"its {field} is {our_value!r}, but that of {theirs.role} worker "
                f"{theirs.instance_id} on {theirs.host} is {their_value!r}; start it with the same "
                f"{field}, or in another --namespace",
                field=field,
            )
