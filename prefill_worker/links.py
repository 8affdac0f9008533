"""One DecodeLink per decode worker of our model, as the directory sees them come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pullfill import log
from pullfill.errors import PeerUnavailable
from pullfill.prefill_worker.link import DecodeLink
from pullfill.prefill_worker.mover import Mover
from pullfill.registry.directory import Directory
from pullfill.security import ClusterKey
from pullfill.wire import Compat, Hello, Load, Revoke, Trial, WorkerRecord

logger = log.get("prefill_worker.links")

_APPEAR_S = 2.0
"""How long a job waits for the link to a decode worker that is in the directory."""
_UNKNOWN_S = 0.1
"""How long it waits for a decode worker that was never there: the watch may be behind the job."""
_REMEMBERED = 10_000


class Links:
    """asyncio thread only. `compat`: decode workers of another one are never connected."""

    def __init__(
        self,
        directory: Directory,
        hello: Hello,
        compat: Compat,
        open_mover: Callable[[WorkerRecord], Awaitable[Mover]],
        on_revoke: Callable[[DecodeLink, Revoke], None],
        on_lost: Callable[[DecodeLink], None],
        key: ClusterKey | None = None,
        on_trial: Callable[[Trial], None] = lambda _trial: None,
    ) -> None:
        self._directory = directory
        self._hello = hello
        self._compat = compat
        self._open_mover = open_mover
        self._on_revoke = on_revoke
        self._on_lost = on_lost
        self._key = key
        self._on_trial = on_trial
        self._links: dict[str, DecodeLink] = {}
        self._gone: dict[str, None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._leaving = False
        self._why_not = ""
        self.activity: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.load: Callable[[], Load] = Load
        """As of `DecodeLink`; set before `start`."""
        self._closed = False

    def start(self) -> None:
        """Connect to everyone known now and to everyone who comes."""
        self._directory.subscribe(self._on_change)
        for record in self._directory.workers("decode").values():
            self._on_change(None, record)

    def leave(self) -> None:
        """We drain: every decode worker prefills locally if it knows nobody else."""
        self._leaving = True
        for link in self._links.values():
            link.leave()

    def pause(self, why: str) -> None:
        """Tell every decode worker why this worker pulls no jobs for now. "": it pulls again."""
        self._why_not = why
        for link in self._links.values():
            link.pause(why)

    async def close(self) -> None:
        self._closed = True
        for link in list(self._links.values()):
            await link.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def knows(self, instance_id: str) -> bool:
        """Whether the decode worker is (still) in the directory, as far as etcd can tell."""
        link = self._links.get(instance_id)
        return (link is not None and not link.retired) or not self._directory.reachable

    @property
    def connected(self) -> list[str]:
        return sorted(i for i, link in self._links.items() if link.connected)

    @property
    def routes(self) -> dict[str, dict[str, object]]:
        """Over what we write, by decode worker, as far as we did."""
        routes = {instance_id: link.route for instance_id, link in self._links.items()}
        return {name: route for name, route in routes.items() if route is not None}

    def is_up(self, instance_id: str) -> bool:
        """Whether `find` finds it at once."""
        link = self._links.get(instance_id)
        return link is not None and link.connected

    async def find(self, instance_id: str) -> DecodeLink:
        """The connected link to a decode worker; waits briefly for one that is just appearing, and
        not for one that left the directory. Raises PeerUnavailable."""
        deadline = asyncio.get_running_loop().time() + _UNKNOWN_S
        while (link := self._links.get(instance_id)) is None:
            if instance_id in self._gone:
                raise PeerUnavailable(f"decode worker {instance_id} left the directory")
            left = deadline - asyncio.get_running_loop().time()
            self._changed.clear()
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                raise PeerUnavailable(f"decode worker {instance_id} is not known") from None
        await link.wait_up(_APPEAR_S)
        return link

    def _on_end(self, link: DecodeLink) -> None:
        instance_id = link.record.instance_id
        if self._links.get(instance_id) is not link:
            return
        del self._links[instance_id]
        if not link.retired and not self._closed:  # its key came back while its link was ending
            self._on_change(None, self._directory.workers("decode").get(instance_id))

    def _on_change(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        record = new or old
        if record is None or record.role != "decode":
            return
        if new is None:
            self._gone[record.instance_id] = None
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]
        else:
            self._gone.pop(record.instance_id, None)
        fits = (
            new is not None and new.compat is not None and not self._compat.differs_from(new.compat)
        )
        known = self._links.get(record.instance_id)
        same = (
            known is not None
            and new is not None
            and known.record.incarnation == new.incarnation
            and known.record.control == new.control
        )
        if known is not None and (same or new is None):
            if new is None:
                known.retire(self._on_end)
            else:
                known.retired = False
            return
        if known is not None:
            del self._links[record.instance_id]
            task = asyncio.ensure_future(known.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if new is not None and fits and new.control:
            self._links[new.instance_id] = DecodeLink(
                new, self._hello, self._open_mover, self._on_revoke, self._on_lost, self._key,
                on_trial=self._on_trial,
            )  # fmt: skip
            self._links[new.instance_id].activity = lambda: self.activity()
            self._links[new.instance_id].load = lambda: self.load()
            if self._leaving:
                self._links[new.instance_id].leave()
            self._links[new.instance_id].pause(self._why_not)
        elif (
            new is not None
            and new.compat is not None
            and new.compat.model == self._compat.model
            and (differences := self._compat.differs_from(new.compat))
        ):
            field, our_value, their_value = differences[0]
            logger.warning(
                "not connecting to %s: its %s is %r, ours is %r",
                new.instance_id, field, their_value, our_value,
            )  # fmt: skip
        self._changed.set()
