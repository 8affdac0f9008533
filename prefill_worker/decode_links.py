"""The connections to the decode workers of our model: one to each that the directory lists.

A decode worker that has left the directory may drain, so the connection stays while it is used.

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pullfill.errors import ClaimRefused, PeerUnavailable
from pullfill.net.peer_link import PeerLink
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.reach import OpenTransferWorker, SharedTransferWorker
from pullfill.registry.directory import Directory
from pullfill.registry.self_checks import SelfChecks, pair_of
from pullfill.runtime import log
from pullfill.wire import (
    MAX_TEXT,
    Claim,
    Commit,
    CommitReply,
    Compat,
    Draining,
    GiveUp,
    Grant,
    Heartbeat,
    Hello,
    LeaseHello,
    Load,
    Ready,
    Refused,
    Revoke,
    ToPrefill,
    Trial,
    Welcome,
    WorkerRecord,
)

if TYPE_CHECKING:
    from pullfill.prefill_worker.handoff import Handoff

logger = log.get("prefill_worker.decode_links")


class DecodeLink(PeerLink):
    """The connection to one decode worker, and the transfer worker into its memory.

    If it breaks, every attempt granted over it ends, and the decode worker revokes their grants.

    jobs: those that are claimed over it, or were granted over it, by id."""

    heard = ToPrefill

    def __init__(self, links: DecodeLinks, record: WorkerRecord) -> None:
        self.record = record
        self._links = links
        self.jobs: dict[str, Handoff] = {}
        self._said = ""
        self.transfer = SharedTransferWorker(links.open_transfer_worker, record.instance_id)
        hello = replace(links.hello, max_prompt_tokens=0)
        if (most := links.hello.max_prompt_tokens or math.inf) < record.max_model_len - 1:
            hello = links.hello
            logger.info(
                "decode worker %s takes prompts of up to %d tokens, and this worker up to %d (its "
                "--max-model-len): longer ones are left to other prefill workers",
                record.instance_id, record.max_model_len - 1, most,
            )  # fmt: skip
        super().__init__(record.instance_id, record.control, hello, links.key)
        self.when_ended(self.transfer.close)

    # ------------------------------------------------------------------ what a job says

    async def claim(
        self, job_id: str, incarnation: str, ack: str, *, within_s: float = 10.0
    ) -> Grant:
        """Raises ClaimRefused with the decode worker's reason, PeerUnavailable."""
        load = self._links.load()
        reply = await self.ask(
            lambda rid: Claim(
                rid=rid, job_id=job_id, incarnation=incarnation, ack_subject=ack, load=load
            ),
            within_s,
        )
        if isinstance(reply, Refused):
            raise ClaimRefused(
                f"job {job_id}: {reply.reason.value}",
                reason=reply.reason.value,
                retry_after_s=reply.retry_after_s,
            )
        assert isinstance(reply, Grant)
        return reply

    async def commit(self, message: Commit | Ready, within_s: float) -> CommitReply:
        """Send a commit, or in pull mode a `Ready`, and return the answer.

        within_s: raise PeerUnavailable after this time."""
        load = self._links.load()
        reply = await self.ask(lambda rid: replace(message, rid=rid, load=load), within_s)
        assert isinstance(reply, CommitReply)
        return reply

    def tell(self) -> None:
        """Tell the decode worker if it has changed whether this worker pulls its jobs."""
        if self._links.why_none_of(self.record) != self._said:
            self.send(self.ping())

    def give_up(self, grant: Grant, cause: str, *, retry: bool) -> None:
        """Tell the decode worker that the attempt is over here.

        retry: whether another attempt may succeed."""
        self.send(
            GiveUp(
                job_id=grant.job_id, attempt=grant.attempt, incarnation=grant.incarnation,
                cause=cause[:500], retry=retry,
            )
        )  # fmt: skip

    # ------------------------------------------------------------------ as a PeerLink

    def greeting(self) -> Hello | LeaseHello:
        return replace(self._hello, why=self._links.why_none_of(self.record))

    def on_welcome(self, welcome: Welcome) -> None:
        self.transfer.forgive(welcome.regions)
        if self._links.leaving:
            self.send(Draining())
        logger.info("connected to decode worker %s", self.name)

    def on_message(self, message: Any) -> None:
        if isinstance(message, Revoke):
            if (job := self.jobs.get(message.job_id)) is not None:
                job.revoke(message)
        elif isinstance(message, Trial):
            self._links.trials.put_nowait(message)

    def on_unwanted(self, answer: Any) -> None:
        if isinstance(answer, Grant):
            self.give_up(answer, "answer came too late", retry=True)

    def on_silent(self) -> None:
        self.transfer.drop()  # with its credits. It is made anew

    def on_lost(self) -> None:
        for job in list(self.jobs.values()):
            job.link_lost()

    def on_over(self) -> None:
        self._links.forget(self)

    def again(self) -> bool:
        return self._links.lists(self.record)

    def needed(self) -> bool:
        return self._links.lists(self.record) or bool(self.jobs) or self.transfer.busy

    def ping(self) -> Heartbeat:
        why = self._said = self._links.why_none_of(self.record)
        return Heartbeat(why=why, load=self._links.load())


