"""Messages nobody of ours would send, on the real stream and the real control channel: refused,
counted, and not a byte written."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from nats.js import JetStreamContext

from pullfill.net.channel import Channel, split_address
from pullfill.queue.streams import EXPECTED_STREAM, MSG_ID, Names
from pullfill.wire import (
    Claim,
    Commit,
    Hello,
    PrefillJob,
    Revoke,
    StageTimings,
    ToPrefill,
    Welcome,
    decode,
    encode,
    u32,
)
from tests.support.checked import checked
from tests.support.cluster import BLOCK, Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt
from tests.support.pulls import granted, in_time, until_full

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WRITTEN = "pullfill_kv_write_bytes_total"


class Target:
    """The decode worker of a cluster, as its messages name it, and its job stream."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        (self.decode,) = cluster.of("decode")
        (self.prefill,) = cluster.of("prefill")
        self.record = cluster.records("decode")[self.decode.instance_id]
        self.compat = self.record.compat.hash()
        self.names = Names(cluster.namespace, self.compat)

    def job(self, **changes: Any) -> PrefillJob:
        """A well-formed job that this decode worker never published."""
        tokens = random_prompt(700, seed=9)
        fields: dict[str, Any] = {
            "job_id": secrets.token_hex(16),
            "incarnation": self.record.incarnation,
            "decode_instance": self.record.instance_id,
            "request_id": "forged",
            "compat": self.compat,
            "token_ids": u32.pack(tokens),
            "hit_tokens": 0,
            "block_ids": u32.pack(range(-(-len(tokens) // BLOCK))),
            "timeout_s": 30.0,
        }
        return PrefillJob(**(fields | changes))

    def publish(self, *bodies: bytes, job_id: str = "", tokens: int = 700) -> None:
        """By hand, as a producer does."""

        async def work(stream: JetStreamContext, name: str) -> None:
            for body in bodies:
                headers = {
                    MSG_ID: job_id or secrets.token_hex(16),
                    EXPECTED_STREAM: name,
                }
                await stream.publish(self.names.job(tokens), body, headers=headers)

        self.cluster.jetstream(work)

    def settled(self) -> None:
        """Wait until no job is in the stream. Decode workers do not know of those that were
        published by hand."""

        async def stored(stream: JetStreamContext, name: str) -> int:
            return (await stream.stream_info(name)).state.messages

        until(lambda: not self.cluster.jetstream(stored), 20, "all are settled")

    def stored(self) -> str:
        """The id of the one job in the stream."""

        async def work(stream: JetStreamContext, name: str) -> str:
            state = (await stream.stream_info(name)).state
            assert state.messages == 1
            return ((await stream.get_msg(name, state.first_seq)).headers or {})[MSG_ID]

        return self.cluster.jetstream(work)

    def replace_stored(self, change: Callable[[bytes], bytes]) -> None:
        """Put another body under the same id in the place of the newest job in the stream."""

        async def work(stream: JetStreamContext, name: str) -> None:
            info = await stream.stream_info(name)
            found = await stream.get_msg(name, info.state.last_seq)
            await stream.delete_msg(name, info.state.last_seq)
            # The id must be forgotten first, or the forgery is refused as a duplicate.
            window, info.config.duplicate_window = info.config.duplicate_window, 0.1
            await stream.update_stream(info.config)
            await asyncio.sleep(0.3)
            body = change(found.data or b"")
            await stream.publish(found.subject, body, headers=dict(found.headers or {}))
            info.config.duplicate_window = window
            await stream.update_stream(info.config)

        self.cluster.jetstream(work)


@pytest.fixture
def target(paired: Cluster) -> Target:
    return Target(paired)


@pytest.mark.essential
def test_row_13_poison_jobs(target: Target, oracle: Oracle) -> None:
    """Dead-lettered at once; the worker lives and loses nothing."""
    poison = [
        b"",
        b"\xc1" * 40,
        secrets.token_bytes(6 << 20),
        encode(target.job())[:-1],
        encode(target.job(token_ids=b"")),
        encode(target.job(token_ids=b"abc")),
    ]
    with checked(target.cluster, oracle, dead_letters=len(poison)) as check:
        with check.load(threads=1, lengths=(500,), seed=9300):
            before = target.cluster.load_of(target.prefill)["failed"]
            target.publish(*poison)
            until(
                lambda: target.cluster.load_of(target.prefill)["failed"] == before + len(poison),
                20, "all are seen",
            )  # fmt: skip
            target.settled()
    assert target.prefill.alive


@pytest.mark.essential
def test_row_25_forged_jobs(target: Target, oracle: Oracle) -> None:
    """What the decode worker never published is refused at its claim, whatever blocks it names."""
    cluster = target.cluster
    beyond = u32.pack(range(1_000_000, 1_000_000 + 22))
    forged = [
        target.job(),
        target.job(block_ids=beyond),
        target.job(incarnation="0" * 32),
    ]
    with checked(cluster, oracle, stale={"claim": len(forged)}):
        written, memory = cluster.counter(WRITTEN), target.decode.kv_digest()
        for job in forged:
            target.publish(encode(job), job_id=job.job_id)
        nobody = target.job(decode_instance="decode-nobody")
        target.publish(encode(nobody), job_id=nobody.job_id)
        target.settled()
        assert cluster.counter(WRITTEN) == written
        assert target.decode.kv_digest() == memory


@pytest.mark.essential
def test_row_25_a_job_changed_in_the_stream(target: Target, oracle: Oracle) -> None:
    """The message that was published is gone, so the prompt is served locally, and the one in its
    place is refused. Not a byte of it is written: all bytes are of handoffs that ended well."""
    cluster, worker = target.cluster, target.prefill

    def moved(body: bytes) -> bytes:
        job = decode(body, PrefillJob)
        blocks = [block + 1_000_000 for block in u32.unpack(job.block_ids)]
        return encode(msgspec.structs.replace(job, block_ids=u32.pack(blocks)))

    with checked(cluster, oracle, fallbacks={"job_gone": 1}, stale={"claim": 1}) as check:
        in_time(cluster)
        # Busy with prompts that fill its budget, the worker leaves the next job in the stream.
        worker.arm("prefill.before_write=hold@1")
        written, held = cluster.counter(WRITTEN), granted(cluster)
        with check.load(threads=2, lengths=(2100,), max_tokens=1, seed=9400) as decoy:
            until_full(cluster, held, 2)
            with check.load(threads=1, lengths=(900,), max_tokens=1, seed=9410) as load:
                until(lambda: cluster.status()["queue"]["depth_jobs"] == 3, 10, "in the stream")
                target.replace_stored(moved)
                until(lambda: load.done, 30, "answered")
                worker.arm("")
        until(lambda: check.stale().get("claim"), 10, "the changed job was refused")
        target.settled()
        told = [check.told(answer) for _, answer in (*decoy.done, *load.done)]
        assert decoy.done
        assert cluster.counter(WRITTEN) - written == sum(t["kv_bytes"] for t in told) > 0


async def mallory(target: Target, job_id: str) -> list[str]:
    """A control client made by hand; how the decode worker answers its forgeries."""
    host, port = split_address(target.record.control)
    reader, writer = await asyncio.open_connection(host, port)
    channel = Channel(reader, writer)

    async def ask(message: msgspec.Struct) -> Any:
        channel.write(message)
        while isinstance(answer := await channel.read(ToPrefill), Revoke):
            pass
        return answer

    def commit(attempt: int, blocks: int, job: str = job_id) -> Commit:
        return Commit(
            rid=9, job_id=job, attempt=attempt, incarnation=target.record.incarnation,
            blocks=blocks, kv_bytes=1, timings=StageTimings(),
        )  # fmt: skip

    def claim(job: str, incarnation: str = target.record.incarnation) -> Claim:
        return Claim(rid=1, job_id=job, incarnation=incarnation)

    try:
        hello = Hello(prefill_instance="prefill-mallory", compat=target.compat)
        assert isinstance(await ask(hello), Welcome)
        memory = target.decode.kv_digest()
        answers = [
            (await ask(claim("0" * 32))).reason,
            (await ask(claim(job_id, "0" * 32))).reason,
            (await ask(commit(1, 28))).reason,
            (await ask(commit(7, 28))).reason,
            (await ask(commit(1, 1_000_000, "0" * 32))).reason,
        ]
        assert target.decode.kv_digest() == memory
        # Whoever is let in may claim, but not what another worker works on.
        answers.append((await ask(claim(job_id))).reason)
        answers.append((await ask(commit(1, 28))).reason)
        return [str(a) for a in answers]
    finally:
        writer.close()


@pytest.mark.essential
def test_row_25_forged_claims_and_commits(target: Target, oracle: Oracle) -> None:
    cluster, worker = target.cluster, target.prefill
    with checked(cluster, oracle, stale={"claim": 2, "commit": 4}) as check:
        worker.arm("prefill.before_write=hold@1")
        with check.load(threads=1, lengths=(900,), max_tokens=1, seed=9500) as load:
            until(lambda: cluster.load_of(worker)["jobs"], 10, "the worker holds the job")
            job_id = target.stored()
            answers = asyncio.run(mallory(target, job_id))
            worker.arm("")
            until(lambda: load.done, 30, "answered")
        assert answers == [
            "unknown_job", "stale_incarnation", "stale", "stale", "stale", "in_progress", "stale"
        ]  # fmt: skip