@dataclass(eq=False, repr=False)
class DecodeLinks:
    """See the module."""

    directory: Directory
    hello: Hello  # what this worker says of itself
    compat: Compat  # decode workers with another one are never connected
    open_transfer_worker: OpenTransferWorker  # connects to a decode worker's KV memory, on a thread
    key: ClusterKey | None = None  # the cluster key. Decode workers must hold the same one
    load: Callable[[], Load] = Load  # returns the load of this worker
    kept: SelfChecks | None = None  # results of self-checks. None: every decode worker gets our KV
    appear_s: float = 2.0  # how long a job waits for the connection to its decode worker

    def __post_init__(self) -> None:
        self._on_checked: Callable[[], None] = lambda: None
        self._was_checking: str | None = None
        self._records: dict[str, WorkerRecord] = {}
        self.links: dict[str, DecodeLink] = {}  # by name of the decode worker
        # Those that have not ended, with those that nobody finds any more.
        self._all: set[DecodeLink] = set()
        self._started = self._closed = False
        self.leaving = False
        self.why_not = ""  # why this worker pulls no jobs. Empty: it pulls
        # The jobs of self-checks that decode workers have sent.
        self.trials: asyncio.Queue[Trial] = asyncio.Queue()
        # Before `start`: this worker registers before that, and `checking` says as what.
        self._unsubscribe = [self.directory.subscribe(self._on_change)]
        for record in self.directory.workers("decode").values():
            self._on_change(None, record)

    def start(self, on_checked: Callable[[], None] = lambda: None) -> None:
        """Connect to the decode workers in the directory, now and when it changes.

        on_checked: called now, because this worker may have registered with another `checking`, and
        when `checking` has changed."""
        self._on_checked = on_checked
        if self.kept is not None:
            self._unsubscribe.append(self.kept.subscribe(self._refresh))
        self._started = True
        self._refresh()

    def leave(self) -> None:
        """Tell every decode worker that this worker drains: it pulls no more jobs.

        A decode worker that knows no other prefill worker then prefills locally."""
        self.leaving = True
        for link in self.links.values():
            link.send(Draining())

    def pause(self, why: str) -> None:
        """Tell every decode worker why this worker pulls no jobs, now and with every Heartbeat.

        why: empty if it pulls again."""
        self.why_not = why
        for link in self.links.values():
            link.tell()

    async def close(self) -> None:
        self._closed = True
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        await asyncio.gather(*(link.close() for link in list(self._all)))

    @property
    def connected(self) -> list[str]:
        return sorted(name for name, link in self.links.items() if link.connected)

    # ------------------------------------------------------------------ the self-check

    @property
    def checking(self) -> str:
        """Why no decode worker in the directory gets our KV. Empty: one does, or there is none."""
        why = ""
        for record in self._records.values():
            if not (why := self._unchecked(record)):
                return ""
        return why

    def why_none_of(self, record: WorkerRecord) -> str:
        """Why this worker pulls no jobs of a decode worker. Empty: it does."""
        return (self.why_not or self._unchecked(record))[:MAX_TEXT]

    def _pair(self, record: WorkerRecord) -> str:
        return pair_of(self.hello.compat, record.computes, self.hello.computes)

    def _unchecked(self, record: WorkerRecord) -> str:
        if self.kept is None:
            return ""
        ours = self.hello.prefill_instance
        return self.kept.why_not(self._pair(record), record.instance_id, ours)

    # ------------------------------------------------------------------ for jobs

    def knows(self, instance_id: str) -> bool:
        """Whether the decode worker is in the directory, as far as etcd tells."""
        return instance_id in self._records or not self.directory.reachable

    def is_up(self, instance_id: str) -> bool:
        """Whether `find` succeeds at once."""
        link = self.links.get(instance_id)
        return link is not None and link.connected

    async def find(self, instance_id: str, *, trial: bool = False) -> DecodeLink:
        """Return the connected link to a decode worker.

        Raises PeerUnavailable, also if the self-check has not passed.

        trial: for the self-check itself."""
        # The directory may learn of it a little later than the job comes: the queue brings that one
        # again (`patience`).
        if (link := self.links.get(instance_id)) is None:
            raise PeerUnavailable(f"decode worker {instance_id} is not listed")
        await link.wait_up(self.appear_s)
        if not trial and (why := self._unchecked(link.record)):
            raise PeerUnavailable(why)
        return link

    # ------------------------------------------------------------------ for links

    def lists(self, record: WorkerRecord) -> bool:
        """Whether a decode worker is still in the directory, at this address."""
        now = self._records.get(record.instance_id)
        return now is not None and _same(now, record)

    def forget(self, link: DecodeLink) -> None:
        """Nobody finds this link any more. Granted jobs go on until it ends."""
        if self.links.get(link.name) is link:
            del self.links[link.name]

    def _open(self, record: WorkerRecord) -> None:
        link = self.links[record.instance_id] = DecodeLink(self, record)
        self._all.add(link)
        link.when_ended(lambda: self._all.discard(link))

    def _refresh(self) -> None:
        """Make the connections that are missing. Tell all what has changed."""
        if self._started and not self._closed:
            for name in self._records.keys() - self.links.keys():
                self._open(self._records[name])
            for link in self.links.values():
                link.tell()
            # Not at each change of the directory: it makes this worker look at its keys in etcd.
            if (why := self.checking) != self._was_checking:
                self._was_checking = why
                self._on_checked()

    # ------------------------------------------------------------------ the directory

    def _on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        record = new or old
        # A worker that has both sides is not connected to itself.
        if record is None or record.instance_id == self.hello.prefill_instance:
            return
        if new is None:  # it drains or is dead. Jobs that it has granted to us go on
            self._records.pop(record.instance_id, None)
        else:
            self._came(new)
        self._refresh()

    def _came(self, new: WorkerRecord) -> None:
        """A decode worker is new, or its record has changed."""
        name, theirs = new.instance_id, new.compat
        differences = self.compat.differs_from(theirs) if theirs is not None else ()
        if theirs is not None and not differences and new.control:
            self._records[name] = new
        else:
            self._records.pop(name, None)
        # It serves our model, but is not compatible.
        if differences and theirs is not None and theirs.model == self.compat.model:
            field, our_value, their_value = differences[0]
            logger.warning(
                "not connecting to %s: its %s is %r, ours is %r",
                name, field, their_value, our_value,
            )  # fmt: skip
        if (link := self.links.get(name)) is not None and not _same(link.record, new):
            link.end()


def _same(one: WorkerRecord, other: WorkerRecord) -> bool:
    """Whether a connection that was made to the one is a connection to the other."""
    return (one.incarnation, one.control) == (other.incarnation, other.control)
